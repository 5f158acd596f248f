"""A sequence that the draft gives up costs no token, and whoever asked for it is told why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from draft_harness import draft_over
from engine_harness import ScriptedDraft, knowing_tree, make_runner, plain, real_drafter, request, run
from scripted_engine import ScriptedEngine
from scripted_service import target_over
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from draft_service.drafters.base import create
from outrider.drafting.events import SequenceFailure
from outrider.errors import EngineDead
from outrider.sampling import SamplingParams
from outrider.wire.frames import OpenSequence
from outrider_client import Client, ServiceUnreachable, Speculation, SyncClient
from target_service.config import TargetConfig
from target_service.lifecycle import serve_engine
from target_service.shared_engine import SharedEngine

VOCABULARY = 211
PROMPT = [198, 197, 196] * 7
TOKENS = 24
SAMPLING = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
UNKNOWN = Speculation(corpus="nosuch")


def test_totals_hold_the_reason(tiny_model: PreTrainedModel) -> None:
    wanted = [request(PROMPT, TOKENS, corpus="nosuch"), request(PROMPT, TOKENS)]
    with real_drafter("trie", VOCABULARY) as connect:
        refused, drafted = run(make_runner(tiny_model), wanted, connect=connect)
    assert refused.token_ids == drafted.token_ids == plain(tiny_model, wanted[1])
    assert refused.finished.totals.draft_refused == "UNKNOWN_CORPUS"
    assert refused.finished.totals.drafted_tokens == 0
    assert drafted.finished.totals.draft_refused == ""


@dataclass
class _GivesUp(ScriptedDraft):
    """Refuses every sequence, for `reason`."""

    reason: str = ""

    def open(self, sequence: OpenSequence) -> None:
        super().open(sequence)
        self.events.receive(SequenceFailure(sequence.sequence_id, self.reason, "a text of its own"))


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("QUOTA_EXCEEDED", "QUOTA_EXCEEDED"),
        ("A_REASON_OF_2031", "A_REASON_OF_2031"),
        ("", "INTERNAL"),
        ("\x1b[31mRED", "INTERNAL"),
        ("a text", "INTERNAL"),
        ("A\r\nB", "INTERNAL"),
        ("A" * 64, "INTERNAL"),
    ],
)
def test_a_draft_chooses_no_text_that_callers_are_told(tiny_model: PreTrainedModel, reason: str, told: str) -> None:
    propose = knowing_tree([], VOCABULARY, 3, 0.5)
    (outcome,) = run(
        make_runner(tiny_model),
        [request(PROMPT, 2)],
        connect=lambda events: _GivesUp(events, propose, reason=reason),
    )
    assert outcome.finished.totals.draft_refused == told


@pytest.fixture
async def target(tiny_model: Any, tmp_path: Path) -> AsyncIterator[str]:
    """Address of a target with a trie beside it, to which it is connected."""
    stopping = asyncio.Event()
    trie = create("trie")
    trie.start()
    async with draft_over(trie) as draft:
        config = TargetConfig(
            listen=f"unix:{tmp_path}/target",
            draft=draft.server.address,
            draft_wait_ms=2000.0,
            row_budget="all",
            drain_seconds=60.0,
        )
        runner = runner_for(tiny_model, None, num_pages=64, page_size=16, name="tiny")
        running = asyncio.create_task(serve_engine(config, SharedEngine(config, runner), stopping))
        try:
            async with Client.connect(config.listen) as client, asyncio.timeout(HUNG_SECONDS):
                while not await _is_connected(client):
                    await asyncio.sleep(0.05)
            yield config.listen
        finally:
            stopping.set()
            assert await running == 0
            trie.stop()


async def _is_connected(client: Client) -> bool:
    try:
        return await client.serving(HUNG_SECONDS) and (await client.info(timeout=HUNG_SECONDS)).draft_connected
    except ServiceUnreachable:
        return False


async def test_callers_are_told(target: str) -> None:
    async with Client.connect(target) as client:
        generation = client.generate(token_ids=PROMPT, sampling=SAMPLING, speculation=UNKNOWN)
        assert generation.draft_refused == ""
        refused = await generation.result()
        drafted = await client.generate(token_ids=PROMPT, sampling=SAMPLING).result()
    assert generation.draft_refused == refused.draft_refused == "UNKNOWN_CORPUS"
    assert drafted.draft_refused == ""
    assert refused.token_ids == drafted.token_ids


async def test_callers_are_told_where_the_request_fails() -> None:
    async with target_over(ScriptedEngine(tick=0.05)) as target, Client.connect(target.server.address) as client:
        target.engine.draft_refused = "UNKNOWN_CORPUS"
        generation = client.generate(token_ids=[10], sampling=SAMPLING)
        await anext(aiter(generation))
        target.engine.die(RuntimeError("a bug"))
        with pytest.raises(EngineDead):
            await generation.result()
    assert generation.draft_refused == "UNKNOWN_CORPUS"


async def test_callers_without_a_loop_are_told(target: str) -> None:
    def ask() -> tuple[str, str]:
        with SyncClient.connect(target) as client:
            generation = client.generate(token_ids=PROMPT, sampling=SAMPLING, speculation=UNKNOWN)
            return generation.result().draft_refused, generation.draft_refused

    assert await asyncio.to_thread(ask) == ("UNKNOWN_CORPUS", "UNKNOWN_CORPUS")
