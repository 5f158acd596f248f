"""Deadlines and retries of the SDK, messages of every shape, and the client without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waits import HUNG_SECONDS, until

from outrider import errors
from outrider_client import Client, FinishReason, Policy, SamplingParams, ServiceUnreachable, SyncClient, TokenTree

SHORT = 0.1
# Waits between two attempts, with `long_waits`.
PATIENT = Policy(call_timeout=10 * HUNG_SECONDS, generate_timeout=10 * HUNG_SECONDS)
CALLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "info": lambda client: client.info(),
    "generate": lambda client: client.generate(text="x").result(),
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that ask to wait for a moment only."""
    monkeypatch.setattr(errors.QuotaExceeded, "retry_after", SHORT)


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch, short_waits: None) -> None:  # noqa: ARG001
    """Services that ask to wait for longer than any test does."""
    monkeypatch.setattr(errors.QuotaExceeded, "retry_after", 2 * HUNG_SECONDS)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
class TestRetries:
    async def test_waits_longer_each_time(self, running: Any, call: Callable[[Client], Awaitable[object]]) -> None:
        running.target.refusals = 2
        async with Client.connect(running.address) as client:
            await call(client)
        first, second, third = running.target.came
        assert second - first >= SHORT
        assert third - second >= 2 * SHORT

    async def test_attempts_are_bounded(self, running: Any, call: Callable[[Client], Awaitable[object]]) -> None:
        running.target.refusals = 9
        async with Client.connect(running.address, policy=Policy(attempts=2)) as client:
            with pytest.raises(errors.QuotaExceeded):
                await call(client)
        assert len(running.target.came) == 2

    @pytest.mark.usefixtures("long_waits")
    async def test_no_wait_past_the_deadline(self, running: Any, call: Callable[[Client], Awaitable[object]]) -> None:
        running.target.refusals = 9
        policy = Policy(call_timeout=HUNG_SECONDS, generate_timeout=HUNG_SECONDS)
        async with Client.connect(running.address, policy=policy) as client:
            with pytest.raises(errors.QuotaExceeded):
                await call(client)
        assert len(running.target.came) == 1


@pytest.mark.parametrize(("name", "seconds"), [("info", 10), ("generate", 600)])
async def test_default_deadlines(running: Any, name: str, seconds: float) -> None:
    async with Client.connect(running.address) as client:
        await CALLS[name](client)
    # gRPC rounds a deadline up on its way, two clocks read it, and the way takes its time.
    assert 0.3 * seconds < running.target.deadlines[0] < seconds + 1


async def test_a_refusal_that_stays_is_not_tried_again(running: Any) -> None:
    async with Client.connect(running.address) as client:
        with pytest.raises(errors.UnknownModel):
            await client.generate(text="x", model="other").result()
    assert len(running.target.came) == 1


@pytest.mark.usefixtures("long_waits")
async def test_cancelled_while_it_waits(running: Any) -> None:
    running.target.refusals = 1
    async with Client.connect(running.address, policy=PATIENT) as client:
        generation = client.generate(text="x")
        reading = asyncio.create_task(generation.result())
        await until(lambda: running.target.came)
        generation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert len(running.target.came) == 1


