"""Which sequences the drafted rows of a pass go to, where each drafts from its own text: whose text repeats itself.

A token that is looked up is right the more often the longer the run of tokens is that it stood behind before. So rows
are shared out by that, and a sequence that says nothing twice gets none. In integers, so that every device shares them
out alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# By the length of the run, from 0 on: how often the token behind it is right, and each one behind a right one. Smoothed
# from 27 answers of SmolLM2-135M-Instruct to prompts of seven tasks.
RIGHT = (
    (0.0, 0.0), (0.2, 0.6), (0.45, 0.65), (0.6, 0.7), (0.7, 0.72), (0.72, 0.75), (0.75, 0.77), (0.78, 0.8), (0.92, 0.94)
)  # fmt: skip
# A row costs as many of these as a chance has halvings, and its sequence's place more, so that few cost the same.
_HALVING = 4096
FIRST_COST = tuple(round(-math.log2(first) * _HALVING) if first else 0 for first, _ in RIGHT)
NEXT_COST = tuple(round(-math.log2(following) * _HALVING) if following else 1 for _, following in RIGHT)
# More than any row costs, of up to a thousand sequences with 15 rows each.
MOST_COST = 1 << 16


def share_rows(runs: Sequence[int], limits: Sequence[int], room: int) -> list[int]:
    """Drafted rows of each sequence: the cheapest, as many as there is `room` for; of equally dear ones all or none.

    Args:
        runs: [B] lengths of the runs that were found, 0 for none.
        limits: [B] rows that each may have at most.
        room: rows of all.
    """
    costs = [
        [FIRST_COST[run] + b + NEXT_COST[run] * d for d in range(limit if run else 0)]
        for b, (run, limit) in enumerate(zip(runs, limits, strict=True))
    ]
    every = sorted(cost for own in costs for cost in own)
    bound = every[room] if len(every) > room else MOST_COST
    return [sum(cost < bound for cost in own) for own in costs]
