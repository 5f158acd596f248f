"""Of a matrix that is thinned out, every pair of values is left."""

from __future__ import annotations

import itertools

from pairs import covering


def test_every_pair_is_left_and_most_combinations_are_not() -> None:
    axes = [[(name, value) for value in range(size)] for name, size in (("a", 2), ("b", 4), ("c", 3), ("d", 2))]
    combinations = [set(itertools.combinations(each, 2)) for each in itertools.product(*axes)]
    kept = covering(combinations)
    assert set().union(*combinations) == set().union(*(combinations[place] for place in kept))
    assert 12 <= len(kept) <= 16 < len(combinations) == 48
    values = [set(each) for each in itertools.product(*axes)]
    assert len(covering(values)) == 4
