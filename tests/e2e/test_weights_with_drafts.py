"""Weights that are exchanged while our drafters draft: a trie goes on, and a head, with states of the new weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import Connect, plain_each
from head_runs import drafting
from other_weights import other_weights
from running_engine import Running
from taught_heads import SAMPLINGS, prompts, request_of, taught_head
from transformers import PreTrainedModel

from draft_service.drafters.base import Drafter
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from outrider.weight_updates import RunningRequests
from target_service.core.sequence import SequenceEvent, StepVerdict

pytestmark = pytest.mark.values

# Of an answer, and before the exchange. A trie drafts once an answer repeats itself.
TOKENS, SAID = {"trie": 120, "eagle": 50}, 10


@pytest.fixture(scope="module")
def new(teacher: PreTrainedModel) -> PreTrainedModel:
    return other_weights(teacher)


@pytest.fixture(scope="module")
def folder(new: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("new")
    new.save_pretrained(path)
    return path


def connected(kind: str, taught_by: PreTrainedModel, drafters: list[Drafter]) -> Connect:
    """A trie, or a head that learnt what one of the models says."""
    if kind == "trie":
        return drafting(lambda: NgramDrafter(TrieConfig()), drafters)
    head = taught_head(taught_by, "eagle-3.1")
    config = EagleConfig(num_steps=3, dtype="float32", projection="draft")
    return drafting(lambda: EagleDrafter(config, head), drafters)


@pytest.fixture
def running(
    request: pytest.FixtureRequest, tiny_model: PreTrainedModel, teacher: PreTrainedModel, new: PreTrainedModel
) -> Iterator[tuple[Running, list[Drafter]]]:
    kind, of = request.param
    drafters: list[Drafter] = []
    engine = Running(tiny_model, connect=connected(kind, new if of == "new" else teacher, drafters))
    yield engine, drafters
    engine.engine.stop()
    for drafter in drafters:
        drafter.stop()


def of_version(verdicts: list[StepVerdict], version: int) -> tuple[list[int], int]:
    """What was said under it, and how many of these tokens had been drafted."""
    own = [verdict for verdict in verdicts if verdict.model_version == version]
    return [token for verdict in own for token in verdict.token_ids], sum(verdict.drafted_tokens for verdict in own)


@pytest.mark.parametrize(
    ("running", "sampling"),
    [(("trie", ""), "greedy"), (("trie", ""), "seeded"), (("eagle", "old"), "seeded"), (("eagle", "new"), "greedy")],
    indirect=["running"],
    ids=["trie-greedy", "trie-seeded", "old-head-seeded", "new-head-greedy"],
)
def test_drafts_go_on_and_outputs_are_those_of_either_weights(
    running: tuple[Running, list[Drafter]],
    teacher: PreTrainedModel,
    new: PreTrainedModel,
    folder: Path,
    sampling: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, drafters = running
    kind, of = request.node.callspec.params["running"]
    wanted = [request_of(prompt, SAMPLINGS[sampling], TOKENS[kind]) for prompt in prompts()]
    loop = engine.engine._loop
    run_step = loop.step

    def step() -> list[SequenceEvent] | None:
        """Once all have said something, nothing until the weights are read: answers might end before."""
        said = [live.sequence.totals.completion_tokens for live in loop.live.values()]
        if len(said) == len(wanted) and min(said) >= SAID and loop.model_version == 1 and not loop.settling:
            time.sleep(1e-3)
            return []
        return run_step()

    monkeypatch.setattr(loop, "step", step)
    begun = [engine.engine.submit(one) for one in wanted]
    for sequence_id in begun:
        engine.wait_said(sequence_id, SAID)
    engine.update(folder, RunningRequests.CONTINUE)
    assert engine.result().continued == len(begun)
    accepted, reads, said = {1: 0, 2: 0}, [], []
    for prompt, by_old, sequence_id in zip(prompts(), plain_each(teacher, wanted), begun, strict=True):
        engine.wait_last(sequence_id)
        (first, before), (rest, after) = (of_version(engine.verdicts(sequence_id), version) for version in (1, 2))
        assert len(first) + len(rest) == TOKENS[kind] and rest
        assert first == list(by_old)[: len(first)]
        reads.append(request_of([*prompt, *first], SAMPLINGS[sampling], len(rest)))
        said.append(tuple(rest))
        accepted[1], accepted[2] = accepted[1] + before, accepted[2] + after
    if sampling == "greedy":
        # A fresh engine that reads all that was said; noise hangs on places, which it would count anew.
        assert said == plain_each(copy.deepcopy(new), reads)
    # A trie needs no training, and a head is right at times of the weights that it learnt from.
    if kind == "trie" or of == "new":
        assert accepted[2] > 0
    if of == "old":
        assert accepted[1] > 0
    assert drafters[0].stats().get("eagle_cache_used_tokens", 0) == 0
