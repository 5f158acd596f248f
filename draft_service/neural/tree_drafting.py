"""Drafts trees with a network that has a cache: it reads committed tokens, then grows trees level by level.

Symbols: B sequences, R rows of a pass, C and H the widths of `RowOutput`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_service.compiling import Numbers
from draft_service.drafters.base import DraftSequence, tree_limits
from draft_service.drafters.grown import GrownTrees, Pending, computed
from draft_service.neural.cached_prefixes import CachedPrefixes, CacheEntry
from draft_service.neural.candidates import candidates_wanted, most_probable, temperature_of
from draft_service.neural.config import NeuralConfig
from draft_service.neural.level_growth import (
    COUPLED,
    DEPTH,
    GREEDY,
    NODES,
    REJECTION,
    Forest,
    Rules,
    grow_level,
    kept_items,
    make_forest,
)
from draft_service.neural.network import Network, RootStates, RowOutput
from draft_service.neural.paged_cache import DraftCache, cached_bytes
from draft_service.neural.tail_attention import PassRows, TailPart, pass_over
from draft_service.neural.tree_config import TreeShape
from draft_service.noise import first_coin
from outrider.sampling import VerificationMode
from outrider.tree import DraftDistribution, TokenTree
from tree_kernels.attention import TreeAttention

_MODES = {VerificationMode.GREEDY: GREEDY, VerificationMode.COUPLED: COUPLED, VerificationMode.REJECTION: REJECTION}
# Separates the draft's coins from other random numbers derived from the request's seed.
_COIN_SALT = 0xA0761D6478BD642F


class Extension(NamedTuple):
    """Committed rows to add to a sequence's cache: `token_ids` [n], and the position of the first."""

    entry: CacheEntry
    token_ids: Sequence[int]
    position: int


