"""Log-probabilities in integers, so that one copy brings those of a step to the host.

A row, int32 [WIDTH]: the log-probability of a token that was generated, then the ids of the most probable tokens there,
then their log-probabilities. Log-probabilities are float32, those that were not asked for undefined.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Tokens that are listed beside the one that was generated, at most: what the contract allows.
MOST_LISTED = 20
IDS, VALUES, WIDTH = 1, 1 + MOST_LISTED, 1 + 2 * MOST_LISTED


def read_logprobs(rows: NDArray[np.int32], listed: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """What rows [n, WIDTH] hold, with `listed` tokens each, no more than there are: the log-probability of the row's
    own token, and (id, log-probability) of the listed ones, the most probable first, of equals the lowest id. Those of
    no probability are left out."""
    values = rows.view(np.float32)
    found = []
    for ids, own in zip(rows[:, IDS : IDS + listed].tolist(), values.tolist(), strict=True):
        entries = zip(ids, own[VALUES : VALUES + listed], strict=True)
        possible = [(token, value) for token, value in entries if math.exp(value) > 0]
        found.append((own[0], tuple(sorted(possible, key=lambda one: (-one[1], one[0])))))
    return found
