"""With EAGLE or Medusa heads, sampled output has the target's distribution: counted over many seeds on seven tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_tiny
from eagle_heads import make_head
from engine_harness import engine_config, make_runner, request, run
from medusa_heads import make_heads
from scipy import stats
from transformers import PreTrainedModel

from draft_service.drafters.base import Drafter
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.in_process import InprocessLink
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import DraftEvents, DraftLink
from target_service.sampling.distribution import LogitShaper

VOCABULARY, LENGTH, PROMPT, SAMPLES = 7, 3, (1, 4, 2), 1200
SAMPLING = SamplingParams(temperature=1.5, top_k=5, top_p=0.95, ignore_eos=True)


@torch.inference_mode()
def distribution(model: PreTrainedModel, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The exact probability of every output of LENGTH tokens."""
    shaper = LogitShaper(sampling, PROMPT, (), VOCABULARY)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for path, mass in known.items():
            logits = model(torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[0, -1]
            for token, probability in enumerate(shaper.probs(shaper.shaped(logits, path)).tolist()):
                if probability:
                    grown[(*path, token)] = mass * probability
        known = grown
    return known


def eagle(topk: int) -> Drafter:
    head = make_head(
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        target_hidden_size=48,
        num_features=2,
        feature_layers=(0, 2),
    )
    return EagleDrafter(EagleConfig(topk=topk, num_steps=3, dtype="float32", projection="draft"), head)


def medusa(topk: int) -> Drafter:
    heads = make_heads(hidden_size=48, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, num_heads=3, target_layers=2)
    return MedusaDrafter(MedusaConfig(topk=topk, dtype="float32"), heads)


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_outputs_have_the_targets_distribution(kind: str, mode: VerificationMode, topk: int) -> None:
    teacher = make_tiny(vocab_size=VOCABULARY)
    teacher.set_attn_implementation("eager")
    exact = distribution(teacher, SAMPLING)

    def connect(events: DraftEvents) -> DraftLink:
        drafter = eagle(topk) if kind == "eagle" else medusa(topk)
        drafter.start()
        return InprocessLink(drafter, events)

    config = replace(engine_config(max_running=64, disable_above=64), max_waiting=SAMPLES)
    wanted = [replace(request(PROMPT, LENGTH, sampling=SAMPLING, mode=mode), seed=seed) for seed in range(SAMPLES)]
    runner = make_runner(make_tiny(vocab_size=VOCABULARY), kv_tokens=4096)
    outcomes = run(runner, wanted, connect=connect, config=config)
    counts = Counter(outcome.token_ids for outcome in outcomes)
    assert set(counts) <= set(exact)
    common = [path for path, mass in exact.items() if mass * SAMPLES >= 5]
    observed = np.array([*(counts[path] for path in common), SAMPLES - sum(counts[path] for path in common)], float)
    expected = np.array([*(exact[path] for path in common), 1.0 - sum(exact[path] for path in common)]) * SAMPLES
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    # One in a million is no accident.
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > SAMPLES / 20
