"""Every sequence goes its own way: what one of them waits for costs the others no pass, and changes no token (fp32)."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from conftest import make_tiny
from engine_harness import DEVICE_SEQUENCES, Outcome, engine_config, knowing_tree, make_runner, plain_each, request, run
from once import once
from structured_forms import SCHEMAS, VOCABULARY, trained_tokenizer
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from outrider.sampling import SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.core.sequence import SequenceRequest
from target_service.engine.launching import StepLauncher
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution.device_executor import DeviceSteps
from target_service.grammars import following
from target_service.grammars.following import FollowedGrammar
from target_service.model.runner import ModelRunner

pytestmark = pytest.mark.values

END = 2
PROMPT = (5, 9, 14)
# Nearly greedy, so that the coins decide nothing.
REJECTION = {"temperature": 1e-4, "seed": 3}
FREE = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def ended_model() -> PreTrainedModel:
    return make_tiny(vocab_size=VOCABULARY, eos_token_id=END)


def runner_of(model: PreTrainedModel, *, device_chooses: bool, kv_tokens: int = 2048) -> ModelRunner:
    runner = runner_for(model, trained_tokenizer(), num_pages=kv_tokens // 4, page_size=4)
    if device_chooses:
        runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    return runner


def formed(name: str, **sampling: Any) -> SequenceRequest:
    form = StructuredOutput(json_schema=json.dumps(SCHEMAS[name]))
    return request(PROMPT, 50, sampling=SamplingParams(structured_output=form, **sampling))


def free_requests() -> list[SequenceRequest]:
    rng = random.Random(7)
    pieces = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 4, 17)]
    return [request(piece * 3, 40, sampling=FREE) for piece in pieces]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "shaped": {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "min_tokens": 9, "logprobs": 2},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("device_chooses", [False, True], ids=["roots", "looked up"])
@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "drafted"])
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("kv_tokens", [2048, 240], ids=["roomy", "preempting"])
def test_forms_and_free_texts_share_their_steps(
    ended_model: PreTrainedModel,
    sampling: dict[str, Any],
    device_chooses: bool,
    drafted: bool,
    passes: int,
    kv_tokens: int,
) -> None:
    wanted = [formed(name, **sampling) for name in ("flat", "nested", "recursion")]
    expected = run(runner_of(ended_model, device_chooses=False), [replace(one, speculate=False) for one in wanted])
    free = free_requests()
    said = [one.token_ids for one in expected] + plain_each(ended_model, free)
    whole = [(*one.token_ids, *tokens) for one, tokens in zip([*wanted, *free], said, strict=True)]
    runner = runner_of(ended_model, device_chooses=device_chooses, kv_tokens=kv_tokens)
    propose = knowing_tree(whole, VOCABULARY, 12, 0.9) if drafted else None
    outcomes = run(runner, [*wanted, *free], propose=propose, on_device=True, stagger=2, passes=passes)
    assert [one.token_ids for one in outcomes] == said
    for one, own, request_ in zip(expected, outcomes, wanted, strict=False):
        totals = own.finished.totals
        # What a form forces takes no pass of its own, but where there are no pages for rows that a device may choose.
        if kv_tokens == 2048 or not device_chooses:
            assert totals.steps < 0.9 * one.finished.totals.steps and totals.accepted_tokens > 1
        listed = [len(entry.top) for verdict in own.verdicts for entry in verdict.logprobs]
        assert listed == ([2] * len(own.token_ids) if request_.sampling.logprobs else [])


@pytest.mark.parametrize("drafted", [False, True], ids=["alone", "drafted"])
@pytest.mark.parametrize("passes", [1, 4])
def test_rejection_beside_rows_that_the_device_chooses(tiny_model: PreTrainedModel, drafted: bool, passes: int) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 211) for _ in range(length)] * 3 for length in (1, 5, 17)]
    wanted = [request(prompt, 24, sampling=FREE) for prompt in prompts]
    sampling = SamplingParams(ignore_eos=True, **REJECTION)
    wanted[1] = request(prompts[1], 24, sampling=sampling, mode=VerificationMode.REJECTION)
    said = [one.token_ids for one in run(make_runner(tiny_model), wanted)]
    whole = [(*one.token_ids, *tokens) for one, tokens in zip(wanted, said, strict=True)]
    runner = make_runner(tiny_model, page_size=4)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    propose = knowing_tree(whole, 211, 20, 0.9) if drafted else None
    outcomes = run(runner, wanted, propose=propose, on_device=True, stagger=2, passes=passes)
    assert [one.token_ids for one in outcomes] == said
    if drafted:
        assert all(one.finished.totals.accepted_tokens > 5 for one in outcomes)


def test_forms_run_ahead(ended_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone on a device, every pass but the first is launched before the results of the one before, and masked behind
    them; what the form forces is drafted all the same."""
    launched: list[Step] = []
    begin = StepLauncher._launch

    def noted(launcher: StepLauncher, *arguments: Any, **options: Any) -> Step:
        launched.append(begin(launcher, *arguments, **options))
        # Nothing of the passes under way is known to the host.
        assert launched[-1].launched.awaits_masks == launched[-1].ahead
        return launched[-1]

    monkeypatch.setattr(StepLauncher, "_launch", noted)
    (outcome,) = run(runner_of(ended_model, device_chooses=True), [formed("uuid")], on_device=True)
    assert [step.ahead for step in launched] == [False] + [True] * (len(launched) - 1)
    totals = outcome.finished.totals
    # The last was launched in vain.
    assert len(launched) == totals.steps + 1
    assert totals.accepted_tokens > 1


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_a_form_whose_masks_take_long_has_no_drafted_rows(
    ended_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    def output() -> Outcome:
        return run(runner_of(ended_model, device_chooses=on_device), [formed("uuid")], on_device=on_device)[0]

    said = [output() for _ in range(2)]
    monkeypatch.setattr(following, "_most_seconds", lambda _: -1.0)
    slow = output()
    assert slow.token_ids == said[0].token_ids == said[1].token_ids
    # The first pass finds it out.
    assert slow.finished.totals.drafted_tokens == 0 < said[0].finished.totals.drafted_tokens


def test_a_late_mask_holds_up_nobody(ended_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = run(runner_of(ended_model, device_chooses=True), [formed("uuid")], on_device=True)
    monkeypatch.setattr(following, "_most_seconds", lambda _: -1.0)
    computed, compute = threading.Event(), FollowedGrammar.compute_ahead

    def late(grammar: FollowedGrammar, tree: TokenTree, output: Sequence[int]) -> None:
        computed.wait()
        compute(grammar, tree, output)

    monkeypatch.setattr(FollowedGrammar, "compute_ahead", late)
    runner = runner_of(ended_model, device_chooses=True, kv_tokens=1 << 14)
    loop = EngineLoop(runner, engine_config(), steps=DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=256))
    for number, one in enumerate([formed("uuid"), *free_requests()]):
        live = loop.make(number, one)
        loop.constrain(live)
        loop.add(live)
    form = loop.live[0].sequence
    try:
        while len(loop.live) > 1:
            loop.step()
        # The pass that read its prompt had the mask, and showed that it takes long.
        assert len(form.output) == 1 and form.awaits_mask
    finally:
        computed.set()
    while loop.live:
        loop.step()
    assert tuple(form.output) == tuple(alone.token_ids)
    assert form.totals.drafted_tokens == 0


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside others"])
def test_masks_that_take_long_hold_up_no_step(
    ended_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """They are left, and their sequence is read again, without drafts."""
    free = [] if alone else free_requests()
    said = [one.token_ids for one in run(runner_of(ended_model, device_chooses=True), [formed("uuid"), *free])]
    monkeypatch.setattr(following, "_most_seconds", lambda rows: -1.0 if rows > 1 else inf)
    runner = runner_of(ended_model, device_chooses=True, kv_tokens=1 << 14)
    outcomes = run(runner, [formed("uuid"), *free], on_device=True)
    assert [one.token_ids for one in outcomes] == said
    form, *others = [one.finished.totals for one in outcomes]
    # Only roots behind the first pass that had drafted rows, which does not count.
    assert form.preemptions == 1 and form.steps == len(said[0])
    assert all(one.preemptions == 0 for one in others)


ODD: dict[str, SequenceRequest] = {
    "a form": formed("uuid"),
    "rejection": request(
        [9, 8, 7], 40, sampling=SamplingParams(ignore_eos=True, **REJECTION), mode=VerificationMode.REJECTION
    ),
    "a client's trees": request([9, 8, 7], 40, sampling=FREE, external=True),
    "penalties": request([9, 8, 7], 40, sampling=SamplingParams(ignore_eos=True, frequency_penalty=0.3)),
    "log-probabilities": request([9, 8, 7], 40, sampling=SamplingParams(ignore_eos=True, logprobs=5)),
}


@once
def passes_beside(model: PreTrainedModel, odd: Sequence[SequenceRequest]) -> int:
    """The passes of 31 requests, with rows of the device's choice and each launched before the results of the one
    before, beside others."""
    launched: list[Step] = []
    begin = StepLauncher._launch

    def noted(launcher: StepLauncher, *arguments: Any, **options: Any) -> Step:
        launched.append(begin(launcher, *arguments, **options))
        return launched[-1]

    usual = [request([3 + number, 40, 41, 42], 12, sampling=FREE) for number in range(31)]
    runner = runner_of(model, device_chooses=True, kv_tokens=1 << 14)
    config = engine_config(max_running=DEVICE_SEQUENCES, max_step_rows=512)
    loop = EngineLoop(runner, config, steps=DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=512))
    for number, one in enumerate([*usual, *odd]):
        live = loop.make(number, one)
        loop.constrain(live)
        loop.add(live)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepLauncher, "_launch", noted)
        while any(number in loop.live for number in range(len(usual))):
            loop.step()
    held = [step for step in launched if any(item.sequence.sequence_id == 0 for item in step.batch.items)]
    assert all(step.batch.device_rows is not None for step in held[1:])
    # The first reads prompts; behind the last that has all of them there is nothing to read.
    assert all(step.ahead for step in held[1:])
    return len(held)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_the_others_keep_their_passes(ended_model: PreTrainedModel, odd: SequenceRequest) -> None:
    """Beside one of another kind they have every pass that they have without it."""
    assert passes_beside(ended_model, [odd]) == passes_beside(ended_model, [])
