"""A head that ranks share drafts behind their passes, as threads and without a GPU: each of them grows the trees that
one rank grows, and no token changes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_ranks import DRAFT_TOKENS, ThreadLink, captured_rank, leading_rank
from conftest import make_tiny
from engine_harness import engine_config, plain_each, request, run
from in_pass_heads import Drafted, head_of, in_pass_head, recorded
from rerun_graphs import CPU, ROWS, SEQUENCES, RerunRunner, without_gpu
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor
from transformers import PreTrainedModel

from draft_service.eagle.checkpoint import save_head
from draft_service.in_pass import InPassHead
from outrider.drafting.link import prepare_in_pass
from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceRequest
from target_service.execution.device_executor import DeviceSteps
from target_service.model.cuda_graphs.capturing import capture_steps
from tree_models.in_pass import MakeDrafter, PassTarget

__all__ = ["without_gpu"]

VOCABULARY, MAX_TOKENS = 211, 14
CONFIG = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS // 2)
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny(num_hidden_layers=3)


def wanted(sampling: SamplingParams) -> list[SequenceRequest]:
    rng = random.Random(3)
    # The last prompt is read in parts, and runs into an eager pass.
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17, 60)]
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in prompts]


def drafted_by(runner: RerunRunner, model: PreTrainedModel, drafted: list[Drafted]) -> list[Drafted]:
    """The trees behind every launch of several requests, whose outputs are the model's own."""
    steps = DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
    drafted.clear()
    with torch.inference_mode():
        for sampling, passes in zip(SAMPLINGS.values(), (1, 3), strict=True):
            requests = wanted(sampling)
            outcomes = run(runner, requests, launch=steps, passes=passes, stagger=2, config=CONFIG)
            assert [outcome.token_ids for outcome in outcomes] == plain_each(model, requests)
    return list(drafted)


def kept_of(drafter: InPassHead) -> list[Tensor]:
    """What trees keep, [B, 1 + 3 * N] each, of all that are grown from now on."""
    kept, grow = list[Tensor](), drafter.grow

    def grow_and_note(sequences: int, step: Any, to: Any, *, coupled: bool) -> None:
        grow(sequences, step, to, coupled=coupled)
        trees = drafter.trees_for(sequences)
        # Of sequences that are there.
        kept.append(trees._kept[trees.tails.bases > 0].clone())

    drafter.grow = grow_and_note  # type: ignore[method-assign]
    return kept


class HeadsOfRanks:
    """Parts of one head, of each rank what its trees keep, and of the first rank those that it leaves in a table."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.kept = model, dict[int, list[Tensor]]()
        self.drafted: list[Drafted] = []

    def of(self, link: ThreadLink) -> InPassHead:
        own = in_pass_head(self._model, link, DRAFT_TOKENS)
        assert own.divided and own.cache_shapes[0].heads == 1
        self.kept[link.rank] = kept_of(own)
        if link.leads:
            self.drafted = recorded(own)
        return own


def test_every_rank_grows_the_trees_of_one(without_gpu: None, model: PreTrainedModel) -> None:
    del without_gpu
    drafter = in_pass_head(model, tokens=DRAFT_TOKENS)
    whole = captured_rank(model, drafter=drafter)
    capture_steps(whole, seconds=60.0, memory_share=0.0)
    expected = drafted_by(whole, model, recorded(drafter))
    assert len(expected) > 50
    # Ranks that have a key head each, and two that have one in common.
    for size in (2, 4):
        heads = HeadsOfRanks(model)
        with leading_rank(model, size, heads.of, memory_share=0.0) as runner:
            found = drafted_by(runner, model, heads.drafted)
        kept = heads.kept
        # Where two nodes are equal but for rounding another one may be taken.
        assert len(found) == len(expected) and sum(map(Drafted.__eq__, found, expected)) > 0.9 * len(expected)
        for rank in range(1, size):
            assert len(kept[rank]) == len(kept[0])
            assert all(map(torch.equal, kept[rank], kept[0]))


@pytest.mark.parametrize("tokens", [DRAFT_TOKENS, 209])
def test_a_head_that_ranks_cannot_divide_drafts_on_the_first(
    model: PreTrainedModel, tokens: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model.save_pretrained(tmp_path / "target")
    save_head(head_of(model), tmp_path / "head", embedding=True)
    tokens_file = tmp_path / "tokens.json"
    tokens_file.write_text(json.dumps(list(range(tokens))))
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    target = PassTarget(layers, layers, False, width, VOCABULARY, "", CPU, torch.float32)
    flags = f"inpass:eagle --head {tmp_path / 'head'} --token-map {tokens_file}"

    def load(rank: ThreadRank) -> InPassHead | None:
        make: MakeDrafter = prepare_in_pass(flags, str(tmp_path / "target"))
        made = make(target._replace(ranks=rank))
        assert made is None or isinstance(made, InPassHead)
        return made

    first, second = on_ranks(2, load)
    assert first is not None
    if tokens % 2:
        assert second is None and not first.divided
        assert "drafts on the first rank alone: 2 ranks: 209 draft tokens cannot be divided by them" in caplog.text
        return
    assert second is not None and first.divided and second.divided and not caplog.text
    heads = [one._head for one in (first, second)]
    whole = head_of(model, tokens=tokens)
    assert torch.equal(torch.cat([head.lm_head.plain.weight for head in heads]), whole.lm_head.plain.weight)
    assert all(torch.equal(head.embedding, whole.embedding) for head in heads)
