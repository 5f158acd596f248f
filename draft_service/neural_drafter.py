"""The base of drafters with a neural network: load it, warm up, read committed tokens, and grow trees.

Medusa heads read the target's last hidden state and keep nothing. An EAGLE head and a language model keep keys and
values, and differ in the network, in their inputs, and in when those are available.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from draft_service.compiling import LOOPS
from draft_service.drafters.base import Drafter, DraftSequence
from draft_service.drafters.grown import Pending, among
from draft_service.neural.config import NetworkConfig, NeuralConfig
from draft_service.neural.cuda_graphs.drafting import CapturedDrafting, drafting_on, first_batches
from draft_service.neural.devices import launching_on
from draft_service.neural.network import Network
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import TreeDrafting
from outrider.devices import check_device
from outrider.processes.python import module_command
from outrider.runtime import in_passing_thread
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.tree import TokenTree
from tree_kernels.ahead import CHILD, AheadCompiler
from tree_models.layers.linear import can_pack
from tree_models.layers.placing import Placement


def ahead_compiler(config: NetworkConfig) -> AheadCompiler:
    """What compiles the kernels of a captured drafter; nothing for others."""
    count = config.compilers if isinstance(config, NeuralConfig) and config.device.startswith("cuda") else 0
    return AheadCompiler(module_command(CHILD), count)


class Drafting(Protocol):
    """A network on its device that grows trees of sequences, whose states it reads."""

    def trees(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """The best trees, in any mode."""

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """As `trees`, without REJECTION requests."""


Grows = TypeVar("Grows", bound=Drafting)


class NeuralDrafter(Drafter, ABC, Generic[Grows]):
    """Makes trees one by one (`propose`) or as arrays (`start_trees`)."""

    def __init__(self, config: NetworkConfig, tree: TreeShape, vocabulary_size: int, max_context: int) -> None:
        """Raises `SettingsError` for a device that is not there."""
        check_device(config.device)
        self.limits = tree.limits
        self.device = config.device
        self.vocabulary_size = vocabulary_size
        self.max_context = max_context
        self._config = config
        self._drafting: Grows | None = None
        # Rows read, and trees not drafted: since the network's inputs are missing, or since its cache is full.
        self._rows = self._misses = self._full = 0

    @property
    def drafting(self) -> Grows:
        """The loaded network and its tree growth."""
        assert self._drafting is not None, "the drafter was not started"
        return self._drafting

    @abstractmethod
    def _load(self) -> Grows:
        """Load the network onto its device."""

    @abstractmethod
    def _prepare(self, sequences: Sequence[DraftSequence]) -> list[int]:
        """Read new tokens of the sequences that can be drafted for. Returns their indices."""

    def start(self) -> None:
        """Load the weights, and compile and warm up everything that drafting runs."""
        in_passing_thread(self._start)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        trees = [TokenTree.root_only(sequence.root) for sequence in sequences]
        with launching_on(self.device):
            places = self._prepare(sequences)
            ready = [sequences[place] for place in places]
            for place, tree in zip(places, self.drafting.trees(ready) if ready else (), strict=True):
                trees[place] = tree
        return trees

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.start_trees`."""
        with launching_on(self.device):
            places = self._prepare(sequences)
            ready = [sequences[place] for place in places]
            return among(sequences, places, self.drafting.start_trees(ready) if ready else None)

    def _start(self) -> None:
        with launching_on(self.device):
            if self._config.threads:
                torch.set_num_threads(self._config.threads)
            # They import while weights are read.
            with closing(ahead_compiler(self._config)) as ahead:
                self._drafting = self._load()
                ahead.compile(f"the passes of {self.name}", self._rehearsals())
            LOOPS.wait()
            self._warm_up()
            self._rows = self._misses = self._full = 0

    @property
    def _place(self) -> Placement:
        """Where weights lie, by the settings."""
        device, dtype = torch.device(self.device), getattr(torch, self._config.dtype)
        return Placement(device, dtype, can_pack(dtype, device))

    def _warm_up(self) -> None:
        """Draft once for throw-away sequences."""
        for batch in self._first_batches():
            with self._sequences_of(*batch) as sequences:
                if batch[0] is VerificationMode.REJECTION:
                    self.propose(sequences)
                else:
                    self.start_trees(sequences).fetch().packed([(0, 0, 1, self.vocabulary_size)] * len(sequences))

    def _rehearsals(self) -> Iterator[Callable[[], object]]:
        """What warming up launches, without graphs, and without its results. Not of REJECTION requests, whose levels
        depend on what the device has computed."""
        drafting = self._drafting
        if isinstance(drafting, CapturedDrafting):
            for batch in self._first_batches():
                if batch[0] is not VerificationMode.REJECTION:
                    yield partial(self._rehearse, drafting, *batch)

    def _rehearse(self, drafting: CapturedDrafting, mode: VerificationMode, count: int, rows: int) -> None:
        with drafting.rehearsing(), self._sequences_of(mode, count, rows) as sequences:
            self.start_trees(sequences)

    @contextmanager
    def _sequences_of(self, mode: VerificationMode, count: int, rows: int) -> Iterator[list[DraftSequence]]:
        """So many sequences that have `rows` to be read, while the block runs."""
        tokens = [0] * (rows + 1)
        sequences = [DraftSequence(i, [*tokens], 1, self.vocabulary_size, mode=mode) for i in range(count)]
        for sequence in sequences:
            self.open(sequence)
            if sequence.features is not None:
                sequence.features.append(torch.zeros(rows, sequence.features.width), 0)
        try:
            yield sequences
        finally:
            for sequence in sequences:
                self.close(sequence)

    def _first_batches(self) -> Iterable[tuple[VerificationMode, int, int]]:
        """Batches to warm up with: mode, number of sequences, and rows that each has to read."""
        return ((mode, 1, 1) for mode in LOSSLESS_MODES)


