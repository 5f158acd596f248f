"""Log-probabilities of prompts: those of transformers' own model, whatever the chunks, neighbours and cached pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import make_tiny
from early_steps import host_steps
from engine_harness import DEVICE_SEQUENCES, ScriptedDraft, engine_config, make_runner, plain, random_tree
from engine_harness import request as request_of
from transformers import PreTrainedModel

from outrider.errors import LogitsNotFinite
from outrider.sampling import SamplingParams
from target_service.core.sequence import (
    PromptLogprobs,
    SequenceEnd,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    StepVerdict,
)
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import Steps
from target_service.model.runner import ModelRunner

CHUNK = 64


class Scores(NamedTuple):
    """What came of one request: float32 [tokens - 1], and [tokens - 1, alternatives] each."""

    own: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray
    tokens: tuple[int, ...]
    end: SequenceEnd


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def asking(token_ids: Sequence[int], top: int, tokens: int = 3) -> SequenceRequest:
    return request_of(token_ids, tokens, sampling=SamplingParams(ignore_eos=True, prompt_logprobs=top))


def executor(kind: str, runner: ModelRunner) -> Steps:
    if kind.startswith("host"):
        return host_steps(runner, early=kind == "host, ahead")
    if kind == "device, tables":
        runner.enable_device_row_selection(DEVICE_SEQUENCES, 15, "torch")
    return DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=512, backend="torch")


def scores_of(loop: EngineLoop, wanted: Sequence[SequenceRequest], preempt_at: int = -1) -> list[Scores]:
    """Run the requests to their ends, and preempt all of them behind one step."""
    ids = list(range(1, 1 + len(wanted)))
    pieces: dict[int, list[PromptLogprobs]] = {number: [] for number in ids}
    tokens: dict[int, list[int]] = {number: [] for number in ids}
    ends: dict[int, SequenceEnd] = {}
    for number, one in zip(ids, wanted, strict=True):
        loop.add(loop.make(number, one))
    steps = 0
    while len(ends) < len(wanted):
        for event in loop.step() or ():
            assert event.sequence_id not in ends
            if isinstance(event, PromptLogprobs):
                assert not tokens[event.sequence_id], "the prompt comes first"
                pieces[event.sequence_id].append(event)
            elif isinstance(event, StepVerdict):
                tokens[event.sequence_id] += event.token_ids
            else:
                ends[event.sequence_id] = event
        loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
        steps += 1
        if steps == preempt_at:
            loop.scheduler.preempt_all()
    return [_joined(pieces[number], tuple(tokens[number]), ends[number]) for number in ids]


def _joined(pieces: Sequence[PromptLogprobs], tokens: tuple[int, ...], end: SequenceEnd) -> Scores:
    places = [place for piece in pieces for place in range(piece.first, piece.first + piece.count)]
    assert places == list(range(len(places))), "each token once, in order"
    own = np.concatenate([np.frombuffer(piece.logprobs, np.float32) for piece in pieces] or [np.empty(0, np.float32)])
    alternatives = pieces[0].alternatives if pieces else 0
    ids = [np.frombuffer(piece.top_ids, np.int32) for piece in pieces] or [np.empty(0, np.int32)]
    top = [np.frombuffer(piece.top_logprobs, np.float32) for piece in pieces] or [np.empty(0, np.float32)]
    assert len(own) == max(0, len(places) - 1)
    shape = len(own), alternatives
    return Scores(own, np.concatenate(ids).reshape(shape), np.concatenate(top).reshape(shape), tokens, end)


@torch.inference_mode()
def expected(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, V]: log-probabilities of every next token, by transformers' own model."""
    model.set_attn_implementation("eager")
    return torch.log_softmax(model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1], dim=-1)


def check(model: PreTrainedModel, wanted: SequenceRequest, found: Scores) -> None:
    logprobs = expected(model, wanted.token_ids)
    own = logprobs.gather(1, torch.tensor(wanted.token_ids)[1:, None])[:, 0]
    np.testing.assert_allclose(found.own, own, atol=2e-4)
    assert isinstance(found.end, SequenceFinished)
    top = wanted.sampling.prompt_logprobs
    if top:
        values = logprobs.topk(top, dim=1).values
        np.testing.assert_allclose(found.top, values, atol=2e-4)
        np.testing.assert_allclose(logprobs.gather(1, torch.tensor(found.top_ids).long()), values, atol=2e-4)


@pytest.mark.parametrize("kind", ["host", "host, ahead", "device", "device, tables"])
def test_prompts_are_scored_beside_others_that_draft(tiny_model: PreTrainedModel, kind: str) -> None:
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(prefill_chunk=CHUNK), steps=executor(kind, runner))
    loop.drafting.attach(ScriptedDraft(loop.drafting, random_tree(runner.vocabulary_size, 6)))
    loop.drafting.listen()
    lengths = (150, 1, 2, 65, 64)
    wanted = [asking(prompt(length, length), top) for length, top in zip(lengths, (5, 0, 3, 0, 20), strict=True)]
    others = [request_of(prompt(70, 7), 12), request_of(prompt(9, 8), 12)]
    found = scores_of(loop, [*wanted, *others])
    for one, scores in zip(wanted, found, strict=False):
        check(tiny_model, one, scores)
        assert scores.tokens == plain(tiny_model, one)
    for one, scores in zip(others, found[len(wanted) :], strict=True):
        assert (len(scores.own), scores.tokens) == (0, plain(tiny_model, one))


def test_pages_of_earlier_requests_are_not_taken_for_a_score(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model)
    config = replace(engine_config(prefill_chunk=CHUNK), prefix_cache=True)
    loop, text = EngineLoop(runner, config), prompt(100)
    (first,) = scores_of(loop, [request_of(text, 2)])
    (second,) = scores_of(loop, [asking(text, 0, 2)])
    (third,) = scores_of(loop, [request_of(text, 2)])
    check(tiny_model, asking(text, 0, 2), second)
    assert first.tokens == second.tokens == third.tokens
    cached = [one.end.totals.cached_tokens for one in (first, second, third) if isinstance(one.end, SequenceFinished)]
    assert cached == [0, 0, 96]


@pytest.mark.parametrize("shares", [False, True])
def test_a_preempted_prompt_is_scored_once(tiny_model: PreTrainedModel, shares: bool) -> None:
    """Behind its second chunk, and with pages that it may find again."""
    runner = make_runner(tiny_model)
    config = replace(engine_config(prefill_chunk=CHUNK), prefix_cache=shares)
    wanted = [asking(prompt(200), 2), asking(prompt(30, 1), 0, 6)]
    for one, scores in zip(wanted, scores_of(EngineLoop(runner, config), wanted, preempt_at=2), strict=True):
        check(tiny_model, one, scores)
        assert scores.tokens == plain(tiny_model, one)


def test_a_prompt_whose_logits_are_not_finite_fails_alone() -> None:
    model, text = make_tiny(), prompt(100)
    with torch.no_grad():
        model.get_input_embeddings().weight[210, 3] = torch.inf
    broken = asking([*text[:20], 210, *text[20:]], 0)
    runner = make_runner(model)
    failed, sound = scores_of(EngineLoop(runner, engine_config(prefill_chunk=CHUNK)), [broken, asking(text, 0)])
    assert isinstance(failed.end, SequenceFailed) and isinstance(failed.end.error, LogitsNotFinite)
    assert isinstance(sound.end, SequenceFinished) and len(sound.own) == len(text) - 1
    assert runner.cache.used_pages == 0
