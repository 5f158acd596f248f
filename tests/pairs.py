"""`@pytest.mark.pairs`: of a test with many parameters, every pair of values in `make test`, and every combination
in `make test-full`.

Faults that need three values at once are rare, and the whole matrix takes many times as long.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest

_Pair = tuple[tuple[str, int], tuple[str, int]]
_Part = TypeVar("_Part")


def leave_to_full(items: list[pytest.Item]) -> None:
    """Mark as `full` the combinations that have no pair of their own. The same ones wherever all are collected."""
    by_test = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        thinned = item.get_closest_marker("pairs") and not item.get_closest_marker("full")
        if thinned and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            by_test[item.nodeid.partition("[")[0]].append(item)
    for combinations in by_test.values():
        kept = covering([_pairs_of(item) for item in combinations])
        for place, item in enumerate(combinations):
            if place not in kept:
                item.add_marker(pytest.mark.full)


def covering(combinations: Sequence[set[_Part]], costs: Sequence[float] | None = None) -> set[int]:
    """Places of combinations that together have every part: each is one that has the most of those still missing for
    its cost, which is the same for all unless given."""
    missing, kept = set[_Part]().union(*combinations), set[int]()
    weights = costs or [1.0] * len(combinations)
    while missing:
        best = max(range(len(combinations)), key=lambda place: len(combinations[place] & missing) / weights[place])
        kept.add(best)
        missing -= combinations[best]
    return kept


def _pairs_of(item: pytest.Function) -> set[_Pair]:
    # Combinations share the very values of a list, which need not be comparable.
    values = sorted((name, id(value)) for name, value in item.callspec.params.items())
    # A single parameter is paired with itself: all of its values stay.
    return set(itertools.combinations_with_replacement(values, 2))