class HostGrowth(ABC):
    """Trees that the host grows, level by level, of a network's passes. Called from one thread."""

    @torch.inference_mode()
    def trees(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """The best trees, of requests in any mode."""
        return grown_trees(*self._grow(sequences), sequences)

    @torch.inference_mode()
    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """Start drafting trees, none of them for a REJECTION request. A GPU's are fetched before the next call."""
        return computed(best_items(*self._grow(sequences), sequences))

    @abstractmethod
    def _grow(self, sequences: Sequence[DraftSequence]) -> tuple[Forest, Rules]:
        """Grow the trees of all sequences together, with one pass per level."""


class TreeDrafting(HostGrowth):
    """A network, its cache, and the growth of trees. Called from one thread.

    Passes over committed rows go through `_commit`, and levels of trees through `_read`. `CapturedDrafting` in
    `cuda_graphs.drafting` overrides both, and drafts most trees as a whole.
    """

    def __init__(self, network: Network, config: NeuralConfig) -> None:
        self.network = network
        self.shape = config.tree
        self._max_rows = config.max_rows
        tokens = config.cached_tokens(cached_bytes(network))
        self.cache = DraftCache(tokens // config.page_size, config.page_size, network)
        # A sequence with a slot has at least one page of its own.
        self._free_slots = list(range(self.cache.num_pages))
        self.states = RootStates(self.cache.num_pages, network.device)
        self.prefixes: CachedPrefixes | None = None
        on_cpu = network.device.type == "cpu"
        self._attention = TreeAttention("torch" if on_cpu else "triton", network.device)

    def empty_entry(self) -> CacheEntry:
        """The empty cache entry of a new sequence."""
        return CacheEntry()

    def keep_prefixes(self) -> None:
        """Let sequences share the pages of what they begin with, from now on."""
        self.prefixes = CachedPrefixes(self.cache, self.network.successors)

    def reserve(self, entry: CacheEntry, rows: int) -> bool:
        """Allocate pages for `rows` more committed rows and a tree below them. Returns False if the cache is full."""
        if not self.cache.extend(entry.pages, entry.entries + rows + self.shape.expanded):
            return False
        if entry.slot < 0:
            entry.slot = self._free_slots.pop()
        return True

    def resume(self, entry: CacheEntry, owner: str, token_ids: Sequence[int]) -> None:
        """Begin an empty entry behind the pages that hold the text's first tokens already."""
        if self.prefixes is not None:
            # The rows of the last tokens are read again: their output is not kept.
            self.prefixes.resume(entry, owner, token_ids, len(token_ids) - 1 - self.network.successors)

    def publish(self, entry: CacheEntry, owner: str, token_ids: Sequence[int]) -> None:
        """Let other sequences of this owner share the entry's pages that are final."""
        if self.prefixes is not None:
            self.prefixes.publish(entry, owner, token_ids)

    def forget(self, entry: CacheEntry) -> None:
        if self.prefixes is not None:
            self.prefixes.leave(entry)
        self.cache.release(entry.pages)
        entry.pages.clear()
        if entry.slot >= 0:
            self._free_slots.append(entry.slot)
        entry.slot, entry.entries, entry.position = -1, 0, 0

    @torch.inference_mode()
    def extend(self, extensions: Sequence[Extension], carried: Tensor | None = None) -> None:
        """Read committed rows, in passes of at most `max_rows`. `reserve` must have allocated their pages.

        They overwrite the rows of trees, so no rejected row is attended to later. `carried`, [rows of all extensions in
        order, C], may be on the host; a GPU may still copy from there after the call.
        """
        pieces: list[Extension] = []
        room, begin = self._max_rows, 0
        for entry, token_ids, position in extensions:
            start = 0
            while start < len(token_ids):
                piece = token_ids[start : start + room]
                pieces.append(Extension(entry, piece, position + start))
                start, room = start + len(piece), room - len(piece)
                if room == 0:
                    self._extend(pieces, None if carried is None else carried[begin : begin + self._max_rows])
                    pieces, room, begin = [], self._max_rows, begin + self._max_rows
        if pieces:
            self._extend(pieces, None if carried is None else carried[begin:])

    def _grow(self, sequences: Sequence[DraftSequence]) -> tuple[Forest, Rules]:
        shape = self.shape.for_sequences(len(sequences))
        entries = [one.state for one in sequences]
        roots = self.states.read_of([entry.slot for entry in entries])
        expand = partial(self._level, entries)
        return grow_forest(sequences, self._rules(sequences, shape), shape, self._network_of, roots, expand)

    def _rules(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> Rules:
        return rules_of(sequences, shape)

    def _network_of(self, level: int) -> Network:  # noqa: ARG002
        """The network that reads the nodes of a level; committed rows are level 0."""
        return self.network

    def _committed(self, entry: CacheEntry, level: int) -> int:  # noqa: ARG002
        """Committed rows of a sequence in the cache of the network that reads a level."""
        return entry.entries

    def _extend(self, pieces: Sequence[Extension], carried: Tensor | None) -> None:
        rows = PassRows()
        for entry, token_ids, position in pieces:
            count = len(token_ids)
            part = TailPart(entry.pages, entry.entries, count, count, slot=entry.slot)
            rows.add(part, token_ids, range(position, position + count))
            entry.entries, entry.position = entry.entries + count, position + count
        self._commit(rows, carried)

    def _commit(self, rows: PassRows, carried: Tensor | None) -> None:
        """One pass over committed rows; the output of each sequence's last one is stored."""
        self.states.write_last(rows.parts, self._forward_rows(rows, carried))

    def _level(
        self, entries: Sequence[CacheEntry], forest: Forest, before: Numbers, carried: Tensor, level: int
    ) -> RowOutput:
        """One pass over the frontiers of all sequences. `before` [B] counts the rows of `carried` [.., C]."""
        rows = PassRows()
        sources: list[int] = []
        offsets = np.cumsum(before) - before
        for b, entry in enumerate(entries):
            new = int(forest.widths[b])
            if not new:
                continue
            size = int(forest.rows[b])
            # The last committed entry is the root of the tail, and already in the cache.
            prefix, parents = self._committed(entry, level) - 1, tuple(forest.tail_parents[b, :size].tolist())
            part = TailPart(entry.pages, prefix, size, new, parents, entry.slot)
            rows.add(part, forest.tokens[b, forest.frontier[b, :new]].tolist(), [entry.position + level - 1] * new)
            sources += (forest.sources[b, :new] + offsets[b]).tolist()
        return self._forward_rows(rows, carried[torch.tensor(sources, device=carried.device)], level)

    def _forward_rows(self, rows: PassRows, carried: Tensor | None, level: int = 0) -> RowOutput:
        device = self.network.device
        if carried is not None:
            carried = carried.to(device, non_blocking=True)
        step = pass_over(self._attention, self.cache, rows.parts)
        token_ids, positions = (torch.tensor(part, device=device) for part in (rows.token_ids, rows.positions))
        return self._network_of(level).forward_rows(token_ids, carried, positions, step)


def grow_forest(
    sequences: Sequence[DraftSequence],
    rules: Rules,
    shape: TreeShape,
    network_of: Callable[[int], Network],
    roots: RowOutput,
    expand: Callable[[Forest, Numbers, Tensor, int], RowOutput],
) -> tuple[Forest, Rules]:
    """Grow the trees of sequences together, of this shape and by these rules.

    Args:
        network_of: the network that reads the nodes of a level, of which 0 is the roots'.
        roots: its output [B, ..] for the roots.
        expand: its output for the nodes that a level expands: of the trees, the rows of each [B] that the level before
            expanded, the states that these carry, and the level.
    """
    drawn = any(one.mode is VerificationMode.REJECTION for one in sequences)
    forest = make_forest(len(sequences), shape.num_steps, shape.width, shape.topk, drawn=drawn)
    count = max(candidates_wanted(one.mode, shape.topk, shape.gumbel_candidates) for one in sequences)
    temperatures = np.array([temperature_of(one) for one in sequences], dtype=np.float32)
    network, levels = network_of(0), int(rules.ints[:, DEPTH].max())
    carried, logits = roots.carried, network.logits(roots.lm_input)
    for level in range(1, levels + 1):
        rows = torch.from_numpy(np.repeat(temperatures, forest.widths)).to(network.device)
        tokens, probs = most_probable(logits, rows, count, network.token_ids)
        before = forest.widths.copy()
        if not grow_level(forest, rules, level, level == levels, tokens, probs):
            break
        output = expand(forest, before, carried, level)
        carried, logits = output.carried, network_of(level).logits(output.lm_input)
    return forest, rules


def rules_of(sequences: Sequence[DraftSequence], shape: TreeShape) -> Rules:
    """The requests of these sequences, and the shape of their trees."""
    ints, reals = np.zeros((len(sequences), 4), np.int32), np.zeros((len(sequences), 2))
    for b, sequence in enumerate(sequences):
        limits, sampling = tree_limits(shape.limits, sequence.limits), sequence.sampling
        greedy = sequence.mode is VerificationMode.GREEDY
        ints[b] = _MODES[sequence.mode], limits.max_nodes, limits.max_depth, 0 if greedy else sampling.top_k
        reals[b] = (1.0, 0.0) if greedy else (sampling.top_p, sampling.min_p)
    coins = [first_coin(one.seed, _COIN_SALT, len(one.token_ids)) for one in sequences]
    return Rules(
        ints=ints,
        reals=reals,
        seeds=np.array([one.seed for one in sequences], dtype=np.uint64),
        positions=np.array([len(one.token_ids) for one in sequences], dtype=np.uint64),
        coins=np.array(coins, dtype=np.uint64),
        width=shape.width,
        breadth=shape.topk,
        floor=shape.min_score,
        sharpness=shape.gumbel_sharpness,
    )


def best_items(forest: Forest, rules: Rules, sequences: Sequence[DraftSequence]) -> GrownTrees:
    """The best nodes of every tree, as many as its request allows."""
    grown = GrownTrees.roots([one.root for one in sequences], 1 + int(rules.ints[:, NODES].max()))
    for b in range(len(sequences)):
        items = kept_items(forest, b, int(rules.ints[b, NODES]))
        rows = len(items)
        row_of = np.zeros(int(forest.sizes[b]), np.int32)
        row_of[items] = np.arange(rows)
        grown.trees[b, 0, 1:rows] = forest.tokens[b, items[1:]]
        grown.trees[b, 1, :rows] = row_of[forest.parents[b, items]]
        grown.scores[b, :rows], grown.sizes[b] = np.clip(forest.scores[b, items], 0.0, 1.0), rows
    return grown


def grown_trees(forest: Forest, rules: Rules, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
    """The best nodes of every tree, with distributions for REJECTION requests."""
    trees = best_items(forest, rules, sequences).as_trees()
    return [
        _with_distributions(tree, forest, b) if sequence.mode is VerificationMode.REJECTION else tree
        for b, (tree, sequence) in enumerate(zip(trees, sequences, strict=True))
    ]


def _with_distributions(tree: TokenTree, forest: Forest, b: int) -> TokenTree:
    """The tree with the distributions that the children of its rows were drawn from."""
    items = kept_items(forest, b, tree.drafted)
    distributions: dict[int, DraftDistribution] = {}
    for row in sorted(set(tree.parents[1:])):
        tail = forest.tails[b, items[row]]
        size = forest.distribution_sizes[b, tail]
        distributions[row] = DraftDistribution(
            tuple(forest.distribution_tokens[b, tail, :size].tolist()),
            tuple(forest.distribution_weights[b, tail, :size].tolist()),
        )
    return replace(tree, distributions=distributions)
