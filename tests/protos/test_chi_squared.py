"""The test that distributions are held to, against printed tables of it."""

from __future__ import annotations

import numpy as np
import pytest
from chi_squared import chi_squared


@pytest.mark.parametrize(("freedom", "distance", "likely"), [(1, 3.841, 0.05), (4, 13.277, 0.01), (10, 29.588, 0.001)])
def test_it_says_what_tables_say(freedom: int, distance: float, likely: float) -> None:
    expected = np.full(freedom + 1, 100.0)
    # Two cells that differ by as much either way, and others that do not.
    apart = np.sqrt(distance * 100 / 2)
    observed = expected + np.array([apart, -apart, *[0.0] * (freedom - 1)])
    assert chi_squared(observed, expected) == pytest.approx(likely, rel=2e-3)


def test_what_follows_is_likely_and_what_does_not_is_not() -> None:
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    counts = np.random.default_rng(3).multinomial(2000, chances)
    assert chi_squared(counts, chances * 2000) > 0.01
    assert chi_squared(counts, np.array([0.4, 0.4, 0.15, 0.05]) * 2000) < 1e-10


def test_counts_of_different_numbers_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="different numbers"):
        chi_squared([5, 5], [5, 6])
