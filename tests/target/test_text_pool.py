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
from target_service.api.prompts import Lines, Prompts
from target_service.core.quotas import TenantQuotas
from target_service.text.jobs import EncodeText, Job


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
    """An encoder that counts what it is asked, by threads."""

    def __init__(self) -> None:
        self.asked: list[threading.Thread] = []

    def encode(self, _job: Job) -> list[int]:
        self.asked.append(threading.current_thread())
        return [1]


def prompts(encoder: Counting, tokenizer: Any) -> Prompts:
    return Prompts(tokenizer, encoder, 300, 100, Lines(pool(), pool()))


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
async def test_what_is_too_long_is_refused_unread(
    request_: pb.GenerateRequest, error: type[Exception], model_tokenizer: Any
) -> None:
    encoder = Counting()
    with pytest.raises(error):
        await prompts(encoder, model_tokenizer).token_ids(request_, "a")
    assert not encoder.asked


async def test_texts_are_encoded_beside_the_event_loop(model_tokenizer: Any) -> None:
    encoder = Counting()
    for asked in (pb.GenerateRequest(text="a"), pb.GenerateRequest(text="a" * 2500)):
        assert await prompts(encoder, model_tokenizer).token_ids(asked, "a") == (1,)
    assert len(encoder.asked) == 2 and threading.current_thread() not in encoder.asked


async def test_short_texts_pass_long_ones(model_tokenizer: Any) -> None:
    held = Held()

    class Slow(Counting):
        def encode(self, _job: Job) -> list[int]:
            assert isinstance(_job, EncodeText)
            if len(_job.text) > 100:
                held.work("long")()
            return super().encode(_job)

    encoding = prompts(Slow(), model_tokenizer)
    long = [asyncio.create_task(encoding.token_ids(pb.GenerateRequest(text="a" * 2500), "loud")) for _ in range(5)]
    await held.until_begun(2)
    assert await encoding.token_ids(pb.GenerateRequest(text="a"), "loud") == (1,)
    held.go.set()
    await asyncio.gather(*long)


async def test_many_empty_messages_hold_nobody_up(targets: Any, model_tokenizer: Any) -> None:
    attack = pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user")] * 400_000))
    async with targets(served=replace(SERVED, tokenizer=model_tokenizer)) as target:
        code, error = await refused(target, attack)
        assert isinstance(error, InvalidField) and code is grpc.StatusCode.INVALID_ARGUMENT
        assert await answers(target, asking(sampling={"max_tokens": 1}))
