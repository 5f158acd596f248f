"""Ancestor masks against following the parents by hand."""

from __future__ import annotations

import random

import pytest
import torch

from tree_kernels.attention import ancestor_mask


def random_parents(rows: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [0] + [rng.randrange(i) for i in range(1, rows)]


def ancestors_by_hand(parents: list[int], row: int) -> set[int]:
    found = {row}
    while row:
        row = parents[row]
        found.add(row)
    return found


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 65, 128, 200, 256])
def test_a_mask_holds_each_row_and_its_ancestors(rows: int) -> None:
    parents = random_parents(rows, seed=rows)[:rows]
    mask = ancestor_mask(parents, rows)
    assert mask.shape == (rows, rows)
    for row in range(rows):
        assert ancestors_by_hand(parents, row) == set(mask[row].nonzero()[:, 0].tolist())


def test_a_chain_is_causal() -> None:
    chain = [0, *range(69)]
    assert torch.equal(ancestor_mask(chain, 70), ancestor_mask(None, 70))


@pytest.mark.parametrize("parents", [[0, 1], [0, -1], [0, 0, 5]], ids=["itself", "negative", "later"])
def test_a_parent_must_lie_before_its_row(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents"):
        ancestor_mask(parents, len(parents))


def test_one_parent_for_each_row() -> None:
    with pytest.raises(ValueError, match="expected 3 parents"):
        ancestor_mask([0, 0], 3)
