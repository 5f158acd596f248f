"""What programs expect of an OpenAI endpoint: 56 things that clients of several kinds were seen to rely on.

Those that need tools, forms of output or the Responses API are elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedEngine

from outrider.serving import Authenticator, Caller

Check = Callable[[Any], Awaitable[None]]
CHECKS: list[Check] = []
# Bodies of chat by what they show, and the field that is refused, if any.
BODIES: dict[str, tuple[dict[str, Any], str]] = {}
TURNS: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "counter", "messages": TURNS, "max_tokens": 4, "temperature": 0}
TEXT: dict[str, Any] = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
SAID = "^_`a"
JSON_HEADERS = {"content-type": "application/json"}


def expected(check: Check) -> Check:
    CHECKS.append(check)
    return check


def accepted(name: str, **more: Any) -> None:
    """A body that is answered as the plain one."""
    BODIES[name] = more, ""


def refused(name: str, param: str, **more: Any) -> None:
    BODIES[name] = more, param


accepted("whole_numbers_may_be_written_as_floats", max_tokens=4.0, n=1.0, seed=7.0)
accepted("null_counts_as_not_given", n=None, stop=None, seed=None, stream=None, logit_bias=None, user=None, tools=None)
accepted("the_newer_name_of_the_limit_wins", max_completion_tokens=4, max_tokens=100)
accepted("null_of_the_newer_name_leaves_the_older", max_completion_tokens=None)
accepted("a_model_may_be_left_out", model=None)
accepted("seeds_may_be_negative", seed=-1)
accepted("seeds_have_64_bits", seed=2**64 - 1)
accepted("records_are_taken", metadata={"a": "b"}, store=False, user="Zoë", service_tier="auto", safety_identifier="x")
accepted("hints_are_taken", prompt_cache_key="k", reasoning_effort="low", verbosity="low", parallel_tool_calls=True)
accepted("empty_tools_are_none", tools=[], tool_choice="none")
accepted("text_is_a_format", response_format={"type": "text"}, modalities=["text"])
accepted("switches_of_vllm", top_k=-1, min_p=0.0, repetition_penalty=1.0, skip_special_tokens=True, ignore_eos=False)
accepted("a_bias_of_nothing", logit_bias={}, stop=[], stop_token_ids=[])
accepted("extra_penalties_of_nothing", presence_penalty=0, frequency_penalty=0.0, top_p=1)
accepted("stream_options_without_wishes", stream_options={})
accepted("five_stops_and_more", stop=["1", "2", "3", "4", "5", "6"])
refused("no_answer_is_none", "n", n=0)
refused("no_more_answers_than_allowed", "n", n=1000)
refused("no_limit_of_nothing", "max_tokens", max_tokens=0)
refused("numbers_are_no_strings", "temperature", temperature="0.7")
refused("flags_are_no_strings", "stream", stream="true")
refused("biases_of_tokens_that_are_none", "logit_bias[99999]", logit_bias={"99999": 1})
refused("biases_of_words", "logit_bias", logit_bias={"hello": 1})
refused("more_stops_than_allowed", "stop", stop=[str(i) for i in range(17)])
refused("images_are_not_read", "messages[0].content[0].type", messages=[
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
])  # fmt: skip
refused("misspelt_fields_are_named", "max_token", max_token=5)
refused("no_messages", "messages", messages=[])


@expected
async def contents_are_strings_or_parts(gateway: Any) -> None:
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        turns = [{"role": "developer", "content": content, "name": "ann"}, {"role": "user", "content": ""}]
        answer = await gateway.openai.chat.completions.create(**{**ASKED, "messages": turns})
        assert answer.choices[0].message.content
        assert gateway.targets[0].engine.requests[-1].token_ids[:10] == tuple(3 + byte for byte in b"[system]hi")


@expected
async def an_answer_has_openais_fields(gateway: Any) -> None:
    answer = await gateway.openai.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "length")
    assert choice.message.refusal is None and choice.message.tool_calls is None and choice.logprobs is None
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "counter"
    assert abs(answer.created - time.time()) < 3600 and answer.system_fingerprint


@expected
async def usage_adds_up(gateway: Any) -> None:
    usage = (await gateway.openai.chat.completions.create(**ASKED)).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 4 and usage.prompt_tokens_details.cached_tokens == 0


@expected
async def an_answer_can_be_sent_back(gateway: Any) -> None:
    answer = await gateway.openai.chat.completions.create(**ASKED)
    turns = [*TURNS, answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    assert (await gateway.openai.chat.completions.create(**{**ASKED, "messages": turns})).choices
    turns[1] = answer.choices[0].message
    assert (await gateway.openai.chat.completions.create(**{**ASKED, "messages": turns})).choices


@expected
async def chunks_have_openais_fields(gateway: Any) -> None:
    stream = await gateway.openai.chat.completions.create(**ASKED, stream=True)
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "length"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID


@expected
async def usage_of_a_stream_comes_once_at_its_end(gateway: Any) -> None:
    options: Any = {"include_usage": True}
    stream = await gateway.openai.chat.completions.create(**ASKED, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


@expected
async def choices_of_a_stream_have_indexes(gateway: Any) -> None:
    said = {0: "", 1: "", 2: ""}
    async for chunk in await gateway.openai.chat.completions.create(**ASKED, n=3, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(said.values()) == {SAID}


@expected
async def streams_are_events(gateway: Any) -> None:
    answer = await gateway.http.post("/v1/chat/completions", json={**ASKED, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in answer.text.split("\n\n") if line)


@expected
async def helpers_gather_a_stream(gateway: Any) -> None:
    # Up to the end token, since the helper raises where an answer was cut.
    async with gateway.openai.chat.completions.stream(**{**ASKED, "max_tokens": 230}) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        said = (await stream.get_final_completion()).choices[0].message.content
    assert "".join(deltas) == said and said.startswith(SAID)


@expected
async def raw_answers_have_headers(gateway: Any) -> None:
    raw = await gateway.openai.chat.completions.with_raw_response.create(**ASKED)
    assert raw.headers["x-request-id"] and raw.parse().choices
    assert (await gateway.openai.chat.completions.create(**ASKED))._request_id
    async with gateway.openai.chat.completions.with_streaming_response.create(**ASKED) as streamed:
        assert json.loads(await streamed.read())["choices"]


@expected
async def synchronous_clients_work(gateway: Any) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{gateway.url}/v1/", api_key="any") as client:
            parts = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**ASKED, stream=True)]
            assert client.models.list().data[0].id == "counter"
        return "".join(part or "" for part in parts)

    assert await asyncio.to_thread(ask) == SAID


@expected
async def completions_have_openais_fields(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(**TEXT)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcd", "length")
    stream = await gateway.openai.completions.create(**TEXT, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "bcd"


@expected
async def several_prompts_are_answered_in_order(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(**{**TEXT, "prompt": ["a", "k"], "n": 2})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["bcd", "bcd", "lmn", "lmn"]


@expected
async def prompts_may_be_token_ids(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(**{**TEXT, "prompt": [3 + ord("a")]})
    assert answer.choices[0].text == "bcd" and answer.usage.prompt_tokens == 1


@expected
async def a_stop_string_ends_and_is_cut(gateway: Any) -> None:
    answer = await gateway.openai.completions.create(**{**TEXT, "max_tokens": 9, "stop": "e"})
    assert answer.choices[0].text == "bcd"


@expected
async def logprobs_of_chat_name_tokens(gateway: Any) -> None:
    answer = await gateway.openai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=1)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == SAID
    assert [bytes(entry.bytes) for entry in entries] == [character.encode() for character in SAID]
    assert all(len(entry.top_logprobs) == 1 and entry.logprob <= 0 for entry in entries)


@expected
async def models_are_listed_and_found(gateway: Any) -> None:
    listed = await gateway.openai.models.list()
    assert listed.object == "list" and [model.id for model in listed.data] == ["counter"]
    model = await gateway.openai.models.retrieve("counter")
    assert model.object == "model" and model.owned_by and model.created > 0
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.models.retrieve("other")


@expected
async def an_unknown_model_is_not_found(gateway: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.openai.chat.completions.create(**{**ASKED, "model": "other"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@expected
async def a_prompt_that_is_too_long_has_openais_code(gateway: Any) -> None:
    turns = [{"role": "user", "content": "a" * 400}]
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai.chat.completions.create(**{**ASKED, "messages": turns})
    assert caught.value.code == "context_length_exceeded"


@expected
async def errors_are_objects_with_an_id(gateway: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai.chat.completions.create(**{**ASKED, "temperature": -1})
    assert caught.value.body["type"] == "invalid_request_error" and caught.value.request_id
    assert caught.value.param == "temperature" and "temperature" in caught.value.message


@expected
async def paths_and_methods_fail_in_json(gateway: Any) -> None:
    for method, path, status in (
        ("POST", "/v1/embeddings", 404), ("POST", "/v1/audio/speech", 404), ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/counter", 405), ("GET", "/nothing", 404),
    ):  # fmt: skip
        answer = await gateway.http.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
        assert answer.json()["error"]["message"]


@expected
async def health_is_known_by_get_and_head(gateway: Any) -> None:
    for method in ("GET", "HEAD"):
        assert (await gateway.http.request(method, "/health")).status_code == 200
        assert (await gateway.http.request(method, "/v1/models")).status_code == 200


@expected
async def other_origins_may_not_ask(gateway: Any) -> None:
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = await gateway.http.options("/v1/chat/completions", headers=asked)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


@expected
async def compressed_bodies_are_refused_by_name(gateway: Any) -> None:
    headers = JSON_HEADERS | {"content-encoding": "gzip"}
    answer = await gateway.http.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert answer.status_code == 415 and "content-encoding is gzip" in answer.json()["error"]["message"]
    headers["content-encoding"] = "identity"
    assert (await gateway.http.post("/v1/completions", content=json.dumps(TEXT), headers=headers)).status_code == 200


@expected
async def what_is_no_json_is_refused(gateway: Any) -> None:
    for body in (b"", b"null", b"[]", b'"x"', b"{", b'{"a": NaN}', b'{"a": 1e999}', b"\xff", b"\xef\xbb\xbf{}"):
        answer = await gateway.http.post("/v1/completions", content=body, headers=JSON_HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body


@expected
async def requests_may_come_behind_each_other(gateway: Any) -> None:
    """Pipelined, on one connection; the last one closes it."""
    reader, writer = await asyncio.open_connection(*gateway.server.address.rsplit(":", 1))
    head = f"Host: {gateway.server.address}\r\n"
    body = json.dumps(TEXT)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\n{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Expect: 100-continue\r\n\r\n{body}GET /health HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
    )
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 100 Continue\r\n") and answer.count("HTTP/1.1 200 OK") == 2
    assert '"bcd"' in answer and answer.endswith('{"status":"ok"}')


@expected
async def clients_that_leave_end_their_answer(gateway: Any) -> None:
    asked = {**TEXT, "max_tokens": 200, "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=asked) as answer:
        async for _ in answer.aiter_text():
            break
    await gateway.idle()


async def test_bodies_are_taken_or_refused_by_name(gateway: Any) -> None:
    for name, (more, param) in BODIES.items():
        answer = await gateway.http.post("/v1/chat/completions", json={**ASKED, **more})
        if param:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), name
        else:
            assert answer.status_code == 200, (name, answer.text)
            assert answer.json()["choices"][0]["message"]["content"] == SAID, name


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_is_as_expected(gateway: Any, check: Check) -> None:
    await check(gateway)


async def test_a_wrong_key_is_an_authentication_error(gateways: Any) -> None:
    key = "sixteen-letters!"
    async with gateways(serving={"authenticator": Authenticator({key: Caller("acme")})}, token=key) as gateway:
        assert (await gateway.openai.chat.completions.create(**ASKED)).choices[0].message.content == SAID
        with pytest.raises(openai.AuthenticationError):
            await gateway.openai.with_options(api_key="wrong").chat.completions.create(**ASKED)


async def test_a_full_server_says_when_to_come_again(gateways: Any) -> None:
    engine = ScriptedEngine(max_sequences=1)
    engine.paused.set()
    async with gateways(engine) as gateway:
        first = asyncio.create_task(gateway.openai.completions.create(**{**TEXT, "max_tokens": 20}))
        while not engine.open_sequences:
            await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.openai.completions.create(**TEXT)
        assert float(caught.value.response.headers["retry-after"]) > 0
        engine.go_on()
        assert (await first).choices[0].text


def test_none_is_lost() -> None:
    assert len(BODIES) + len(CHECKS) + 2 == 56
