"""vLLM's runner over scripted drafts: slow ones, ones that need what vLLM has not, ones that lie."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_draft import FakeDraft, eventually, growth, serving
from vllm_runner import VOCABULARY, Asked, Runner, plain, repeating, vllm_config

from outrider.v1 import draft_pb2
from outrider.wire.frames import FeatureRequest
from outrider_vllm import Proposer


@asynccontextmanager
async def proposing(fake: FakeDraft, **settings: Any) -> AsyncIterator[tuple[Runner, Proposer]]:
    """A runner over `fake`, once there is a connection. It runs in a thread: the draft has this one's loop."""
    fake.info = dataclasses.replace(fake.info, vocabulary_size=VOCABULARY, tokenizer_fingerprint="", max_context=10_000)
    async with serving(fake) as server:
        config = vllm_config(draft=server.address, **settings)
        proposer = Proposer(config)
        try:
            await eventually(lambda: fake.streams)
            yield Runner(config, [proposer], repeating), proposer
        finally:
            await asyncio.to_thread(proposer.close)


async def answered(runner: Runner, prompt: list[int], max_tokens: int, pause: float = 0.002) -> Asked:
    (request,) = await asyncio.to_thread(runner.answer, (prompt, max_tokens), pause=pause)
    assert request.output == plain(repeating, prompt, max_tokens)
    return request


async def test_a_draft_that_is_too_slow_is_waited_for_a_few_times_only() -> None:
    fake = FakeDraft()

    released = asyncio.Event()

    async def too_late(frame: draft_pb2.ProposeRequest, context: Any) -> object:
        if frame.HasField("advance"):
            await released.wait()
        return await fake.answer(frame, context)

    fake.behave = too_late
    async with proposing(fake, wait_ms=20, failures_to_open=2) as (runner, proposer):
        await answered(runner, [3, 4], 100)
        assert proposer._drafting.late == 2
        released.set()


async def test_a_draft_that_needs_hidden_states_is_left_alone() -> None:
    fake = FakeDraft()
    fake.info = dataclasses.replace(fake.info, features=FeatureRequest((3,), 64))
    async with proposing(fake) as (runner, _):
        request = await answered(runner, [3, 4], 40)
        assert request.drafted == 0
        assert not any(frame.HasField("open") for stream in fake.streams for frame in stream)


async def test_what_a_lying_draft_says_ends_drafting_for_that_request_alone() -> None:
    fake = FakeDraft()

    async def lie(frame: draft_pb2.ProposeRequest, context: Any) -> object:
        for each in frame.advance.sequences:
            # Of the second request: a step that is still to come.
            lies = each.sequence_id == 2
            await context.write(growth(each.sequence_id, each.step + 7 * lies, first_node_id=each.step + 1))
        return None

    fake.behave = lie
    async with proposing(fake, wait_ms=1000) as (runner, proposer):
        honest, lied = await asyncio.to_thread(runner.answer, ([3, 4], 40), ([5, 6], 40), pause=0.002)
        for request in (honest, lied):
            assert request.output == plain(repeating, request.prompt, 40)
        assert honest.drafted > 10 and lied.drafted == 0
        assert proposer._drafting.connected


async def test_what_is_told_is_what_vllm_generated() -> None:
    """Opened with the prompt and the first token, advanced by every token after it, closed when it has gone."""
    fake = FakeDraft()
    async with proposing(fake, tenant="docs", wait_ms=50) as (runner, _):
        request = await answered(runner, [3, 4, 5], 40)
        other = await answered(runner, [6, 7], 40)
        assert other.steps > 10
        frames = list(fake.streams[0])
    opened = next(frame.open for frame in frames if frame.HasField("open"))
    assert list(opened.token_ids) == [3, 4, 5, request.output[0]]
    assert (opened.prompt_length, opened.tenant, opened.vocabulary_size) == (3, "docs", VOCABULARY)
    parts = [part for frame in frames for part in frame.advance.sequences if part.sequence_id == opened.sequence_id]
    assert [part.step for part in parts] == list(range(1, len(parts) + 1))
    assert [token for part in parts for token in part.token_ids] == request.output[1:]
    assert [opened.sequence_id] in [list(frame.close.sequence_ids) for frame in frames]
