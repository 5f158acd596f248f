"""The exact distribution of a tiny model's short outputs, by enumeration, and whether many sampled ones follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from chi_squared import chi_squared
from engine_harness import Outcome, probs_of
from once import once
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from target_service.sampling.distribution import LogitShaper

# Outputs of so many tokens behind the prompt, of a model of so few tokens.
VOCABULARY, LENGTH, PROMPT = 7, 3, (1, 4, 2)
# How many of them are drawn. Four times as many of a case see a smaller skew, and no other kind of it.
samples_drawn = pytest.mark.parametrize("samples", [300, pytest.param(1200, marks=pytest.mark.full)])
# Of a p-value. Some 60 cases run; one in a million is no accident.
_LEAST = 1e-6


@once
@torch.inference_mode()
def distribution(model: PreTrainedModel, sampling: SamplingParams) -> Mapping[tuple[int, ...], float]:
    """The probability of every output of LENGTH tokens."""
    model.set_attn_implementation("eager")
    shaper = LogitShaper(sampling, PROMPT, ())
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        grown: dict[tuple[int, ...], float] = {}
        for path, mass in known.items():
            logits = model(torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[0, -1]
            for token, probability in enumerate(probs_of(sampling, shaper.shaped(logits, path)).tolist()):
                if probability:
                    grown[(*path, token)] = mass * probability
        known = grown
    return known


def assert_follow(outcomes: Sequence[Outcome], exact: Mapping[tuple[int, ...], float]) -> None:
    """The outputs have that distribution: chi-squared over those that are common enough, and the rest as one."""
    counts, samples = Counter(outcome.token_ids for outcome in outcomes), len(outcomes)
    assert set(counts) <= set(exact)
    common = [path for path, mass in exact.items() if mass * samples >= 5]
    rare = 1.0 - sum(exact[path] for path in common)
    observed = np.array([*(counts[path] for path in common), samples - sum(counts[path] for path in common)], float)
    expected = np.array([*(exact[path] for path in common), rare]) * samples
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    assert chi_squared(observed, expected) > _LEAST
