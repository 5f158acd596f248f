"""The gateway over HTTP, before real servers with a scripted engine: "a" is continued with "bcd"."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine
from scripted_service import byte_tokenizer
from tcp_server import answering
from waits import HUNG_SECONDS, until
from warm_python import shared_python

from outrider.errors import DeadlineExceeded, Loading
from outrider.serving import Authenticator, Caller
from outrider_client.client import Client
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.failures import NoTarget
from outrider_gateway.http import ResponseWriter
from outrider_gateway.server import GatewayServer
from outrider_gateway.targets import Target as GatewayTarget
from outrider_gateway.targets import Targets

TOKEN = "sixteen-letters!"
CHAT = {"model": "counter", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}


def events(body: str) -> list[Any]:
    """The events of a stream, [DONE] as a string."""
    data = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def series(page: str, name: str) -> float:
    return float(next(line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(name)))


async def test_completion(gateway: Any) -> None:
    answer = await gateway.http.post("/v1/completions", json=TEXT)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "counter"
    assert body["choices"] == [{"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.headers["x-request-id"]


async def test_chat_stream(gateway: Any) -> None:
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    answer = await gateway.http.post("/v1/chat/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    # As OpenAI begins: the role, and no text.
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in part["choices"][0]["delta"] for part in parts[1:])
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "^_`a"
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "length"
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    assert all(part["usage"] is None for part in parts)
    assert not any("outrider" in part for part in parts)


async def test_usage_so_far_comes_with_every_event(gateway: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**CHAT, "n": 2, "stream": True, "stream_options": options}
    *parts, usage, _ = events((await gateway.http.post("/v1/chat/completions", json=asked)).text)
    counted = {"prompt_tokens": 19, "completion_tokens": 8, "total_tokens": 27}
    assert usage["usage"] == counted | {"prompt_tokens_details": {"cached_tokens": 0}}
    seen = [part["usage"]["completion_tokens"] for part in parts]
    assert seen == sorted(seen) and seen[-1] == 8
    assert all(part["usage"]["prompt_tokens"] == 19 for part in parts)
    # Without the last event nobody asked for usage.
    options["include_usage"] = False
    *parts, _ = events((await gateway.http.post("/v1/chat/completions", json=asked)).text)
    assert not any("usage" in part for part in parts)


async def test_prompts_are_echoed(gateway: Any) -> None:
    asked = {**TEXT, "prompt": ["a", "k"], "echo": True}
    body = (await gateway.http.post("/v1/completions", json=asked)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abcd", "klmn"]
    assert body["usage"]["completion_tokens"] == 6
    said = ["", ""]
    for part in events((await gateway.http.post("/v1/completions", json={**asked, "stream": True})).text)[:-1]:
        said[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert said == ["abcd", "klmn"]


async def test_special_tokens_are_shown_when_asked_for(gateway: Any) -> None:
    asked = {"prompt": [0], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    hidden = (await gateway.http.post("/v1/completions", json=asked)).json()
    shown = (await gateway.http.post("/v1/completions", json={**asked, "skip_special_tokens": False})).json()
    assert hidden["choices"][0]["text"] == "\0"
    assert shown["choices"][0]["text"] == "<s></s>\0"


async def test_special_tokens_in_a_prompt_are_tokens_where_asked_for(gateway: Any) -> None:
    """By default in a prompt, and not in messages; both the other way by name."""

    async def last_token(path: str, more: dict[str, Any], **asked: Any) -> int:
        answer = await gateway.http.post(path, json={"max_tokens": 1, **asked, **more})
        assert answer.status_code == 200, answer.text
        return int(gateway.targets[0].engine.requests[-1].token_ids[-1])

    turns = {"messages": [{"role": "user", "content": "a</s>"}], "add_generation_prompt": False}
    for more, prompt, content in (
        ({}, 2, 3 + ord(">")),
        ({"split_special_tokens": None}, 2, 3 + ord(">")),
        ({"split_special_tokens": True}, 3 + ord(">"), 3 + ord(">")),
        ({"split_special_tokens": False}, 2, 2),
    ):
        assert await last_token("/v1/completions", more, prompt="a</s>") == prompt
        assert await last_token("/v1/chat/completions", more, **turns) == content


async def test_the_chat_template_gets_what_is_for_it(gateway: Any) -> None:
    def prompt() -> str:
        return byte_tokenizer().decode(gateway.targets[0].engine.requests[-1].token_ids)

    started = {"role": "assistant", "content": "yes, "}
    messages = [*CHAT["messages"], started]
    for more, rendered in (
        ({}, "[user]hi[assistant]yes, [assistant]"),
        ({"add_generation_prompt": False}, "[user]hi[assistant]yes, "),
        ({"continue_final_message": True}, "[user]hi[assistant]yes, "),
        ({"chat_template_kwargs": {"unread": 1}, "reasoning_effort": "low"}, "[user]hi[assistant]yes, [assistant]"),
    ):
        answer = await gateway.http.post("/v1/chat/completions", json={**CHAT, "messages": messages, **more})
        assert (answer.status_code, prompt()) == (200, rendered)
    for more, param in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
    ):
        answer = await gateway.http.post("/v1/chat/completions", json={**CHAT, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_request_is_a_line_in_the_log(gateways: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of an answer, of a stream, and of what is refused; no text but whom the caller names, on one line."""
    secret = [{"role": "user", "content": "opensesame"}]
    async with gateways(log_requests=True) as gateway:
        with caplog.at_level("INFO", "outrider_gateway.request_log"):
            headers = {"outrider-tenant": "acme"}
            whole = await gateway.http.post(
                "/v1/chat/completions", json={**CHAT, "messages": secret, "user": "ann\nlee", "n": 2}, headers=headers
            )
            await gateway.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
            await gateway.http.post("/v1/completions", json={**TEXT, "max_token": 1})
            forged = {"outrider-tenant": "acme tokens=9" + "9" * 100}
            await gateway.http.post("/v1/completions", json=TEXT, headers=forged)
        lines = [record.getMessage() for record in caplog.records if record.name == "outrider_gateway.request_log"]
    known = [dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line)) for line in lines]
    assert [(one["endpoint"], one["status"], one["tokens"]) for one in known] == [
        ("chat", "200", "8"), ("chat", "200", "4"), ("completions", "400", "0"),
        ("completions", "400", "0"),
    ]  # fmt: skip
    assert known[3]["tenant"] == f'"acme tokens=9{"9" * 51}"'
    first = known[0]
    assert (first["tenant"], first["user"], first["model"]) == ("acme", '"ann\\nlee"', '"counter"')
    assert (first["answers"], first["stream"], first["id"]) == ("2", "false", whole.headers["x-request-id"])
    assert float(first["ms"]) > 0 and float(first["drafted"]) == 0 and known[1]["stream"] == "true"
    assert "opensesame" not in caplog.text and all("\n" not in line for line in lines)


