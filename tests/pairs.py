"""`@pytest.mark.pairs`: of a test with many parameters, every pair of values in `make test`, and every combination
in `make test-full`. `@pytest.mark.values`: in `make test` every value at least once.

Faults that need three values at once are rare, and the whole matrix takes many times as long. Where another test has
the pairs, or runs whole services or models, values are enough. The mark that is closer to the test counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

_Value = tuple[str, int]
_Part = TypeVar("_Part")


def leave_to_full(items: list[pytest.Item]) -> None:
    """Mark as `full` the combinations that have no pair or value of their own. The same ones wherever all are
    collected."""
    by_test = defaultdict[tuple[str, str], list[pytest.Function]](list)
    for item in items:
        mark = next((each.name for each in item.iter_markers() if each.name in _PARTS), "")
        thinned = mark and not item.get_closest_marker("full")
        if thinned and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            by_test[item.nodeid.partition("[")[0], mark].append(item)
    for (_, mark), combinations in by_test.items():
        kept = covering([_PARTS[mark](_values_of(item)) for item in combinations])
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


def _values_of(item: pytest.Function) -> list[_Value]:
    # Combinations share the very values of a list, which need not be comparable.
    return sorted((name, id(value)) for name, value in item.callspec.params.items())


def _pairs_of(values: Sequence[_Value]) -> set[tuple[_Value, ...]]:
    # A single parameter is paired with itself: all of its values stay.
    return set(itertools.combinations_with_replacement(values, 2))


def _singles_of(values: Sequence[_Value]) -> set[tuple[_Value, ...]]:
    return {(value,) for value in values}


_PARTS: dict[str, Callable[[Sequence[_Value]], set[tuple[_Value, ...]]]] = {"pairs": _pairs_of, "values": _singles_of}
