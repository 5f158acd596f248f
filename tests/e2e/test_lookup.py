"""What the device drafts from a sequence's own text changes no token, whatever else runs (fp32)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine_harness import (
    DEVICE_SEQUENCES,
    Outcome,
    engine_config,
    knowing_tree,
    make_runner,
    plain_each,
    random_tree,
    request,
    run,
)
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams, VerificationMode
from target_service.core.sequence import SequenceRequest
from target_service.speculation.policy.step_cost import StepCost

pytestmark = pytest.mark.values

VOCABULARY = 211
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
    "cold": SamplingParams(temperature=0.05, seed=3, ignore_eos=True),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True),
}


def requests(sampling: SamplingParams, max_tokens: int = 28) -> list[SequenceRequest]:
    """Prompts that repeat themselves, and one that does not."""
    rng = random.Random(7)
    pieces = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 3, 5, 17, 40)]
    return [request(piece * (1 + number % 3), max_tokens, sampling=sampling) for number, piece in enumerate(pieces)]


def accepted(outcomes: list[Outcome]) -> int:
    return sum(one.finished.totals.accepted_tokens for one in outcomes)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("lookup_tokens", [1, 7, 15])
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
@pytest.mark.parametrize("passes", [1, 4])
def test_what_is_said_is_plain_decodings(
    tiny_model: PreTrainedModel, sampling: SamplingParams, lookup_tokens: int, stagger: int, passes: int
) -> None:
    wanted = requests(sampling)
    said = plain_each(tiny_model, wanted)
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, lookup_tokens)
    config = engine_config(prefill_chunk=16)
    outcomes = run(runner, wanted, config=config, on_device=True, stagger=stagger, passes=passes)
    assert [one.token_ids for one in outcomes] == said
    if sampling.temperature < 0.5 and sampling is not SAMPLINGS["penalties"]:
        # A small model falls into loops.
        assert accepted(outcomes) > 20
    for one in outcomes:
        totals = one.finished.totals
        for verdict in one.verdicts:
            if verdict.drafts_by_step:
                assert sum(verdict.drafts_by_step) == verdict.drafted_tokens
                assert len(verdict.drafts_by_step) == verdict.passes
        # Each verdict comes under its last step.
        assert one.verdicts[-1].step >= totals.steps - 1
        assert sum(verdict.passes for verdict in one.verdicts) == totals.steps
        # The last pass may have been cut before its own token.
        assert 0 <= totals.steps + totals.accepted_tokens - totals.completion_tokens <= 1
        assert sum(totals.accepted_by_depth) == totals.accepted_tokens
        assert totals.drafted_steps <= totals.steps


@pytest.mark.parametrize("recycles", [False, True], ids=["looked up", "recycled too"])
@pytest.mark.parametrize("max_step_rows", [6, 9, 16, 40])
@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["seeded"]], ids=["greedy", "seeded"])
def test_rows_that_are_too_few_are_shared_out(
    tiny_model: PreTrainedModel, sampling: SamplingParams, max_step_rows: int, recycles: bool
) -> None:
    """Five sequences of which each wants fifteen, or many; one wants none, and one few."""
    wanted = requests(sampling)
    wanted[1:3] = [replace(wanted[1], speculate=False), replace(wanted[2], max_draft_nodes=2)]
    said = plain_each(tiny_model, wanted)
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, recycles=recycles)
    config = engine_config(max_step_rows=max_step_rows, prefill_chunk=max_step_rows - 5)
    outcomes = run(runner, wanted, config=config, on_device=True, passes=4)
    assert [one.token_ids for one in outcomes] == said
    totals = [one.finished.totals for one in outcomes]
    # A small model falls into loops, unless it draws.
    assert accepted(outcomes) > 0 or sampling is not SAMPLINGS["greedy"]
    assert totals[1].drafted_tokens == 0 and len(totals[2].drafted_by_depth) <= 2
    most = max_step_rows - 1 if recycles else min(15, max_step_rows - 1)
    assert all(one.drafted_tokens <= most * one.drafted_steps for one in totals)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_pages_of_any_size(tiny_model: PreTrainedModel, page_size: int) -> None:
    wanted = requests(SAMPLINGS["greedy"])
    said = plain_each(tiny_model, wanted)
    runner = make_runner(tiny_model, page_size=page_size)
    runner.enable_device_row_selection(DEVICE_SEQUENCES)
    outcomes = run(runner, wanted, on_device=True, passes=4)
    assert [one.token_ids for one in outcomes] == said


def test_sequences_that_lose_their_pages_are_read_again(tiny_model: PreTrainedModel) -> None:
    wanted = requests(SAMPLINGS["greedy"], 40)
    said = plain_each(tiny_model, wanted)
    runner = make_runner(tiny_model, page_size=4, kv_tokens=240)
    runner.enable_device_row_selection(DEVICE_SEQUENCES)
    outcomes = run(runner, wanted, on_device=True, passes=2)
    assert [one.token_ids for one in outcomes] == said
    assert any(one.finished.totals.preemptions for one in outcomes)


def test_an_end_in_the_middle_of_a_pass_ends_the_sequence(tiny_model: PreTrainedModel) -> None:
    wanted = [replace(one, max_tokens=count) for count, one in enumerate(requests(SAMPLINGS["greedy"]), start=1)]
    said = plain_each(tiny_model, wanted)
    stopped = [
        replace(one, sampling=replace(one.sampling, stop_token_ids=(tokens[-1],)), max_tokens=40)
        for one, tokens in zip(requests(SAMPLINGS["greedy"]), said, strict=True)
    ]
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES)
    config = engine_config()
    outcomes = run(runner, wanted, config=config, on_device=True, passes=4)
    assert [one.token_ids for one in outcomes] == said
    for outcome, one in zip(run(runner, stopped, config=config, on_device=True, passes=4), stopped, strict=True):
        assert outcome.token_ids[-1] in one.sampling.stop_token_ids
        assert outcome.token_ids.index(outcome.token_ids[-1]) == len(outcome.token_ids) - 1


@pytest.mark.parametrize("right", [0.0, 0.8], ids=["random", "knowing"])
@pytest.mark.parametrize("late", [0, 2], ids=["in time", "late"])
@pytest.mark.parametrize("costed", [True, False], ids=["adaptive", "all rows"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_beside_a_draft(
    tiny_model: PreTrainedModel, sampling: SamplingParams, right: float, late: int, costed: bool
) -> None:
    wanted = requests(sampling)
    said = plain_each(tiny_model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, said, strict=True)]
    propose = knowing_tree(whole, VOCABULARY, 40, right) if right else random_tree(VOCABULARY, 24)
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES)
    outcomes = run(
        runner,
        wanted,
        step_cost=StepCost([(1, 1.0), (64, 1.1)]) if costed else None,
        propose=propose,
        late=late,
        on_device=True,
        stagger=2,
        passes=2,
    )
    assert [one.token_ids for one in outcomes] == said


def test_only_for_those_who_want_drafts_and_whose_distribution_allows_it(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES)
    greedy = requests(SAMPLINGS["greedy"])
    rejecting = SamplingParams(temperature=0.9, seed=3, ignore_eos=True)
    for wanted in (
        [replace(one, speculate=False) for one in greedy],
        [replace(one, sampling=rejecting, mode=VerificationMode.REJECTION) for one in greedy],
    ):
        outcomes = run(runner, wanted, on_device=True, passes=4)
        assert accepted(outcomes) == 0
        assert all(one.finished.totals.drafted_tokens == 0 for one in outcomes)


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("device_chooses", [False, True], ids=["roots", "looked up"])
@pytest.mark.parametrize("kv_tokens", [2048, 160], ids=["roomy", "preempting"])
def test_log_probabilities_come_with_their_tokens(
    tiny_model: PreTrainedModel, passes: int, device_chooses: bool, kv_tokens: int
) -> None:
    """Of some of the requests, beside penalties, biases and the end's minimum; the same as the host reads."""
    listed = (3, None, 0, None, 20)
    sampling = [
        SamplingParams(logprobs=count, min_tokens=30, logit_bias={9: 1.5}, frequency_penalty=-0.05 * (count or 0))
        for count in listed
    ]
    wanted = [replace(one, sampling=own) for one, own in zip(requests(SAMPLINGS["greedy"], 40), sampling, strict=True)]
    expected = run(make_runner(tiny_model), wanted)
    runner = make_runner(tiny_model, page_size=4, kv_tokens=kv_tokens)
    if device_chooses:
        runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    found = run(runner, wanted, on_device=True, passes=passes, stagger=1)
    for one, other, count in zip(expected, found, listed, strict=True):
        assert one.token_ids == other.token_ids
        own, others = ([entry for v in each.verdicts for entry in v.logprobs] for each in (one, other))
        assert len(others) == (0 if count is None else len(one.token_ids))
        for entry, same in zip(own, others, strict=True):
            assert [token for token, _ in entry.top] == [token for token, _ in same.top] and len(entry.top) == count
            numbers = [[each.logprob, *(value for _, value in each.top)] for each in (entry, same)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert accepted(found) > 0 or not device_chooses
    assert kv_tokens > 160 or any(one.finished.totals.preemptions for one in found)