async def test_a_model_has_several_names(gateways: Any) -> None:
    async with gateways(served={"name": "org/counter", "other_names": ("alias", "gpt-4o")}) as gateway:
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["org/counter", "alias", "gpt-4o"]
        assert {model["root"] for model in listed} == {"org/counter"}
        assert (await gateway.http.get("/v1/models/counter")).json()["id"] == "org/counter"
        for name in ("org/counter", "counter", "alias", "gpt-4o", None):
            answer = await gateway.http.post("/v1/completions", json={**TEXT, "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, "org/counter")
        for name in ("org", "org/", "other/counter", "/counter"):
            answer = await gateway.http.post("/v1/completions", json={**TEXT, "model": name})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"].endswith("served: org/counter, alias, gpt-4o")


async def test_drafts_are_told_when_asked_for(gateway: Any) -> None:
    asked = {**CHAT, "stream": True, "outrider": {"drafts": True}}
    _, *parts, last, done = events((await gateway.http.post("/v1/chat/completions", json=asked)).text)
    assert done == "[DONE]"
    pieces = [piece for part in parts for piece in part["outrider"]["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == "^_`a"
    assert not any(piece["drafted"] for piece in pieces)
    assert last["outrider"]["totals"]["completion_tokens"] == 4
    assert last["outrider"]["totals"]["mean_accepted_length"] == 1.0
    assert gateway.targets[0].engine.requests[-1].speculate
    assert last["outrider"]["totals"]["draft_refused"] is None
    gateway.targets[0].engine.draft_refused = "UNKNOWN_CORPUS"
    *_, last, _ = events((await gateway.http.post("/v1/chat/completions", json=asked)).text)
    assert last["outrider"]["totals"]["draft_refused"] == "UNKNOWN_CORPUS"
    plain = {**CHAT, "outrider": {"speculation": False, "drafts": True}}
    answer = (await gateway.http.post("/v1/chat/completions", json=plain)).json()
    assert answer["outrider"]["totals"][0]["steps"] == 4
    assert not gateway.targets[0].engine.requests[-1].speculate


async def test_answers_that_are_not_lossless_say_so(gateways: Any, gateway: Any) -> None:
    """Where targets allow typical acceptance; where they do not, it is refused."""
    asked = {**CHAT, "temperature": 0.7, "outrider": {"mode": "typical"}}
    async with gateways(served={"lossy": True}) as allowing:
        answer = await allowing.http.post("/v1/chat/completions", json=asked)
        greedy = await allowing.http.post("/v1/chat/completions", json={**asked, "temperature": 0})
    assert answer.json()["usage"]["outrider"] == {"lossy_tokens": 0}
    assert "outrider" not in greedy.json()["usage"]
    refused = await gateway.http.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    assert "--allow-lossy" in refused.json()["error"]["message"]


async def test_several_prompts_and_choices(gateway: Any) -> None:
    asked = {**TEXT, "prompt": ["a", "k"], "n": 2, "seed": 7, "temperature": 1}
    body = (await gateway.http.post("/v1/completions", json=asked)).json()
    assert [choice["text"] for choice in body["choices"]] == ["bcd", "bcd", "lmn", "lmn"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert sorted(request.seed for request in gateway.targets[0].engine.requests) == [7, 7, 8, 8]
    parts = events((await gateway.http.post("/v1/completions", json={**asked, "stream": True})).text)[:-1]
    said = ["", "", "", ""]
    for part in parts:
        said[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert said == ["bcd", "bcd", "lmn", "lmn"]
    assert sum(part["choices"][0]["finish_reason"] is not None for part in parts) == 4


async def test_names_of_tokens_come_from_the_target(gateway: Any) -> None:
    asked = {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    body = (await gateway.http.post("/v1/chat/completions", json=asked)).json()
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("^", [ord("^")], -0.5)
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("<pad>", -1.0), ("<s>", -2.0)]
    lists = (await gateway.http.post("/v1/completions", json={**TEXT, "logprobs": 1})).json()
    assert lists["choices"][0]["logprobs"]["tokens"] == ["b", "c", "d"]
    assert lists["choices"][0]["logprobs"]["top_logprobs"] == [{"<pad>": -1.0, word: -0.5} for word in "bcd"]


async def test_a_slash_behind_a_path_means_nothing(gateway: Any) -> None:
    answer = await gateway.http.post("/v1/chat/completions/", json=CHAT)
    assert answer.status_code == 200 and answer.json()["object"] == "chat.completion"
    assert (await gateway.http.get("/v1/models/")).json()["object"] == "list"
    assert (await gateway.http.get("/v1/no/such/")).json()["error"]["code"] == "unknown_url"


async def test_tokens_of_a_target_without_a_tokenizer_have_numbers(gateways: Any) -> None:
    async with gateways(served={"tokenizer": None}) as gateway:
        asked = {"prompt": [100], "max_tokens": 1, "logprobs": 0}
        body = (await gateway.http.post("/v1/completions", json=asked)).json()
        assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:101"]


async def test_models(gateway: Any) -> None:
    listed = (await gateway.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["counter"]
    assert listed["data"][0]["outrider"]["drafter"] == "trie"
    assert listed["data"][0]["outrider"]["prediction"] is True
    assert (await gateway.http.get("/v1/models/counter")).json()["max_model_len"] == 256
    missing = await gateway.http.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "asked", "status", "param", "code"),
    [
        ("chat/completions", {**CHAT, "functions": [{}]}, 400, "functions", "unsupported_parameter"),
        ("chat/completions", {**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        ("chat/completions", {**CHAT, "logit_bias": {"5000": 1}}, 400, "logit_bias[5000]", "invalid_value"),
        ("chat/completions", {**CHAT, "outrider": {"mode": "coupled"}}, 400, "outrider.mode", "invalid_value"),
        ("completions", {**TEXT, "prompt": "a" * 300}, 400, "prompt", "context_length_exceeded"),
        ("completions", {**TEXT, "prompt": [5000]}, 400, "prompt[0]", "invalid_value"),
        ("completions", {**TEXT, "temperature": 0, "top_k": "x"}, 400, "top_k", "invalid_type"),
        (
            "chat/completions",
            {**CHAT, "messages": [CHAT["messages"][0], {"role": "system", "content": "late"}]},
            400,
            "messages",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_openais_form(
    gateway: Any, path: str, asked: dict[str, Any], status: int, param: str, code: str, stream: bool
) -> None:
    answer = await gateway.http.post(f"/v1/{path}", json={**asked, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": ' + b"[" * 100_000, 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "' + b"a" * 2_000_000 + b'"}', 413),
    ],
    ids=["empty", "list", "open", "nan", "surrogate", "deep", "long", "latin", "large"],
)
async def test_bodies_that_are_none(gateways: Any, content: bytes, status: int) -> None:
    async with gateways(max_body_bytes=1_000_000) as gateway:
        headers = {"content-type": "application/json"}
        for body in (content, _piecewise(content)):
            answer = await gateway.http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
        assert gateway.targets[0].engine.requests == []


async def _piecewise(content: bytes) -> Any:
    for start in range(0, len(content), 65536):
        yield content[start : start + 65536]


async def test_surrogate_pairs_are_text(gateway: Any) -> None:
    answer = await gateway.http.post("/v1/completions", content=json.dumps({**TEXT, "prompt": "🙂"}), headers=_JSON)
    assert answer.status_code == 200


_JSON = {"content-type": "application/json"}


async def test_other_content_types_are_refused(gateway: Any) -> None:
    answer = await gateway.http.post(
        "/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 415


async def test_paths_and_methods_that_are_not_there(gateway: Any) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ):
        answer = await gateway.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "unknown_url")


async def test_slow_bodies_time_out(gateways: Any) -> None:
    async with gateways(body_seconds=0.1) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.server.address.split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 10\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        writer.close()


async def test_client_that_leaves_ends_its_request(gateways: Any) -> None:
    engine = ScriptedEngine()
    async with gateways(engine) as gateway:
        for asked in ({**TEXT, "max_tokens": 250, "stream": True}, {**TEXT, "max_tokens": 250, "n": 2}):
            before, sequences = len(engine.cancelled), len(engine.requests) + asked.get("n", 1)
            engine.pause_after(10)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=HUNG_SECONDS) as leaving:
                asking = asyncio.create_task(leaving.post("/v1/completions", json=asked))
                await until(lambda expected=sequences: len(engine.requests) == expected and engine.paused.is_set())
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await gateway.idle()
            assert len(engine.cancelled) == before + asked.get("n", 1)
        page = (await gateway.http.get("/metrics")).text
        assert series(page, 'outrider_gateway_requests_total{endpoint="completions",status="499"}') == 2


async def test_slow_reader_is_waited_for(gateways: Any) -> None:
    """An answer longer than all buffers on the way, to a client that begins to read late."""
    engine = ScriptedEngine(tick=0)
    async with gateways(engine, served={"max_context": 20_000}) as gateway:
        asked = {**TEXT, "max_tokens": 5_000, "stream": True, "ignore_eos": True, "logprobs": 20}
        async with gateway.http.stream("POST", "/v1/completions", json=asked) as answer:
            await asyncio.sleep(1.0)
            parts = events((await answer.aread()).decode())
        assert parts[-1] == "[DONE]"
        assert sum(len(part["choices"][0]["logprobs"]["tokens"]) for part in parts[:-2]) == 5_000
        await gateway.idle()


async def test_no_more_answers_than_the_limit(gateways: Any) -> None:
    engine = ScriptedEngine()
    engine.paused.set()
    async with gateways(engine, max_running=2) as gateway:
        running = asyncio.create_task(gateway.http.post("/v1/completions", json={**TEXT, "max_tokens": 100, "n": 2}))
        while sum(target.running for target in gateway.server.application.targets.all) < 2:
            await asyncio.sleep(0.005)
        refused = await gateway.http.post("/v1/completions", json=TEXT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        engine.go_on()
        assert (await running).status_code == 200


async def test_requests_that_come_at_once_keep_the_limit(gateways: Any) -> None:
    """None of them has an answer that a target writes when the next is let in."""
    engine = ScriptedEngine()
    engine.paused.set()
    async with gateways(engine, max_running=4) as gateway:
        asked = {**TEXT, "max_tokens": 50, "n": 4}
        answers = [asyncio.create_task(gateway.http.post("/v1/completions", json=asked)) for _ in range(8)]
        await until(lambda: sum(answer.done() for answer in answers) == 7)
        engine.go_on()
        assert sorted([(await answer).status_code for answer in answers]) == [200, *[429] * 7]
        assert len(engine.requests) == 4
        # Every place is free again.
        assert (await gateway.http.post("/v1/completions", json={**TEXT, "n": 4})).status_code == 200


async def test_a_model_that_the_gateway_may_not_ask_for_is_named_by_its_answer(gateways: Any) -> None:
    asked = {name: value for name, value in TEXT.items() if name != "model"}
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with gateways(serving={"authenticator": Authenticator({TOKEN: Caller("acme")})}) as gateway:
        whole = await gateway.http.post("/v1/completions", json={**asked, "n": 2}, headers=bearer)
        streamed = await gateway.http.post("/v1/completions", json={**asked, "stream": True}, headers=bearer)
    assert whole.json()["model"] == "counter"
    assert '"model":"counter"' in streamed.text and '"model":""' not in streamed.text


async def test_models_where_no_target_can_be_asked(
    gateways: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that the contract does not have is no empty list of models."""

    async def fail(*_: Any) -> None:
        raise AttributeError("bytes that are no message")

    async with gateways() as gateway:
        monkeypatch.setattr(Client, "info", fail)
        answer = await gateway.http.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the gateway failed")
    assert "bytes that are no message" in caplog.text


async def test_a_target_whose_answer_is_none_is_looked_at_again() -> None:
    """A watch that ended with the error would leave the target as it was for ever."""

    class Odd:
        address = "odd:1"
        looks = 0

        async def serving(self, _timeout: float) -> bool:
            self.looks += 1
            if self.looks < 3:
                raise AttributeError("bytes that are no message")
            return False

        async def close(self) -> None:
            """Nothing is held."""

    odd = Odd()
    clients: Any = [odd]
    async with Targets(clients, health_seconds=0.01, load_bound=1.25) as targets, asyncio.timeout(HUNG_SECONDS):
        assert not targets.all[0].healthy
        while odd.looks < 4:
            await asyncio.sleep(0.01)


async def test_serving_that_fails_is_not_an_orderly_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more serving")

    monkeypatch.setattr("uvicorn.Server.serve", fail)
    with pytest.raises(RuntimeError, match="no more serving"):
        async with GatewayServer(GatewayConfig(target="127.0.0.1:1", listen="127.0.0.1:0"), AccessOptions()):
            pass


async def test_full_target_is_429(gateways: Any) -> None:
    engine = ScriptedEngine(max_sequences=1)
    engine.paused.set()
    async with gateways(engine) as gateway:
        running = asyncio.create_task(gateway.http.post("/v1/completions", json={**TEXT, "max_tokens": 100}))
        while not engine.open_sequences:
            await asyncio.sleep(0.005)
        refused = await gateway.http.post("/v1/completions", json=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        engine.go_on()
        assert (await running).status_code == 200


async def test_deadline_is_504(gateways: Any) -> None:
    engine = ScriptedEngine()
    engine.pause_after(3)
    async with gateways(engine, request_seconds=0.2) as gateway:
        answer = await gateway.http.post("/v1/completions", json={**TEXT, "max_tokens": 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_error_after_the_first_token_is_the_last_event(gateways: Any) -> None:
    engine = ScriptedEngine()
    engine.pause_after(10)
    async with gateways(engine) as gateway:
        asked = {**TEXT, "max_tokens": 250, "stream": True}
        async with gateway.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            engine.die(RuntimeError("broken"))
            rest = [line async for line in lines if line]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"].startswith("b")
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"


async def test_tokens_are_the_tenants_own(gateways: Any) -> None:
    serving = {"authenticator": Authenticator({TOKEN: Caller("acme")})}
    async with gateways(serving=serving, token=TOKEN) as gateway:
        assert [model.id async for model in gateway.openai.models.list()] == ["counter"]
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
            for answer in (
                await gateway.http.post("/v1/completions", json=TEXT, headers=headers),
                await gateway.http.get("/v1/models", headers=headers),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        good = {"authorization": f"Bearer {TOKEN}"}
        assert (await gateway.http.post("/v1/completions", json=TEXT, headers=good)).status_code == 200
        other = await gateway.http.post("/v1/completions", json=TEXT, headers={**good, "outrider-tenant": "other"})
        assert other.status_code == 403
        assert gateway.targets[0].engine.requests[-1].tenant == "acme"


async def test_tenant_and_trace_are_passed_on(gateway: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"outrider-tenant": "acme", "traceparent": parent}
    await gateway.http.post("/v1/completions", json=TEXT, headers=headers)
    request = gateway.targets[0].engine.requests[-1]
    assert request.tenant == "acme"
    assert request.traceparent.split("-")[1] == parent.split("-")[1]
    broken = await gateway.http.post("/v1/completions", json=TEXT, headers={"traceparent": "nonsense"})
    assert broken.status_code == 200


async def test_health_and_metrics(gateway: Any) -> None:
    await gateway.http.post("/v1/completions", json=TEXT)
    assert (await gateway.http.get("/health")).json() == {"status": "ok"}
    ready = await gateway.http.get("/health/ready")
    assert (ready.status_code, list(ready.json()["targets"].values())) == (200, [True])
    page = (await gateway.http.get("/metrics")).text
    assert series(page, 'outrider_gateway_requests_total{endpoint="completions",status="200"}') == 1
    assert series(page, "outrider_gateway_tokens_total") == 3
    assert series(page, "outrider_gateway_time_to_first_token_seconds_count") == 1
    assert series(page, "outrider_gateway_target_healthy") == 1


async def test_a_target_that_was_never_there_is_logged_once(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that begins with a wrong address, or without the TLS that its target speaks, says so."""
    async with Client.connect(f"127.0.0.1:{unused_tcp_port}") as client:
        target = GatewayTarget(client)
        for _ in range(3):
            await target.check_health()
    [line] = [record.getMessage() for record in caplog.records if record.name == "outrider_gateway.targets"]
    assert line.startswith(
        f"target 127.0.0.1:{unused_tcp_port} is left out: cannot reach 127.0.0.1:{unused_tcp_port}: "
    )


async def test_a_target_that_never_answers_is_told_from_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and says nothing, as a frozen process does."""
    monkeypatch.setattr("outrider_gateway.targets._HEALTH_TIMEOUT_SECONDS", 0.1)

    async def keep(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with answering(keep) as address, Client.connect(address) as client:
        target = GatewayTarget(client)
        await target.check_health()
        assert (target.healthy, target.state) == (False, "it has not answered within 0.1 s")


class _Answering:
    """A client whose target answers about its health, or is late."""

    address = "here:1"
    late = False

    async def serving(self, _timeout: float) -> bool:
        if self.late:
            raise DeadlineExceeded("late")
        return True

    async def info(self, _timeout: float) -> None:
        return None


async def test_the_only_target_is_used_until_it_is_late_twice() -> None:
    """A machine with other work may answer late while it serves."""
    client: Any = _Answering()
    targets = Targets([client], health_seconds=HUNG_SECONDS, load_bound=1.25)
    [target] = targets.all
    await target.check_health()
    assert targets.pick("", "") is target
    for _ in range(2):
        client.late = True
        await target.check_health()
        assert (target.healthy, targets.pick("", "")) == (False, target)
        client.late = False
        await target.check_health()
        assert target.healthy
    client.late = True
    await target.check_health()
    await target.check_health()
    with pytest.raises(NoTarget, match="not answered within"):
        targets.pick("", "")


async def test_a_target_that_starts_is_looked_at_more_often() -> None:
    class Starting(_Answering):
        looks = 0

        async def serving(self, _timeout: float) -> bool:
            self.looks += 1
            return self.looks > 3

        async def info(self, _timeout: float) -> None:
            if self.looks <= 3:
                raise Loading("it loads")

        async def close(self) -> None:
            """Nothing is held."""

    client: Any = Starting()
    async with Targets([client], health_seconds=3600.0, load_bound=1.25) as targets, asyncio.timeout(HUNG_SECONDS):
        while not targets.all[0].healthy:
            await asyncio.sleep(0.01)


async def test_drain_lets_running_answers_finish(gateways: Any) -> None:
    engine = ScriptedEngine()
    engine.pause_after(10)
    async with gateways(engine, drain_seconds=HUNG_SECONDS) as gateway:
        asked = {**TEXT, "max_tokens": 100, "stream": True}
        async with gateway.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            gateway.server.drain()
            with pytest.raises(httpx.TransportError):
                async with asyncio.timeout(HUNG_SECONDS):
                    while True:
                        async with httpx.AsyncClient() as late:
                            await late.get(f"{gateway.url}/health")
            engine.go_on()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await asyncio.wait_for(gateway.server.ended(), HUNG_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_process_ends_on_a_signal(gateway: Any, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(shared_python("services") / "outrider", "gateway", "--listen", "127.0.0.1:0"),
        *("--target", gateway.targets[0].server.address),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(HUNG_SECONDS):
        while b"serving http://" not in said:
            said += await process.stderr.readline()
        process.send_signal(number)
        said += await process.stderr.read()
    assert await process.wait() == 0
    assert b"stopped" in said and b"Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "a:1,localhost"], "--target: 'localhost' is not HOST:PORT or unix:PATH: it has no port"),
        (["--listen", "8000"], "--listen: '8000' is not HOST:PORT"),
        (["--target", ","], "--target: names no target"),
        (["--target", "a:1,a:1"], "--target: names a target twice"),
        (["--allow-host", "a.example:8000"], "--allow-host: 'a.example:8000' is not a name in lower case without port"),
        (["--load-bound", "0.5"], "--load-bound: must be at least 1"),
        (["--tls-certificate", "x"], "--tls-certificate: needs --tls-key"),
        (["--tls-certificate", "Makefile", "--tls-key", "Makefile"], "no certificate and its key: no PEM file of one"),
        (["--config", "/absent"], "/absent"),
    ],
)
async def test_settings_that_cannot_work(flags: list[str], message: str) -> None:
    python = shared_python("services") / "python"
    process = await asyncio.create_subprocess_exec(
        python, "-m", "outrider_gateway", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), HUNG_SECONDS)
    assert process.returncode == 2
    assert message in said.decode() and "Traceback" not in said.decode()


async def test_what_ends_a_stream_is_one_write() -> None:
    """The last events and the end; and a stream of these alone has a head."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for before in (b"", b"data: 1\n\n"):
        sent.clear()
        writer = ResponseWriter(send, "request")
        if before:
            await writer.write(before)
        await writer.end(b"data: 2\n\n")
        head, *bodies = sent
        assert (head["type"], head["status"]) == ("http.response.start", 200)
        assert [body["body"] for body in bodies] == [*filter(None, (before,)), b"data: 2\n\n"]
        assert [body["more_body"] for body in bodies] == [*[True] * bool(before), False]


async def test_only_posts_take_the_short_way(gateway: Any) -> None:
    """Around the router; whatever it would have refused is refused, and said in OpenAI's form."""
    paths = ("/v1/completions", "/v1/chat/completions")
    for method in ("GET", "PUT", "HEAD", "OPTIONS"):
        answers = [await gateway.http.request(method, path, json=TEXT) for path in paths]
        assert [answer.status_code for answer in answers] == [405, 405]
    for path in ("/v1/completions/x", "//v1/completions", "/v1/Completions"):
        answer = await gateway.http.post(path, json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert gateway.targets[0].engine.requests == []


async def test_usage_counts_prompt_tokens_that_were_cached(real: Any) -> None:
    body = {"model": (await real.http.get("/v1/models")).json()["data"][0]["id"], "max_tokens": 2}
    cached = []
    for tail in ("one", "one", "two"):
        answer = await real.http.post(
            "/v1/completions", json=body | {"prompt": "a prompt of 32 tokens, and then " + tail}
        )
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 32]
