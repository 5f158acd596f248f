"""Loads of whole answers: what is asked of a server and when, and how its stream is read."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks.serving import whole_answers
from benchmarks.serving.http_answers import CompletionsClient, HttpAnswer
from benchmarks.serving.whole_answers import Prompt, WholeAnswers, compare, figures, parsed
from benchmarks.shared.workload import form_schema


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return self("".join(f"<{one['content']}>" for one in messages), add_special_tokens=False)


class Server:
    """Answers after every other request has been asked that may be, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, int]] = []
        self.schemas: list[dict[str, Any]] = []
        self.most = self._now = 0

    async def ask(self, prompt: Prompt, tokens: int, schema: dict[str, Any] | None = None) -> HttpAnswer:
        self.asked.append((prompt, tokens))
        self.schemas += [] if schema is None else [schema]
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(3):
            await asyncio.sleep(0)
        self._now -= 1
        return HttpAnswer(tokens, "!" * tokens, 0.5, 1.0)


@pytest.fixture(scope="module")
def answers() -> WholeAnswers:
    return WholeAnswers(Letters())


@pytest.mark.parametrize(("load", "count", "tokens"), [("loop3", 9, 128), ("loop1", 8, 128), ("shared4", 16, 64)])
def test_a_closed_loop_has_so_many_streams(answers: WholeAnswers, load: str, count: int, tokens: int) -> None:
    server = Server()
    found = asyncio.run(answers.run(load, server.ask))
    assert len(found) == len(server.asked) == count and {one for _, one in server.asked} == {tokens}
    assert server.most == parsed(load)[1]
    starts = {prompt[:3000] for prompt, _ in server.asked}
    assert (len(starts) == 1) is load.startswith("shared")


def test_forms_are_asked_for_by_one_schema(answers: WholeAnswers) -> None:
    server, plain = Server(), Server()
    asyncio.run(answers.run("forms4", server.ask))
    asyncio.run(answers.run("loop4", plain.ask))
    assert [prompt for prompt, _ in server.asked] == [prompt for prompt, _ in plain.asked] and server.most == 4
    assert server.schemas == [form_schema()] * 12 and not plain.schemas


def test_long_prompts_have_nothing_in_common(answers: WholeAnswers) -> None:
    server = Server()
    asyncio.run(answers.run("long2", server.ask))
    assert [len(prompt) for prompt, _ in server.asked] == [6000] * 6 and len(set(server.asked)) == 6


def test_kept_prompts_are_those_that_were_cold_and_more(answers: WholeAnswers) -> None:
    server = Server()
    for load in ("cold3", "kept3"):
        asyncio.run(answers.run(load, server.ask))
    prompts = [prompt for prompt, _ in server.asked]
    cold, kept = prompts[:3], prompts[3:]
    assert server.most == 1 and len(set(cold)) == 3 and [len(prompt) for prompt in kept] == [6032] * 3
    assert [prompt[:6000] for prompt in kept] == cold


def test_another_seed_has_other_texts(answers: WholeAnswers) -> None:
    server = Server()
    asyncio.run(answers.run("long2", server.ask))
    asyncio.run(WholeAnswers(Letters(), 1).run("long2", server.ask))
    assert [len(prompt) for prompt, _ in server.asked] == [6000] * 12 and len(set(server.asked)) == 12


def test_a_turn_sends_all_before_it(answers: WholeAnswers) -> None:
    server = Server()
    asyncio.run(answers.run("turns2", server.ask))
    prompts = [prompt for prompt, _ in server.asked]
    assert len(prompts) == 8 and server.most == 2
    for talk in (prompts[::2], prompts[1::2]):
        for before, after in itertools.pairwise(talk):
            assert after[: len(before)] == before
            assert after[len(before) :][:96] == (ord("!"),) * 96


