"""What every drafter with a network of its own does: load it, warm up, read what was committed, and grow trees.

An EAGLE head and a language model differ in the network, in what they read, and in when they have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from draft_service.drafters.base import Drafter, DraftSequence
from draft_service.drafters.grown import Pending, among, warm_up
from draft_service.neural.config import NeuralConfig
from draft_service.neural.cuda_graphs.drafting import drafting_on, first_batches
from draft_service.neural.devices import launching_on
from draft_service.neural.network import Network
from draft_service.neural.tree_drafting import CacheEntry, TreeDrafting, Wanted
from outrider.devices import check_device
from outrider.runtime import in_passing_thread
from outrider.tree import TokenTree


class NeuralDrafter(Drafter, ABC):
    """Keeps a `CacheEntry` as each sequence's state. Trees come one by one (`propose`) or as arrays (`begin`)."""

    # Position of the root's children in the network's count, less the sequence's length.
    children_at: ClassVar[int] = 0

    def __init__(self, config: NeuralConfig, vocabulary_size: int, max_context: int) -> None:
        """Raises `SettingsError` for a device that is not there."""
        check_device(config.device)
        self.limits = config.tree.limits
        self.device = config.device
        self.vocabulary_size = vocabulary_size
        self.max_context = max_context
        self._neural = config
        self._drafting: TreeDrafting | None = None
        # Rows that were read, and times that the cache was full.
        self._rows = self._full = 0

    @property
    def drafting(self) -> TreeDrafting:
        """What drafts with the network, once it is loaded."""
        assert self._drafting is not None, "the drafter was not started"
        return self._drafting

    @abstractmethod
    def _load(self) -> Network:
        """The network, on its device."""

    @abstractmethod
    def _ready(self, sequence: DraftSequence) -> bool:
        """Whether a tree can be drafted, and the cache has room for it."""

    @abstractmethod
    def _read(self, sequences: Sequence[DraftSequence]) -> None:
        """Extend the cache by what is new of sequences that it has room for."""

    def start(self) -> None:
        """Load the weights, and compile and run once what drafting runs."""
        in_passing_thread(self._start)

    def open(self, sequence: DraftSequence) -> None:
        sequence.state = CacheEntry()

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self.drafting.forget(sequence.state)
            sequence.state = sequence.features = None

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = [TokenTree.root_only(sequence.root) for sequence in sequences]
        with launching_on(self.device):
            places, wanted = self._prepare(sequences)
            for place, tree in zip(places, self.drafting.trees(wanted) if wanted else (), strict=True):
                trees[place] = tree
        return trees

    def begin(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.begin`."""
        with launching_on(self.device):
            places, wanted = self._prepare(sequences)
            return among(sequences, places, self.drafting.begin(wanted) if wanted else None)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> tuple[list[int], list[Wanted]]:
        """Read what is new of those that can be drafted for. Returns where they stand, and their trees-to-be."""
        places = [place for place, sequence in enumerate(sequences) if self._ready(sequence)]
        ready = [sequences[place] for place in places]
        self._read(ready)
        return places, [Wanted(one.state, one, len(one.token_ids) + self.children_at) for one in ready]

    def _has_room(self, sequence: DraftSequence, rows: int) -> bool:
        """Reserve so many more rows, and a tree below them."""
        if self.drafting.reserve(sequence.state, rows):
            return True
        self._full += 1
        return False

    @property
    def _cached_tokens(self) -> int:
        return 0 if self._drafting is None else self._drafting.cache.used_pages * self._neural.page_size

    def _start(self) -> None:
        with launching_on(self.device):
            if self._neural.threads:
                torch.set_num_threads(self._neural.threads)
            self._drafting = drafting_on(self._load(), self._neural)
            self._warm_up()
            self._rows = self._full = 0

    def _warm_up(self) -> None:
        """Draft once for throw-away sequences."""
        for mode, count, rows in first_batches(self.drafting, self._neural):
            tokens = [0] * (rows + 1)
            sequences = [DraftSequence(i, [*tokens], 1, self.vocabulary_size, mode=mode) for i in range(count)]
            for sequence in sequences:
                self.open(sequence)
                if sequence.features is not None:
                    sequence.features.append(torch.zeros(rows, sequence.features.width), 0)
            warm_up(self, sequences)
            for sequence in sequences:
                self.close(sequence)
