"""Costs of tokens that prompt lookup drafts, by the length of the run that they followed: -log2 of how often they are
right.

The longer the run, the more often they are. Costs are integers, so that every device ranks them alike.
"""

from __future__ import annotations

import math

# By the length of the run, from 0 on: how often the token behind it is right, and each one behind a right one. Smoothed
# from 27 answers of SmolLM2-135M-Instruct to prompts of seven tasks.
RIGHT = (
    (0.0, 0.0), (0.2, 0.6), (0.45, 0.65), (0.6, 0.7), (0.7, 0.72), (0.72, 0.75), (0.75, 0.77), (0.78, 0.8), (0.92, 0.94)
)  # fmt: skip
# What a halving of the chance costs.
COST_OF_HALVING = 4096
FIRST_COST = tuple(round(-math.log2(first) * COST_OF_HALVING) if first else 0 for first, _ in RIGHT)
NEXT_COST = tuple(round(-math.log2(following) * COST_OF_HALVING) if following else 1 for _, following in RIGHT)
