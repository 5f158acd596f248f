"""Whatever the draft, the output is plain decoding's, token for token (fp32)."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import (
    Propose,
    engine_config,
    knowing_tree,
    make_runner,
    plain_each,
    random_tree,
    real_drafter,
    request,
    run,
)
from transformers import PreTrainedModel

from benchmarks.drafters.random_trees import RANDOM
from outrider.limits import TenantLimits
from outrider.sampling import SamplingParams, VerificationMode
from target_service.core.sequence import SequenceRequest
from target_service.speculation.policy.step_cost import StepCost

pytestmark = pytest.mark.values

VOCABULARY = 211
LENGTHS = (1, 5, 16, 17, 40)

GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)
PENALTIES = SamplingParams(
    temperature=0.7,
    top_k=40,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: 2.0, 7: -100.0},
    seed=5,
    ignore_eos=True,
)
GREEDY_PENALTIES = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=8)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "penalties": PENALTIES, "greedy-penalties": GREEDY_PENALTIES}


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def requests(sampling: SamplingParams, max_tokens: int = 16) -> list[SequenceRequest]:
    return [request(prompt, max_tokens, sampling=sampling) for prompt in prompts()]


@pytest.fixture(params=SAMPLINGS.values(), ids=SAMPLINGS)
def case(
    request: pytest.FixtureRequest, tiny_model: PreTrainedModel
) -> tuple[list[SequenceRequest], list[Sequence[int]]]:
    wanted = requests(request.param)
    return wanted, plain_each(tiny_model, wanted)


def drafter(name: str, wanted: Sequence[SequenceRequest], said: Sequence[Sequence[int]]) -> Propose | None:
    if name == "none":
        return None
    if name == "random":
        return random_tree(VOCABULARY, 24)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, said, strict=True)]
    return knowing_tree(whole, VOCABULARY, 40, right=0.8)


@pytest.mark.pairs
@pytest.mark.parametrize("draft", ["none", "random", "knowing"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
def test_output_is_plain_decoding(
    case: tuple[list[SequenceRequest], list[Sequence[int]]],
    tiny_model: PreTrainedModel,
    draft: str,
    page_size: int,
    stagger: int,
) -> None:
    wanted, said = case
    outcomes = run(make_runner(tiny_model, page_size), wanted, propose=drafter(draft, wanted, said), stagger=stagger)
    assert [o.token_ids for o in outcomes] == said
    accepted = sum(o.finished.totals.accepted_tokens for o in outcomes)
    if draft == "knowing":
        assert accepted > 20


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
@pytest.mark.parametrize("kv_tokens", [2048, 7 * 16], ids=["roomy", "preempting"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("passes", [1, 3])
def test_preparing_the_next_step_early_does_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]],
    tiny_model: PreTrainedModel,
    page_size: int,
    stagger: int,
    kv_tokens: int,
    on_device: bool,
    passes: int,
) -> None:
    wanted, said = case
    runner = make_runner(tiny_model, page_size, kv_tokens)
    outcomes = run(runner, wanted, stagger=stagger, can_launch_before_results=True, on_device=on_device, passes=passes)
    assert [o.token_ids for o in outcomes] == said
    # Each pass is a step to whoever counts, however many were launched at once.
    assert all(o.finished.totals.steps == len(o.token_ids) for o in outcomes)


@pytest.mark.parametrize("draft", ["random", "knowing"])
@pytest.mark.parametrize("prefill_chunk", [7, 64])
def test_verifying_on_the_device_does_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel, draft: str, prefill_chunk: int
) -> None:
    wanted, said = case
    config = engine_config(prefill_chunk=prefill_chunk)
    drafts = drafter(draft, wanted, said)
    outcomes = run(make_runner(tiny_model), wanted, propose=drafts, config=config, stagger=2, on_device=True)
    assert [o.token_ids for o in outcomes] == said


@pytest.mark.parametrize("temperature", [0.05, 0.9], ids=["accepting", "drawing"])
def test_rejection_on_the_device_decides_as_on_the_host(tiny_model: PreTrainedModel, temperature: float) -> None:
    """The same coins, the same trees: what differs would show as another token or another row."""
    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=11, ignore_eos=True)
    wanted = [request(prompt, 16, sampling=sampling, mode=VerificationMode.REJECTION) for prompt in prompts()]
    said = run(make_runner(tiny_model), wanted)
    whole = [(*one.token_ids, *outcome.token_ids) for one, outcome in zip(wanted, said, strict=True)]
    draft = knowing_tree(whole, VOCABULARY, 16, right=0.9)
    # Steps follow each other in the same order on either.
    how = {"propose": draft, "can_launch_before_results": True}
    host, device = (run(make_runner(tiny_model), wanted, on_device=where, **how) for where in (False, True))
    for one, other in zip(host, device, strict=True):
        assert one.token_ids == other.token_ids
        assert [v.accepted_rows for v in one.verdicts] == [v.accepted_rows for v in other.verdicts]
    if temperature < 0.1:
        # Nearly greedy, so that what was said before is said again, whatever the coins.
        assert sum(outcome.finished.totals.accepted_tokens for outcome in host) > 5


def test_rejection_with_several_passes_at_once_draws_the_same(tiny_model: PreTrainedModel) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    wanted = [request(prompt, 16, sampling=sampling, mode=VerificationMode.REJECTION) for prompt in prompts()]
    said = run(make_runner(tiny_model), wanted)
    for on_device in (False, True):
        outcomes = run(make_runner(tiny_model), wanted, can_launch_before_results=True, on_device=on_device, passes=4)
        assert [o.token_ids for o in outcomes] == [o.token_ids for o in said]
        # The first launch of several passes commits several tokens.
        assert any(len(verdict.token_ids) > 1 for o in outcomes for verdict in o.verdicts)


@pytest.mark.parametrize("passes", [1, 4])
def test_steps_ahead_and_drafted_steps_follow_each_other(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel, passes: int
) -> None:
    """Prompts that end while others are drafted for, by a switch that goes by what steps take."""
    wanted, said = case
    cost = StepCost([(1, 1.0), (64, 1.1)])
    drafts = drafter("knowing", wanted, said)
    runner = make_runner(tiny_model)
    outcomes = run(
        runner, wanted, propose=drafts, step_cost=cost, stagger=9, can_launch_before_results=True, passes=passes
    )
    assert [o.token_ids for o in outcomes] == said
    assert sum(o.finished.totals.accepted_tokens for o in outcomes) > 0


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_tokens", [2048, 7 * 16], ids=["roomy", "preempting"])
@pytest.mark.parametrize("late", [0, 2], ids=["on time", "late"])
def test_drafts_that_hardly_anybody_waits_for_do_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]],
    tiny_model: PreTrainedModel,
    on_device: bool,
    page_size: int,
    kv_tokens: int,
    late: int,
) -> None:
    """Drafts are waited for for a millisecond; late ones come two steps after what they answer."""
    wanted, said = case
    drafts, runner = drafter("knowing", wanted, said), make_runner(tiny_model, page_size, kv_tokens)
    how = {"stagger": 2, "late": late, "can_launch_before_results": True, "on_device": on_device}
    outcomes = run(runner, wanted, propose=drafts, config=engine_config(wait_seconds=0.001), **how)
    assert [o.token_ids for o in outcomes] == said
    if not late and all(one.sampling.repetition_penalty == 1 for one in wanted):
        assert sum(o.finished.totals.accepted_tokens for o in outcomes) > 20


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_real_drafter_follows_passes_launched_at_once(
    case: tuple[list[SequenceRequest], list[Sequence[int]]],
    tiny_model: PreTrainedModel,
    on_device: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It checks the steps that it is told of, and gives a sequence up where one is missing."""
    wanted, said = case
    with real_drafter("trie", VOCABULARY) as connect, caplog.at_level(logging.INFO):
        runner, cost = make_runner(tiny_model), StepCost([(1, 1.0), (64, 1.1)])
        how = {"step_cost": cost, "stagger": 3, "can_launch_before_results": True, "on_device": on_device, "passes": 4}
        outcomes = run(runner, [*wanted, *wanted], connect=connect, **how)
    assert [o.token_ids for o in outcomes] == [*said, *said]
    assert "gave up" not in caplog.text