def test_requests_of_a_rate_do_not_wait_for_answers(answers: WholeAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(whole_answers.asyncio, "sleep", noted)
    server = Server()
    found = asyncio.run(answers.run("rate16", server.ask))
    assert len(found) == len(waits) == 192 and 0.9 < sum(waits) * 16 / 192 < 1.1
    long = sum(len(prompt) == 2500 for prompt, _ in server.asked)
    assert 0.1 < long / 192 < 0.3


@pytest.mark.parametrize("load", ["loop", "loop0", "loops8", "", "loop-1"])
def test_a_load_that_is_none_is_named(load: str) -> None:
    with pytest.raises(ValueError, match="expected loopC"):
        parsed(load)


def test_figures_are_of_all_answers_and_beside_the_peers(answers: WholeAnswers) -> None:
    found = figures([HttpAnswer(11, "", 0.1, 1.1, [0.2]), HttpAnswer(21, "", 0.3, 2.3, [0.4])], 4.0)
    assert found["tokens_per_second"] == 8.0 and found["first_p50_ms"] == 300 and found["gap_p99_ms"] == 400
    assert found["ms_a_token_p50"] == 100
    rows = asyncio.run(compare(answers, ["loop2"], {"own": Server().ask, "peer": Server().ask}))
    assert [row["server"] for row in rows] == ["own", "peer"] and rows[1]["to_peer"] == 1.0


def with_server(handle: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]], use: Callable[[str], Any]) -> Any:
    """What `use` gives for the URL of a server that handles one request's body."""

    async def run() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            await handle(await reader.readexactly(length), writer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(run())


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_stream_is_read_however_it_is_cut(chunked: bool, piece: int) -> None:
    texts = ["Hé", "", "llo", "!"]
    events = [{"choices": [{"text": text}]} for text in texts]
    events.append({"choices": [], "usage": {"completion_tokens": 5}})
    body = "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in events) + "data: [DONE]\n\n"
    asked: list[dict[str, Any]] = []

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(request))
        writer.write(b"HTTP/1.1 200 OK\r\n" + b"Transfer-Encoding: chunked\r\n" * chunked + b"\r\n")
        data = body.encode()
        for at in range(0, len(data), piece):
            part = data[at : at + piece]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        await writer.drain()

    answer = with_server(handle, lambda url: CompletionsClient(url, "m").ask([1, 2], 5))
    assert (answer.text, answer.tokens, len(answer.gaps)) == ("Héllo!", 5, 2)
    assert 0 < answer.first <= answer.seconds
    (request,) = asked
    assert request["prompt"] == [1, 2] and request["max_tokens"] == 5 and request["stream"] and request["ignore_eos"]


def test_a_refusal_says_why() -> None:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\nno such model")
        await writer.drain()

    with pytest.raises(RuntimeError, match="404: no such model"):
        with_server(handle, lambda url: CompletionsClient(url, "m").ask([1], 1))


FILLED = json.dumps(dict.fromkeys(form_schema()["required"], 1))


@pytest.mark.parametrize("text", [FILLED, FILLED[:-1], "[1]", '{"name": 1}'])
def test_a_form_is_asked_for_by_its_schema_and_may_be_broken(text: str) -> None:
    asked: list[dict[str, Any]] = []

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(request))
        event = {"choices": [{"text": text}], "usage": {"completion_tokens": 7}}
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + f"data: {json.dumps(event)}\n\n".encode())
        await writer.drain()

    def ask(url: str) -> Awaitable[HttpAnswer]:
        return CompletionsClient(url, "m").ask([1], 9, form_schema())

    answer = with_server(handle, ask)
    assert answer.tokens == 7 and answer.broken == (text is not FILLED)
    found = figures([answer, HttpAnswer(tokens=5, seconds=1.0)], 2.0)
    assert found["answers_per_second"] == (1.0 if text is FILLED else 0.5)
    assert found["broken_forms"] == (text is not FILLED)
    assert asked[0]["response_format"]["json_schema"]["schema"] == form_schema() and "ignore_eos" not in asked[0]


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"error": {"message": "out of memory"}}, "ended an answer.*out of memory"),
        ({"choices": [], "usage": {"completion_tokens": 3}}, "asked for 5 tokens, got 3"),
        ({"choices": [{"text": "and no more"}]}, "asked for 5 tokens, got 0"),
    ],
)
def test_no_figure_is_made_of_an_answer_that_is_not_whole(event: dict[str, Any], problem: str) -> None:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        events = [f"data: {json.dumps(one)}\n\n" for one in ({"choices": [{"text": "Hello"}]}, event)]
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + "".join(events).encode())
        await writer.drain()

    with pytest.raises(RuntimeError, match=problem):
        with_server(handle, lambda url: CompletionsClient(url, "m").ask([1], 5))
