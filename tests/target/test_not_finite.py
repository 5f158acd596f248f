"""Logits that are no finite numbers end their request with an error of its own, and no other request."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence

import pytest
import torch
from conftest import make_tiny
from early_steps import host_steps
from engine_harness import (
    DEVICE_SEQUENCES,
    Propose,
    ScriptedDraft,
    engine_config,
    make_runner,
    plain,
    plain_each,
    random_tree,
)
from engine_harness import request as request_of
from transformers import PreTrainedModel

from outrider.errors import LogitsNotFinite
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from target_service.core.sequence import SequenceEvent, SequenceFailed, SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import HostSteps, Steps
from target_service.model.runner import ModelRunner
from target_service.sampling import verifier
from target_service.telemetry.metrics import PrometheusObserver

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = ([5, 6, 7, 8], [9, 10, 11], [30, 31, 32, 33, 34])
TOKENS = 12
# No prompt here has it, and no answer.
POISON = 210


@functools.cache
def poisoned(token: int) -> PreTrainedModel:
    """A model in which one token's embedding is infinite."""
    model = make_tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[token, 3] = torch.inf
    return model


def executor(kind: str, runner: ModelRunner) -> Steps:
    if kind.startswith("host"):
        return host_steps(runner, early=kind == "host, ahead")
    if kind == "device, tables":
        runner.enable_device_row_selection(DEVICE_SEQUENCES, 15, "torch")
    return DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=512, backend="torch")


KINDS = ("host", "host, ahead", "device", "device, tables")


def outcomes_of(
    runner: ModelRunner, wanted: Sequence[SequenceRequest], kind: str, propose: Propose | None = None, passes: int = 1
) -> list[tuple[tuple[int, ...], SequenceEvent]]:
    """The tokens of each request, and its last event."""
    loop = EngineLoop(runner, engine_config(), steps=executor(kind, runner))
    loop.speculation.updates.multi_step.passes = passes
    if propose is not None:
        loop.drafting.attach(ScriptedDraft(loop.drafting, propose))
        loop.drafting.listen()
    for number, one in enumerate(wanted, start=1):
        loop.add(loop.make(number, one))
    said: dict[int, list[int]] = {number: [] for number in range(1, len(wanted) + 1)}
    ended: dict[int, SequenceEvent] = {}
    while len(ended) < len(wanted):
        for event in loop.step() or ():
            assert event.sequence_id not in ended
            if isinstance(event, StepVerdict):
                assert all(0 <= token < runner.vocabulary_size for token in event.token_ids)
                said[event.sequence_id] += event.token_ids
                if event.finish is not None:
                    continue
            else:
                ended[event.sequence_id] = event
        loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
    while loop.step() is not None:
        pass
    assert not loop.live and runner.cache.used_pages == 0
    return [(tuple(said[number]), ended[number]) for number in said]


SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    "rejection": SamplingParams(temperature=0.9, seed=3, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    "log-probabilities": SamplingParams(temperature=0.0, logprobs=3, ignore_eos=True),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_with_a_broken_embedding_fails_alone(
    kind: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Coins of rejection sampling are drawn by it: by that of a few processes, an answer has the broken token.
    monkeypatch.setattr(verifier, "_COIN_SECRET", bytes(16))
    model = poisoned(POISON)
    mode = VerificationMode.REJECTION if sampling == "rejection" else None
    prompts = [PROMPTS[0], [5, POISON, 7], PROMPTS[1]]
    wanted = [request_of(prompt, TOKENS, sampling=SAMPLINGS[sampling], mode=mode) for prompt in prompts]
    first, broken, last = outcomes_of(make_runner(model), wanted, kind)
    assert broken[0] == () and isinstance(broken[1], SequenceFailed) and isinstance(broken[1].error, LogitsNotFinite)
    for one, found in ((wanted[0], first), (wanted[2], last)):
        assert isinstance(found[1], SequenceFinished) and len(found[0]) == TOKENS
        if mode is None:
            assert found[0] == plain(model, one)


@pytest.mark.parametrize(("passes", "drafted"), [(1, False), (3, False), (1, True)], ids=["plain", "passes", "drafted"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_before_a_broken_one_are_delivered(kind: str, passes: int, drafted: bool) -> None:
    """The fifth token's embedding is infinite, so nothing can follow it."""
    whole = make_tiny()
    wanted = [request_of(prompt, TOKENS, sampling=GREEDY) for prompt in PROMPTS]
    answers = plain_each(whole, wanted)
    fifth = answers[0][4]
    assert answers[0].index(fifth) == 4 and fifth not in {*answers[1], *answers[2], *PROMPTS[1], *PROMPTS[2]}

    def chain(tokens: Sequence[int], _random: random.Random) -> TokenTree:
        """What the first answer would go on with, or anything."""
        follows = next((a for p, a in zip(PROMPTS, answers, strict=True) if list(p) == list(tokens[: len(p)])), ())
        ahead = follows[len(tokens) - 4 :][:3] if tokens[0] == 5 else ()
        return TokenTree(
            (tokens[-1], *ahead), tuple(max(i - 1, 0) for i in range(len(ahead) + 1)), (1.0,) * (len(ahead) + 1)
        )

    propose = chain if drafted else None
    broken, *others = outcomes_of(make_runner(poisoned(fifth)), wanted, kind, propose, passes)
    assert isinstance(broken[1], SequenceFailed) and isinstance(broken[1].error, LogitsNotFinite)
    assert broken[0] == answers[0][: len(broken[0])] and len(broken[0]) <= 5
    if not drafted and passes == 1:
        assert len(broken[0]) == 5
    assert [tokens for tokens, _ in others] == answers[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafted_token_with_a_broken_embedding_harms_nobody(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its values are NaN, and 0 times NaN is NaN: its siblings' logits are not finite either. Plain decoding, which
    would not read it, goes on."""
    model, sampled = poisoned(POISON), SamplingParams(temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    predicted = request_of(PROMPTS[1], TOKENS, sampling=GREEDY, prediction=[POISON, 3, POISON])
    wanted = [request_of(PROMPTS[0], TOKENS, sampling=sampled), predicted]

    def beside(tokens: Sequence[int], _random: random.Random) -> TokenTree:
        # Behind the likeliest token too, whose place another takes where the tree comes late.
        return TokenTree((tokens[-1], 40, POISON, POISON), (0, 0, 0, 1), (1.0, 0.5, 0.5, 0.5))

    found = outcomes_of(make_runner(model), wanted, kind, beside)
    assert [tokens for tokens, _ in found] == plain_each(model, wanted)
    assert all(isinstance(event, SequenceFinished) for _, event in found)
    assert sorted(record.getMessage() for record in caplog.records if "finite" in record.getMessage()) == [
        f"request {number} goes on without drafts: logits of a drafted pass are not finite" for number in (1, 2)
    ]


def test_it_is_logged_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(poisoned(POISON))
    observer = PrometheusObserver("tiny", "float32", "0")
    loop = EngineLoop(runner, engine_config(), steps=HostSteps(runner), observer=observer)
    for number, prompt in enumerate(([POISON, 4, 5], PROMPTS[0]), start=1):
        loop.add(loop.make(number, request_of(prompt, TOKENS, sampling=GREEDY)))
    with caplog.at_level(logging.ERROR):
        while loop.step() is not None:
            pass
    assert [record.getMessage() for record in caplog.records] == [
        "request 1 ended: logits behind 3 tokens are not finite"
    ]
    page = "".join(str(sample) for metric in observer.metrics.collect() for sample in metric.samples)
    assert "LOGITS_NOT_FINITE" in page


def test_pages_of_a_broken_request_serve_others() -> None:
    """NaN stays in the pages that it gave back."""
    model = poisoned(POISON)
    runner = make_runner(model, kv_tokens=64)
    wanted = [request_of([POISON, *range(5, 30)], TOKENS, sampling=GREEDY)]
    ((_, event),) = outcomes_of(runner, wanted, "host")
    assert isinstance(event, SequenceFailed)
    later = request_of(PROMPTS[2], TOKENS, sampling=GREEDY)
    ((tokens, _),) = outcomes_of(runner, [later], "host", random_tree(211, 8))
    assert tokens == plain(model, later)