@pytest.mark.parametrize(
    "given", [{"call_timeout": 0}, {"generate_timeout": -1}, {"attempts": 0}], ids=["call", "generate", "attempts"]
)
def test_policy_has_bounds(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Policy(**given)


class TestMessages:
    async def test_dicts_and_pairs(self, running: Any) -> None:
        async with Client.connect(running.address) as client:
            parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
            given = [("system", "a"), {"role": "user", "content": "b"}, {"role": "user", "name": "x", "content": parts}]
            await client.generate(messages=given).result()
        request, _, _ = running.target.requests[0]
        assert [(message.role, message.content) for message in request.chat.messages] == [
            ("system", "a"),
            ("user", "b"),
            ("user", "c\nd"),
        ]

    @pytest.mark.parametrize(
        ("messages", "problem"),
        [
            ("hello", "messages: expected a list of messages, got str"),
            ({"role": "user", "content": "a"}, "messages: expected a list of messages, got dict"),
            (["hello"], r"messages\[0\]: expected \(role, content\) or .*, got str"),
            ([("user", "a", "b")], r"messages\[0\]: expected .*, got tuple of 3"),
            ([("user", "a"), {"role": "user"}], r"messages\[1\]: lacks 'content'"),
            ([{"role": "user", "content": "a", "audio": []}], r"messages\[0\]: has no field 'audio'"),
            (
                [{"role": "user", "content": ["a"]}],
                r"messages\[0\].content\[0\]: expected .*, got str",
            ),
            ([{"role": "user", "content": 1}], r"messages\[0\].content: expected a string or a list of text parts"),
            ([(1, "a")], r"messages\[0\].role: expected a string, got int"),
        ],
    )
    async def test_type_errors_say_where(self, running: Any, messages: Any, problem: str) -> None:
        async with Client.connect(running.address) as client:
            with pytest.raises(TypeError, match=problem):
                client.generate(messages=messages)

    async def test_options_of_another_type_are_told_by_name(self, running: Any) -> None:
        wrong: Any = {"max_tokens": 2}
        with pytest.raises(TypeError, match="address: expected a string, got int"):
            Client.connect(5)  # type: ignore[arg-type]
        async with Client.connect(running.address) as client:
            with pytest.raises(TypeError, match="sampling: expected SamplingParams, got dict"):
                client.generate(text="a", sampling=wrong)
            with pytest.raises(TypeError, match="speculation: expected Speculation, got dict"):
                client.generate(text="a", speculation=wrong)


class TestSynchronous:
    """In another thread than the server's event loop."""

    async def test_everything(self, running: Any) -> None:
        def program() -> None:
            with SyncClient.connect(running.address) as client:
                assert client.info().model == "scripted"
                assert client.serving(HUNG_SECONDS)
                generation = client.generate(text="x", sampling=SamplingParams(max_tokens=7))
                assert [chunk.token_ids for chunk in generation] == [(0, 1, 2), (3, 4, 5), (6,)]
                assert generation.started is not None
                assert generation.result().token_ids == tuple(range(7))
                with client.verify() as session:
                    sequence = session.open([1, 9])
                    assert sequence.max_rows == 64
                    while sequence.finish_reason is None:
                        sequence.verify(TokenTree.root_only(sequence.token_ids[-1]))
                    assert sequence.finish_reason is FinishReason.LENGTH
                    assert sequence.token_ids == [1, 9, 5, 5, 5]

        await asyncio.to_thread(program)

    @pytest.mark.usefixtures("long_waits")
    @pytest.mark.parametrize("work", ["verify", "generate", "retry"])
    async def test_closing_ends_the_calls_of_other_threads(self, running: Any, work: str) -> None:
        running.target.step_seconds = HUNG_SECONDS
        running.target.refusals = 4 if work == "retry" else 0

        def call(client: SyncClient) -> None:
            if work == "verify":
                sequence = client.verify().open([1])
                running.target.answering.clear()
                sequence.verify(TokenTree.root_only(1))
            elif work == "generate":
                client.generate(text="x").result()
            else:
                client.info()

        client = SyncClient.connect(running.address, policy=PATIENT)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()

        def program() -> None:
            error: BaseException | None = None
            try:
                call(client)
            except BaseException as raised:
                error = raised
            loop.call_soon_threadsafe(ended.set_result, error)

        # A daemon, since the interpreter waits for other threads at its end.
        threading.Thread(target=program, daemon=True).start()
        await until(lambda: running.target.trees if work == "verify" else running.target.came)
        await asyncio.to_thread(client.close)
        error = await asyncio.wait_for(ended, HUNG_SECONDS)
        assert isinstance(error, RuntimeError) and str(error) == "the client is closed"
        with pytest.raises(RuntimeError, match="the client is closed"):
            client.info()
        client.close()
        running.target.answering.set()

    async def test_errors_are_typed(self, running: Any, unused_tcp_port: int) -> None:
        def program() -> None:
            with SyncClient.connect(running.address) as client:
                with pytest.raises(errors.UnknownModel):
                    client.generate(text="x", model="other").result()
                with pytest.raises(errors.InvalidField):
                    client.generate()
            with SyncClient.connect(f"127.0.0.1:{unused_tcp_port}") as client, pytest.raises(ServiceUnreachable):
                client.info()

        await asyncio.to_thread(program)

    @pytest.mark.parametrize("leave", ["with", "break"])
    async def test_leaving_early_cancels(self, running: Any, leave: str) -> None:
        running.target.step_seconds = 0.05
        sampling = SamplingParams(max_tokens=1000)

        def program() -> None:
            if leave == "with":
                with client.generate(text="x", sampling=sampling) as generation:
                    next(generation)
            else:
                for _ in client.generate(text="x", sampling=sampling):
                    break

        client = await asyncio.to_thread(SyncClient.connect, running.address)
        try:
            await asyncio.to_thread(program)
            await until(lambda: running.target.cancelled)
        finally:
            await asyncio.to_thread(client.close)

    async def test_closed(self, running: Any) -> None:
        def program() -> None:
            client = SyncClient.connect(running.address)
            client.close()
            client.close()
            with pytest.raises(RuntimeError, match="closed"):
                client.info()

        await asyncio.to_thread(program)
