"""What every drafter with a network of its own does: load it, warm up, read what was committed, and grow trees.

Medusa heads read the target's last state and keep nothing. An EAGLE head and a language model keep keys and values, and
differ in the network, in what they read, and in when they have it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from draft_service.drafters.base import Drafter, DraftSequence
from draft_service.drafters.grown import Pending, among, warm_up
from draft_service.neural.config import NetworkConfig, NeuralConfig
from draft_service.neural.cuda_graphs.drafting import drafting_on, first_batches
from draft_service.neural.devices import launching_on
from draft_service.neural.network import Network
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import TreeDrafting, TreeRequest
from outrider.devices import check_device
from outrider.runtime import in_passing_thread
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.tree import TokenTree


class Drafting(Protocol):
    """A network on its device, and how trees grow with it. What is wanted says of which sequence, and what is known of
    it."""

    def trees(self, wanted: Sequence[Any]) -> list[TokenTree]:
        """The best trees, in whatever mode."""

    def begin(self, wanted: Sequence[Any]) -> Pending:
        """As `trees`, of no REJECTION request."""


Grows = TypeVar("Grows", bound=Drafting)


class NeuralDrafter(Drafter, ABC, Generic[Grows]):
    """Trees come one by one (`propose`) or as arrays (`begin`)."""

    def __init__(self, config: NetworkConfig, tree: TreeShape, vocabulary_size: int, max_context: int) -> None:
        """Raises `SettingsError` for a device that is not there."""
        check_device(config.device)
        self.limits = tree.limits
        self.device = config.device
        self.vocabulary_size = vocabulary_size
        self.max_context = max_context
        self._threads = config.threads
        self._drafting: Grows | None = None
        # Rows that were read, and trees that were not drafted: the network lacks what it reads, or its cache is full.
        self._rows = self._misses = self._full = 0

    @property
    def drafting(self) -> Grows:
        """What drafts with the network, once it is loaded."""
        assert self._drafting is not None, "the drafter was not started"
        return self._drafting

    @abstractmethod
    def _load(self) -> Grows:
        """The network, on its device, and what drafts with it."""

    @abstractmethod
    def _prepare(self, sequences: Sequence[DraftSequence]) -> tuple[list[int], list[Any]]:
        """Read what is new of those that can be drafted for. Returns where they stand, and their trees-to-be."""

    def start(self) -> None:
        """Load the weights, and compile and run once what drafting runs."""
        in_passing_thread(self._start)

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

    def _start(self) -> None:
        with launching_on(self.device):
            if self._threads:
                torch.set_num_threads(self._threads)
            self._drafting = self._load()
            self._warm_up()
            self._rows = self._misses = self._full = 0

    def _warm_up(self) -> None:
        """Draft once for throw-away sequences."""
        for mode, count, rows in self._first_batches():
            tokens = [0] * (rows + 1)
            sequences = [DraftSequence(i, [*tokens], 1, self.vocabulary_size, mode=mode) for i in range(count)]
            for sequence in sequences:
                self.open(sequence)
                if sequence.features is not None:
                    sequence.features.append(torch.zeros(rows, sequence.features.width), 0)
            warm_up(self, sequences)
            for sequence in sequences:
                self.close(sequence)

    def _first_batches(self) -> Iterable[tuple[VerificationMode, int, int]]:
        """What to warm up with: modes, sequences of that mode, and the rows that each has to read."""
        return ((mode, 1, 1) for mode in LOSSLESS_MODES)


class CachingDrafter(NeuralDrafter[TreeDrafting]):
    """Keeps a `CacheEntry` as each sequence's state."""

    # Position of the root's children in the network's count, less the sequence's length.
    children_at: ClassVar[int] = 0

    def __init__(self, config: NeuralConfig, vocabulary_size: int, max_context: int) -> None:
        """Raises `SettingsError` for a device that is not there."""
        super().__init__(config, config.tree, vocabulary_size, max_context)
        self._neural = config

    @abstractmethod
    def _load_network(self) -> Network:
        """The network, on its device."""

    @abstractmethod
    def _ready(self, sequence: DraftSequence) -> bool:
        """Whether a tree can be drafted, and the cache has room for it."""

    @abstractmethod
    def _read(self, sequences: Sequence[DraftSequence]) -> None:
        """Extend the cache by what is new of sequences that it has room for."""

    def open(self, sequence: DraftSequence) -> None:
        sequence.state = self.drafting.follow()

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self.drafting.forget(sequence.state)
            sequence.state = sequence.features = None

    def _load(self) -> TreeDrafting:
        return drafting_on(self._load_network(), self._neural)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> tuple[list[int], list[TreeRequest]]:
        places = [place for place, sequence in enumerate(sequences) if self._ready(sequence)]
        ready = [sequences[place] for place in places]
        self._read(ready)
        return places, [TreeRequest(one.state, one, len(one.token_ids) + self.children_at) for one in ready]

    def _has_room(self, sequence: DraftSequence, rows: int) -> bool:
        """Reserve so many more rows, and a tree below them."""
        if self.drafting.reserve(sequence.state, rows):
            return True
        self._full += 1
        return False

    @property
    def _cached_tokens(self) -> int:
        return 0 if self._drafting is None else self._drafting.cache.used_pages * self._neural.page_size

    def _first_batches(self) -> Iterable[tuple[VerificationMode, int, int]]:
        return first_batches(self.drafting, self._neural)
