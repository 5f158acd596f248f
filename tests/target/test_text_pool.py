"""Texts before the tokeniser: who is next, what is dropped, and that nothing long is begun before it is measured."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from generation import answers, asking, refused
from scripted_engine import SERVED
from waits import HUNG_SECONDS

from outrider.admission import text_pool
from outrider.admission.prompt_limits import BYTES_PER_TOKEN, MAX_MESSAGES
from outrider.admission.text_pool import TextPool
from outrider.errors import InvalidField, PositionOutOfRange, QuotaExceeded
from outrider.limits import TenantLimits, TenantTable
from outrider.v1 import target_pb2 as pb
from target_service.api.prompts import Prompts
from target_service.core.quotas import TenantQuotas


class Held:
    """Work that waits until it is let go, and tells what was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def work(self, name: str) -> Any:
        def run() -> str:
            self.begun.append(name)
            assert self.go.wait(HUNG_SECONDS)
            return name

        return run

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(HUNG_SECONDS):
            while len(self.begun) < count:
                await asyncio.sleep(0.002)


def pool(**limits: Any) -> TextPool:
    quotas = TenantQuotas(TenantTable(TenantLimits(**limits)))
    return TextPool(lambda tenant: quotas.counted(tenant, "texts"))


async def test_tenants_take_turns_whoever_came_first() -> None:
    held, texts = Held(), pool()
    loud = [asyncio.create_task(texts.call("loud", held.work(f"loud{i}"))) for i in range(8)]
    await held.until_begun(2)
    quiet = asyncio.create_task(texts.call("quiet", held.work("quiet")))
    await asyncio.sleep(0)
    held.go.set()
    assert await asyncio.gather(quiet, *loud) == ["quiet", *(f"loud{i}" for i in range(8))]
    assert held.begun.index("quiet") <= 4


async def test_what_is_cancelled_while_it_waits_is_never_begun() -> None:
    held, texts = Held(), pool()
    running = [asyncio.create_task(texts.call("a", held.work(f"first{i}"))) for i in range(2)]
    await held.until_begun(2)
    waiting = [asyncio.create_task(texts.call("a", held.work(f"late{i}"))) for i in range(5)]
    await asyncio.sleep(0.01)
    assert texts.waiting == 5
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert texts.waiting == 0
    held.go.set()
    await asyncio.gather(*running)
    assert await texts.call("a", held.work("after")) == "after"
    assert sorted(held.begun) == ["after", "first0", "first1"]


async def test_a_cancelled_one_that_has_begun_keeps_its_thread_to_its_end() -> None:
    held, texts = Held(), pool()
    running = [asyncio.create_task(texts.call("a", held.work(f"first{i}"))) for i in range(2)]
    await held.until_begun(2)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    after = asyncio.create_task(texts.call("a", held.work("after")))
    await asyncio.sleep(0.02)
    assert "after" not in held.begun
    held.go.set()
    assert await after == "after"


async def test_every_thread_comes_back_whatever_happens() -> None:
    texts = pool()

    def fail() -> None:
        raise ValueError("no")

    for _ in range(20):
        tasks = [asyncio.create_task(texts.call(str(i % 3), fail if i % 2 else (lambda: None))) for i in range(10)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    held = Held()
    both = [asyncio.create_task(texts.call("a", held.work(name))) for name in "ab"]
    await held.until_begun(2)
    held.go.set()
    assert await asyncio.gather(*both) == ["a", "b"]


async def test_a_tenants_texts_and_all_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pool, "_MOST_WAITING", 4)
    held, texts = Held(), pool(texts=3)
    tasks = [asyncio.create_task(texts.call("a", held.work("x"))) for _ in range(4)]
    await asyncio.sleep(0.01)
    with pytest.raises(QuotaExceeded) as caught:
        await tasks[3]
    assert caught.value.metadata == {"quota": "texts", "limit": "3"}
    others = [asyncio.create_task(texts.call(name, held.work(name))) for name in ("b", "c", "d", "e")]
    await asyncio.sleep(0.01)
    with pytest.raises(QuotaExceeded, match="wait for a thread"):
        await others[3]
    held.go.set()
    await asyncio.gather(*tasks[:3], *others[:3])


class Counting:
    """A tokenizer that tells how often it was asked."""

    chat_template = "x"

    def __init__(self) -> None:
        self.asked = 0

    def encode(self, text: str, **_: object) -> list[int]:
        self.asked += 1
        return [1] * len(text)

    def apply_chat_template(self, turns: list[dict[str, str]], **_: object) -> str:
        self.asked += 1
        return "".join(turn["content"] for turn in turns)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.GenerateRequest(text="x" * (BYTES_PER_TOKEN * 100 + 1)), PositionOutOfRange),
        (
            pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="xy" * 1000)] * 2)),
            PositionOutOfRange,
        ),
        (
            pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")] * (MAX_MESSAGES + 1))),
            InvalidField,
        ),
    ],
    ids=["text", "chat", "messages"],
)
async def test_what_is_too_long_is_refused_unread(request_: pb.GenerateRequest, error: type[Exception]) -> None:
    tokenizer = Counting()
    prompts = Prompts(tokenizer, 300, 100, pool())
    with pytest.raises(error):
        await prompts.token_ids(request_, "a")
    assert not tokenizer.asked


async def test_long_conversations_are_rendered_beside_the_event_loop(targets: Any, byte_tokenizer: Any) -> None:
    threads = set()

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(byte_tokenizer, name)

        def apply_chat_template(self, turns: Any, **options: Any) -> Any:
            threads.add(threading.current_thread())
            return byte_tokenizer.apply_chat_template(turns, **options)

    short, long = (pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a")] * count) for count in (1, 20))
    async with targets(served=replace(SERVED, tokenizer=Watching())) as target:
        assert await answers(target, pb.GenerateRequest(chat=short, sampling={"max_tokens": 1}))
        assert threads == {threading.current_thread()}
        assert await answers(target, pb.GenerateRequest(chat=long, sampling={"max_tokens": 1}))
        assert len(threads) == 2


async def test_many_empty_messages_hold_nobody_up(targets: Any, byte_tokenizer: Any) -> None:
    attack = pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")] * 400_000))
    async with targets(served=replace(SERVED, tokenizer=byte_tokenizer)) as target:
        code, error = await refused(target, attack)
        assert isinstance(error, InvalidField) and code is grpc.StatusCode.INVALID_ARGUMENT
        assert await answers(target, asking(sampling={"max_tokens": 1}))