# Drafters are told of neither; drafts over pages and in chunks of other sizes are tested above and below.
@pytest.mark.parametrize(("page_size", "prefill_chunk"), [(1, 7), (16, 64)])
@pytest.mark.parametrize("name", ["trie", "prompt_lookup", RANDOM], ids=["trie", "prompt_lookup", "random"])
def test_real_drafters_do_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]],
    tiny_model: PreTrainedModel,
    name: str,
    page_size: int,
    prefill_chunk: int,
) -> None:
    wanted, said = case
    # Twice over: the second time the trie has learnt the outputs, and drafts are accepted in earnest.
    twice, config = [*wanted, *wanted], engine_config(prefill_chunk=prefill_chunk)
    with real_drafter(name, VOCABULARY) as connect:
        runner = make_runner(tiny_model, page_size)
        outcomes = run(runner, twice, connect=connect, config=config, stagger=2)
    assert [o.token_ids for o in outcomes] == [*said, *said]
    # Random text hardly repeats itself, which is all that prompt lookup knows.
    if name != "prompt_lookup":
        assert sum(o.finished.totals.drafted_tokens for o in outcomes) > 0


@pytest.mark.parametrize("prefill_chunk", [1, 7, 16, 512])
def test_prefill_chunks_do_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel, prefill_chunk: int
) -> None:
    wanted, said = case
    config = engine_config(prefill_chunk=prefill_chunk, max_step_rows=max(20, prefill_chunk))
    outcomes = run(make_runner(tiny_model), wanted, propose=drafter("knowing", wanted, said), config=config)
    assert [o.token_ids for o in outcomes] == said