class CachingDrafter(NeuralDrafter[TreeDrafting]):
    """Keeps a `CacheEntry` as each sequence's state."""

    _config: NeuralConfig
    loops = (
        "draft_service.neural.level_growth:compile_loops",
        "draft_service.neural.cuda_graphs.tree_pass:compile_loops",
    )

    def __init__(self, config: NeuralConfig, tree: TreeShape, vocabulary_size: int, max_context: int) -> None:
        """Raises `SettingsError` for a device that is not there."""
        super().__init__(config, tree, vocabulary_size, max_context)
        if config.cuda_graphs:
            # Graphs of more would be captured while all sequences wait.
            self.most_sequences = config.captured_sequences

    @abstractmethod
    def _load_network(self) -> Network:
        """The network, on its device."""

    @abstractmethod
    def _ready(self, sequence: DraftSequence) -> bool:
        """Whether a tree can be drafted and the cache has room for it."""

    @abstractmethod
    def _extend_cache(self, sequences: Sequence[DraftSequence]) -> None:
        """Extend the cache by the new tokens of sequences that it has room for."""

    def open(self, sequence: DraftSequence) -> None:
        sequence.state = self.drafting.empty_entry()
        self._resume(sequence)

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            self.drafting.forget(sequence.state)
            sequence.state = sequence.features = None

    def stats(self) -> Mapping[str, float]:
        drafting, name = self._drafting, self.name
        used = 0 if drafting is None else drafting.cache.used_pages * self._config.page_size
        figures = {f"{name}_cache_used_tokens": used, f"{name}_cache_full_total": self._full}
        if drafting is not None and drafting.prefixes is not None:
            figures[f"{name}_prefix_hit_rows_total"] = drafting.prefixes.hit_rows
        return figures

    def _load(self) -> TreeDrafting:
        return drafting_on(self._load_network(), self._config)

    def _start(self) -> None:
        super()._start()
        if self._config.prefix_cache:
            # Not before: sequences that warm it up begin alike, and each has to read as many rows as it has.
            self.drafting.keep_prefixes()

    def _owner(self, sequence: DraftSequence) -> str:
        """Who may share what is read of the sequence."""
        return sequence.tenant

    def _resume(self, sequence: DraftSequence) -> bool:
        """Begin a sequence of which nothing is read behind what another one has read: when it is opened, and when it is
        read first. Returns whether it began so."""
        if sequence.state.entries:
            return False
        self.drafting.resume(sequence.state, self._owner(sequence), sequence.token_ids)
        return bool(sequence.state.entries)

    def _publish(self, sequences: Sequence[DraftSequence]) -> None:
        for sequence in sequences:
            self.drafting.publish(sequence.state, self._owner(sequence), sequence.token_ids)

    def _prepare(self, sequences: Sequence[DraftSequence]) -> list[int]:
        places = [place for place, sequence in enumerate(sequences) if self._ready(sequence)]
        self._extend_cache([sequences[place] for place in places])
        return places

    def _has_room(self, sequence: DraftSequence, rows: int) -> bool:
        """Reserve `rows` more rows and a tree after them; returns whether there is room."""
        if self.drafting.reserve(sequence.state, rows):
            return True
        self._full += 1
        return False

    def _first_batches(self) -> Iterable[tuple[VerificationMode, int, int]]:
        return first_batches(self.drafting, self._config)
