"""Requests that ask for trees are told what each step verified, and get the same answer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import knowing_tree, make_runner, plain, plain_each, request, run
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from target_service.core.sequence import SequenceRequest

VOCABULARY = 211
TOKENS = 40
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
    "penalties": SamplingParams(repetition_penalty=1.3, ignore_eos=True),
}
# How steps are launched: each after the one before, prepared while that one runs, and verified by the device.
LAUNCHES: dict[str, dict[str, Any]] = {
    "host": {},
    "ahead": {"can_launch_before_results": True},
    "device": {"on_device": True},
}


def asked(sampling: SamplingParams, seed: int = 3) -> SequenceRequest:
    rng = random.Random(seed)
    return request([rng.randrange(3, VOCABULARY) for _ in range(19)], TOKENS, sampling=sampling)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_trees_are_what_was_verified(tiny_model: PreTrainedModel, sampling: str, launch: str) -> None:
    wanted, other = (asked(SAMPLINGS[sampling], seed) for seed in (3, 4))
    said = plain_each(tiny_model, (wanted, other))
    texts = [(*one.token_ids, *output) for one, output in zip((wanted, other), said, strict=True)]
    propose = knowing_tree(texts, VOCABULARY, 24, right=0.7)
    both = [replace(wanted, trees=True), other]
    shown, silent = run(make_runner(tiny_model), both, propose=propose, stagger=3, **LAUNCHES[launch])
    assert [shown.token_ids, silent.token_ids] == said
    assert all(verdict.tree is None for verdict in silent.verdicts)
    text = list(wanted.token_ids)
    drafted = 0
    for verdict in shown.verdicts:
        assert verdict.tree is not None
        token_ids, parents, accepted = verdict.tree
        # Every rule of a tree.
        TokenTree.checked(token_ids, parents, vocabulary_size=VOCABULARY)
        assert token_ids[0] == text[-1]
        assert accepted == verdict.accepted_rows
        assert [parents[row] for row in accepted] == [0, *accepted[:-1]][: len(accepted)]
        path = tuple(token_ids[row] for row in accepted)
        assert verdict.token_ids[: len(path)] == path and len(verdict.token_ids) <= len(path) + 1
        text += verdict.token_ids
        drafted += len(token_ids) - 1
    totals = shown.finished.totals
    assert drafted == totals.drafted_tokens > totals.accepted_tokens > 0


def test_a_stop_inside_a_path_ends_it(tiny_model: PreTrainedModel) -> None:
    """Rows behind the last token are no part of the output, though the model would have said them."""
    wanted = asked(SAMPLINGS["greedy"])
    said = plain(tiny_model, wanted)
    propose = knowing_tree([(*wanted.token_ids, *said)], VOCABULARY, 24, right=1.0)
    inside = 0
    for place in range(8, 20):
        stopping = SamplingParams(ignore_eos=True, stop_token_ids=(said[place],))
        outcome = run(make_runner(tiny_model), [replace(wanted, sampling=stopping, trees=True)], propose=propose)[0]
        last = outcome.verdicts[-1]
        assert outcome.token_ids == said[: said.index(said[place]) + 1]
        assert last.tree is not None and last.tree.accepted_rows == last.accepted_rows
        assert len(last.accepted_rows) == last.drafted_tokens
        inside += last.drafted_tokens < len(last.tree.token_ids) - 1
    assert inside > 0


def test_steps_launched_at_once_have_none(tiny_model: PreTrainedModel) -> None:
    """Nobody lays out a tree of a pass whose root only the device knows."""
    wanted = replace(asked(SAMPLINGS["greedy"]), trees=True)
    outcome = run(make_runner(tiny_model), [wanted], on_device=True, passes=4)[0]
    assert outcome.token_ids == plain(tiny_model, wanted)
    several = [verdict for verdict in outcome.verdicts if verdict.passes > 1]
    assert several and all(verdict.tree is None for verdict in several)