@pytest.mark.parametrize("late", [1, 2, 5])
def test_late_drafts_do_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel, late: int
) -> None:
    wanted, said = case
    outcomes = run(make_runner(tiny_model), wanted, propose=drafter("knowing", wanted, said), late=late)
    assert [o.token_ids for o in outcomes] == said


def test_drafts_cut_to_chains_do_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel
) -> None:
    wanted, said = case
    config = replace(engine_config(), batch_invariant=True)
    outcomes = run(make_runner(tiny_model), wanted, propose=drafter("knowing", wanted, said), config=config)
    assert [o.token_ids for o in outcomes] == said
    assert sum(o.finished.totals.accepted_tokens for o in outcomes) > 20


def test_the_row_budget_does_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel
) -> None:
    wanted, said = case
    cost = StepCost([(1, 1.0), (8, 1.2), (64, 2.0)])
    outcomes = run(make_runner(tiny_model), wanted, propose=drafter("knowing", wanted, said), step_cost=cost)
    assert [o.token_ids for o in outcomes] == said


def test_preemption_does_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel
) -> None:
    wanted, said = case
    # 112 pages of a token for five sequences that need up to 56 each.
    runner = make_runner(tiny_model, page_size=1, kv_tokens=7 * 16)
    outcomes = run(runner, wanted, propose=drafter("knowing", wanted, said))
    assert [o.token_ids for o in outcomes] == said
    assert sum(o.finished.totals.preemptions for o in outcomes) > 0


@pytest.mark.parametrize("how", [{}, {"can_launch_before_results": True}, {"on_device": True, "passes": 2}], ids=str)
def test_taking_turns_with_other_tenants_does_not_matter(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel, how: dict[str, Any]
) -> None:
    wanted, said = case
    # Two places and few pages for three tenants: places change hands in mid-output, and pages too.
    shared = [
        replace(one, tenant="abc"[i % 3], limits=TenantLimits(1.0 + i % 2, kv_tokens=128 * (i % 2)))
        for i, one in enumerate(wanted)
    ]
    runner = make_runner(tiny_model, page_size=1, kv_tokens=9 * 16)
    outcomes = run(runner, shared, config=engine_config(max_running=2), stagger=3, **how)
    assert [o.token_ids for o in outcomes] == said


def test_load_switches_drafting_off_and_on(
    case: tuple[list[SequenceRequest], list[Sequence[int]]], tiny_model: PreTrainedModel
) -> None:
    wanted, said = case
    config = engine_config(disable_above=3)
    outcomes = run(make_runner(tiny_model), wanted, propose=drafter("knowing", wanted, said), config=config, stagger=4)
    assert [o.token_ids for o in outcomes] == said
    assert any(o.finished.totals.drafted_steps for o in outcomes)
