"""Recycled tokens: entries, where they are kept, and trees that are filled in from them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_kernels.node_table import recycling
from tree_kernels.node_table.layout import COST_OF_HALVING, MOST_COST
from tree_kernels.node_table.recycling import ENTRY, LEVELS, NODES, PLACES, SHAPE, WIDTH, entry_of, place_of

OWNER, OTHER = 5, 2**31 - 1


def entries_for(owner: int, tokens: range) -> torch.Tensor:
    """Behind token t, t + 1 is the likeliest, then t + 2 and so on, each with half the chance of the one before."""
    entries = recycling.empty_entries(torch.device("cpu"))
    for token in tokens:
        logits = torch.full((200,), -99.0)
        for rank in range(10):
            logits[token + 1 + rank] = -rank * math.log(2.0)
        entries[place_of(owner, token)] = entry_of(owner, token, logits)
    return entries


def test_the_shape_is_a_tree_in_depth_first_order() -> None:
    assert {len(each) for each in SHAPE} == {NODES}
    assert SHAPE.parents[0] == SHAPE.depths[0] == SHAPE.extra[0] == 0 and SHAPE.ends[0] == NODES
    for place in range(1, NODES):
        parent = SHAPE.parents[place]
        assert parent < place < SHAPE.ends[place] <= SHAPE.ends[parent]
        assert SHAPE.depths[place] == SHAPE.depths[parent] + 1 <= LEVELS
        below = [i for i in range(place + 1, NODES) if SHAPE.parents[i] == place]
        assert [SHAPE.ranks[i] for i in below] == list(range(len(below))) and len(below) <= WIDTH
        assert SHAPE.extra[place] > 0
    assert max(SHAPE.depths) == LEVELS


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_every_entry_has_a_place(owner: int, token: int) -> None:
    assert 0 <= place_of(owner, token) < PLACES


def test_entries_of_one_vocabulary_hardly_share_places() -> None:
    """No worse than chance, which leaves 1 - exp(-n / places) of the places in use."""
    places = {place_of(OWNER, token) for token in range(49152)}
    assert len(places) > 0.98 * PLACES * (1 - math.exp(-49152 / PLACES))
    assert len({place_of(owner, 7) for owner in range(1000)}) > 980


def test_what_an_entry_holds() -> None:
    entry = entry_of(OWNER, 3, torch.tensor([0.0, 2.0, 2.0, -1.0, 1.0])).tolist()
    # Of equal ones the lowest.
    assert entry[: 2 + WIDTH] == [OWNER, 3, 1, 2, 4, 0]
    chances = torch.tensor([2.0, 2.0, 1.0, 0.0]).softmax(0)
    assert entry[2 + WIDTH : 2 + 2 * WIDTH] == [round(-math.log2(one) * COST_OF_HALVING) for one in chances.tolist()]
    assert len(entry) == ENTRY and set(entry[2 + 2 * WIDTH :]) == {-1}


def test_a_tree_is_filled_in_from_its_root() -> None:
    tokens, costs = recycling.recycled_tree(entries_for(OWNER, range(100)), OWNER, 10)
    assert tokens[0] == 10 and costs[0] == 0
    for place in range(1, NODES):
        parent, rank = SHAPE.parents[place], SHAPE.ranks[place]
        assert tokens[place] == tokens[parent] + 1 + rank
        # Of four that halve, the first has 8 of 15.
        cost = (math.log2(15 / 8) + rank) * COST_OF_HALVING
        assert abs(costs[place] - costs[parent] - SHAPE.extra[place] - cost) <= 1


def test_nothing_is_below_a_token_without_an_entry() -> None:
    tokens, costs = recycling.recycled_tree(entries_for(OWNER, range(10, 11)), OWNER, 10)
    known = [place for place in range(1, NODES) if tokens[place] >= 0]
    assert [SHAPE.depths[place] for place in known] == [1] * WIDTH
    assert all(costs[place] >= MOST_COST for place in range(1, NODES) if place not in known)


def test_owners_are_kept_apart() -> None:
    entries = entries_for(OWNER, range(100))
    tokens, _ = recycling.recycled_tree(entries, OTHER, 10)
    assert set(tokens[1:]) == {-2}
    # Even where both have the same place.
    token = next(one for one in range(10**6) if place_of(OTHER, one) == place_of(OWNER, 10))
    assert set(recycling.recycled_tree(entries, OTHER, token)[0][1:]) == {-2}
