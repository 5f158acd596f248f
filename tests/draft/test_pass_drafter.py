"""Shapes of trees behind the target's passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draft_service.eagle.config import EagleConfig
from draft_service.neural.cuda_graphs.pass_drafter import shape_for

TREE = EagleConfig(cuda_graphs=True).tree


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_trees_of_few_sequences_may_leave_levels_out_and_are_deeper(sequences: int) -> None:
    fixed, adaptive = shape_for(TREE, sequences), shape_for(TREE, sequences, leaves_out=True)
    assert not fixed.least_mass and 0.0 < adaptive.least_mass < 1.0
    assert adaptive.num_steps > fixed.num_steps and adaptive.width == fixed.width


@pytest.mark.parametrize("sequences", [8, 64, 256])
def test_trees_of_many_sequences_have_fixed_levels(sequences: int) -> None:
    assert shape_for(TREE, sequences, leaves_out=True) == shape_for(TREE, sequences)


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_trees_are_no_deeper_than_asked(steps: int) -> None:
    asked = replace(TREE, num_steps=steps)
    adaptive = shape_for(asked, 1, leaves_out=True)
    assert adaptive.num_steps == steps
    # Of two levels none can be left out.
    assert bool(adaptive.least_mass) == (steps > 2)
