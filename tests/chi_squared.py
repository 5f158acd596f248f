"""Pearson's test, whether counts follow a distribution. SciPy has it too; but where SciPy is installed transformers
imports it, which makes each of the suite's processes start half a second later."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike


def chi_squared(observed: ArrayLike, expected: ArrayLike) -> float:
    """How likely counts [cells] are at least so far from the expected ones [cells], of the same sum."""
    counts, wanted = np.asarray(observed, float), np.asarray(expected, float)
    assert np.isclose(counts.sum(), wanted.sum(), rtol=1e-8), "of different numbers of samples"
    distance = float(((counts - wanted) ** 2 / wanted).sum())
    halves = torch.tensor([(counts.size - 1) / 2, distance / 2], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()
