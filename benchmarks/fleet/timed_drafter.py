"""A drafter that takes as long as a head on a device, and computes nothing: `benchmarks.fleet.targets_per_draft`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from draft_service.drafters.base import Drafter, DraftSequence
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits

# As many as the drafter has whose time stands for it: `eagle_cost.py`'s tree of 12.
_NODES = 12


class TimedDrafter(Drafter):
    """Trees of a chain whose time depends on the number of sequences of a call, as `OUTRIDER_TIMED_ANSWER_MS` has it:
    SEQUENCES:MS, with commas between; in between by interpolation."""

    name = "timed"
    # Not the CPU: its calls are made on a thread, as those of a GPU's drafter.
    device = "simulated"

    def __init__(self) -> None:
        pairs = [part.partition(":") for part in os.environ["OUTRIDER_TIMED_ANSWER_MS"].split(",")]
        self._sequences = [float(sequences) for sequences, _, _ in pairs]
        self._seconds = [float(milliseconds) / 1e3 for _, _, milliseconds in pairs]
        self.limits = TreeLimits(_NODES, _NODES)
        self.max_context = 1 << 20
        self.vocabulary_size = 0

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        # Sleeping leaves the core to others, as waiting for a device does.
        time.sleep(float(np.interp(len(sequences), self._sequences, self._seconds)))
        parents = (0, *range(_NODES))
        scores = (1.0, *(0.5,) * _NODES)
        return [TokenTree((each.root, *range(5, 5 + _NODES)), parents, scores) for each in sequences]
