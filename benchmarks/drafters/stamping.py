"""The drafter of `benchmarks.drafters.link_hops`, which computes nothing and sends times.

The first tokens of each tree are nanoseconds of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.drafters.link_events import VOCABULARY_SIZE
from draft_service.drafters.base import Drafter, DraftSequence
from draft_service.drafters.grown import GrownTrees, Pending
from draft_service.drafters.hidden_states import FeatureWindow
from outrider.settings import Settings, setting
from outrider.tree import TokenTree
from outrider.wire.frames import FeatureRequest, TreeLimits

# Of a head of 8B size.
WIDTH = 4096
NODES = 239
_BITS, _WORDS = 15, 5


def words_of(nanoseconds: int) -> list[int]:
    """A time as token ids."""
    return [nanoseconds >> _BITS * i & (1 << _BITS) - 1 for i in range(_WORDS)]


def times_in(token_ids: Sequence[int], count: int) -> list[int]:
    """The first `count` times in a tree's tokens."""
    words = [token_ids[i * _WORDS : (i + 1) * _WORDS] for i in range(count)]
    return [sum(word << _BITS * i for i, word in enumerate(some)) for some in words]


@dataclass(frozen=True)
class StampingConfig(Settings):
    """Settings of the drafter, section `[drafter]`."""

    early_ms: float = setting(0.0, "how long a device would draw the first levels; 0 sends whole trees alone", ge=0.0)
    whole_ms: float = setting(0.0, "how long it would draw whole trees", ge=0.0)


class Stamping(Drafter):
    """Reads features as a head does, and draws the same tree every time."""

    name = "stamping"
    limits = TreeLimits(NODES, 8)
    max_context = 1 << 20
    vocabulary_size = VOCABULARY_SIZE
    features: FeatureRequest | None = FeatureRequest(layers=(32,), width=WIDTH)
    config = StampingConfig
    # Not the CPU, so that the service treats it as a drafter on a GPU.
    device = "elsewhere"

    def __init__(self, config: StampingConfig) -> None:
        self.settings = config
        # When the newest commit arrived.
        self.received = 0

    def open(self, sequence: DraftSequence) -> None:
        sequence.features = FeatureWindow(WIDTH, self.max_context)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        del sequence, committed
        self.received = time.monotonic_ns()

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        for sequence in sequences:
            if sequence.features is not None:
                sequence.features.pop_vectors()

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        self.absorb(sequences)
        wait = partial(self._drawn, [sequence.root for sequence in sequences], time.monotonic_ns())
        return Pending(wait, elsewhere=True, early=self.settings.early_ms > 0.0)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        return self.start_trees(sequences).fetch().as_trees()

    def _drawn(self, roots: Sequence[int], begun: int, early: bool) -> GrownTrees:
        """A tree for each root; its first tokens are the times at which the commit arrived and the tree was drawn."""
        after_ms, nodes = (self.settings.early_ms, NODES // 2) if early else (self.settings.whole_ms, NODES)
        # As a thread waits for a GPU: without the interpreter, and checking all the time.
        while (left := after_ms * 1e6 - (time.monotonic_ns() - begun)) > 0.0:
            time.sleep(min(left, 1e4) / 1e9)
        grown = GrownTrees.roots(roots, nodes + 1)
        grown.sizes[:] = nodes + 1
        grown.trees[:, 0, 1:] = np.arange(1, nodes + 1) * 61 % VOCABULARY_SIZE
        # A path below each child of the root, in turn: parents come first.
        grown.trees[:, 1, 1:] = np.maximum(np.arange(1, nodes + 1) - 30, 0)
        grown.scores[:, 1:] = 0.5
        words = words_of(self.received) + words_of(time.monotonic_ns())
        grown.trees[:, 0, 1 : 1 + len(words)] = words
        return grown
