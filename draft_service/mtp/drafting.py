"""Trees of several modules: module k, counted from 1, drafts the nodes of depth k, and the last one all deeper nodes.

A module reads a token beside a state, and predicts the next token. DeepSeek-V3's formula (arXiv 2412.19437, section
2.2), indexed by the token p that is read:

    h[k][p] = M_k(norm(h[k - 1][p - 1]); norm(embedding(t[p]))),    where h[0] are the target's states.

So the output of module k at a token depends on the target's state k tokens before. Every module predicts the next
token; they differ in how much of the text the target has read. Module 1 drafts the root's children from the target's
newest state; a child has no state of the target, so module 2 drafts its children, and so on.

Each module has its own keys and values of the committed text. Committed tokens are read by all modules in turn: module
k reads each beside the output of module k - 1 at the token before. Module k starts k - 1 tokens late, since module
k - 1 has no row for the token before its first. So later modules have fewer rows in the cache, and trees of a text with
fewer tokens than modules are only as deep as modules have rows. In a tree module k reads the nodes that its level
expands and all expanded ones above them, which it has not read yet: a level costs one pass, as with one module, but of
more rows.

If a layout does not chain its modules (`MtpCheckpoint.chained`), h[k - 1][p - 1] is the state that module k - 1 itself
read, which is always one of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_service.compiling import Numbers
from draft_service.drafters.base import DraftSequence
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.cached_prefixes import CacheEntry
from draft_service.neural.config import NeuralConfig
from draft_service.neural.level_growth import DEPTH, Forest, Rules
from draft_service.neural.network import Network, RootStates, RowOutput
from draft_service.neural.tail_attention import PassRows, TailPart
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import Extension, TreeDrafting
from tree_models.layers.paged import PagedPass


class ModuleNetwork(HeadNetwork):
    """One of several modules, whose layers share one cache."""

    def __init__(self, modules: Sequence[EagleHead], number: int, *, chained: bool) -> None:
        """`number` counts from 0; see `MtpCheckpoint` for `chained`."""
        super().__init__(modules[number])
        # Of the whole cache: a later module's rows are of later tokens.
        self.cache_shapes = [shape for module in modules for shape in module.cache_shapes]
        self.successors = len(modules)
        # The last module drafts all deeper levels from its own output.
        self._passes_on_output = chained or number == len(modules) - 1

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,
        positions: Tensor,
        step: PagedPass,
        sources: Tensor | None = None,
    ) -> RowOutput:
        assert carried is not None, "a module reads states"
        if sources is not None:
            carried = carried.index_select(0, sources)
        output = super().forward_rows(token_ids, carried, positions, step)
        return output if self._passes_on_output else RowOutput(carried, output.lm_input)


@dataclass(slots=True, eq=False)
class ModuleEntry(CacheEntry):
    """One sequence's part of the cache."""

    rows: list[int] = field(default_factory=list)  # cached rows of each module; those of the first are the `entries`
    reaching: int = 0  # number of modules, from the first on, whose last row is of the last token

    @property
    def final_rows(self) -> int:
        return min(self.rows) if self.position == self.entries else 0


class _UnreadRows(NamedTuple):
    """Committed rows that a module is about to read: tokens, and the position of the first."""

    entry: ModuleEntry
    token_ids: Sequence[int]
    position: int
    # Number of modules that have read the token before the first.
    reaching: int


class ModuleDrafting(TreeDrafting):
    """`TreeDrafting` with a module for each level. All modules use the positions of the first one's rows: rotary
    embedding is relative, so the offset does not matter."""

    def __init__(self, modules: Sequence[EagleHead], config: NeuralConfig, *, chained: bool) -> None:
        """`modules` in the order of their depths; see `MtpCheckpoint` for `chained`."""
        self._networks = [ModuleNetwork(modules, number, chained=chained) for number in range(len(modules))]
        super().__init__(self._networks[0], config)
        # The output of each module for the last token that it read.
        others = [RootStates(self.states.unused, self.network.device) for _ in modules[1:]]
        self._states = [self.states, *others]

    def empty_entry(self) -> CacheEntry:
        return ModuleEntry(rows=[0] * len(self._networks))

    def forget(self, entry: CacheEntry) -> None:
        super().forget(entry)
        own = _own(entry)
        own.rows, own.reaching = [0] * len(self._networks), 0

    def resume(self, entry: CacheEntry, owner: str, token_ids: Sequence[int]) -> None:
        super().resume(entry, owner, token_ids)
        # Each module's rows of a page are in it. The rows of later modules are of later tokens.
        _own(entry).rows = [entry.entries] * len(self._networks)

    def _network_of(self, level: int) -> Network:
        return self._networks[self._module_of(level)]

    def _committed(self, entry: CacheEntry, level: int) -> int:
        return _own(entry).rows[self._module_of(level)]

    def _module_of(self, level: int) -> int:
        """The module, counted from 0, that reads the nodes of a level."""
        return min(level, len(self._networks) - 1)

    def _rules(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> Rules:
        """As `TreeDrafting._rules`, with the depth limited to the modules that have read the root, unless all have."""
        rules = super()._rules(sequences, shape)
        for b, sequence in enumerate(sequences):
            reaching = _own(sequence.state).reaching
            if reaching < len(self._networks):
                rules.ints[b, DEPTH] = min(rules.ints[b, DEPTH], reaching)
        return rules

    def _extend(self, pieces: Sequence[Extension], carried: Tensor | None) -> None:
        """One pass of every module over committed rows."""
        assert carried is not None, "modules read states"
        runs: list[_UnreadRows] = []
        for cached, token_ids, position in pieces:
            entry = _own(cached)
            # The next row's position is that of the root's children, if no token is skipped.
            reaching = entry.reaching if position == entry.position else 0
            runs.append(_UnreadRows(entry, token_ids, position, reaching))
            entry.position, entry.reaching = position + len(token_ids), 0
        for number, states in enumerate(self._states):
            continued = [run.entry.slot for run in runs if run.reaching > number]
            last = states.read_of(continued).carried if continued else None
            output = self._read_runs(number, runs, carried)
            runs, carried = _next_runs(number, runs, output, last)
            if not runs:
                return

    def _read_runs(self, number: int, runs: Sequence[_UnreadRows], carried: Tensor) -> Tensor:
        """A module's pass over committed rows, given their states [rows, C]. Returns the next states, [rows, C]."""
        rows = PassRows()
        for entry, token_ids, position, _ in runs:
            count = len(token_ids)
            part = TailPart(entry.pages, entry.rows[number], count, count, slot=entry.slot)
            rows.add(part, token_ids, range(position, position + count))
            entry.rows[number] += count
            entry.entries, entry.reaching = entry.rows[0], number + 1
        output = self._forward_rows(rows, carried, number)
        self._states[number].write_last(rows.parts, output)
        return output.carried

    def _level(
        self, entries: Sequence[CacheEntry], forest: Forest, before: Numbers, carried: Tensor, level: int
    ) -> RowOutput:
        """As `TreeDrafting._level`. Except after the last module, `carried` holds the states of the root and all rows
        of the tail of each tree."""
        if level >= len(self._networks):
            return super()._level(entries, forest, before, carried, level)
        tails, *indices = self._tails(entries, forest, before, level)
        sources, newest = (torch.tensor(rows, device=carried.device) for rows in indices)
        output, parts = self._forward_rows(tails, carried[sources], level), tails.parts
        lm_input = output.lm_input[newest]
        if level == len(self._networks) - 1:
            return RowOutput(output.carried[newest], lm_input)
        roots = self._states[level].read_of([part.slot for part in parts]).carried
        rows = torch.split(output.carried, [part.new for part in parts])
        joined = [piece for root, own in zip(torch.split(roots, 1), rows, strict=True) for piece in (root, own)]
        return RowOutput(torch.cat(joined), lm_input)

    def _tails(
        self, entries: Sequence[CacheEntry], forest: Forest, before: Numbers, level: int
    ) -> tuple[PassRows, list[int], list[int]]:
        """The rows that a level's own module reads: the whole tails of trees that still grow, but for the roots. With
        the index of each row's parent in the output of the level above, and the indices of rows in the frontiers."""
        tails, sources, newest = PassRows(), list[int](), list[int]()
        # Rows of each tree in the output of the level above, which has those that it expanded.
        above = np.where(before > 0, forest.rows - forest.widths, 0)
        offsets = np.cumsum(above) - above
        for b, entry in enumerate(entries):
            if not forest.widths[b]:
                continue
            rows = int(forest.rows[b])
            parents, depths, items = forest.tail_parents[b, :rows], np.zeros(rows, np.int64), np.zeros(rows, np.int64)
            expanded = np.flatnonzero(forest.tails[b, : forest.sizes[b]] >= 0)
            items[forest.tails[b, expanded]] = expanded
            for row in range(1, rows):
                depths[row] = depths[parents[row]] + 1
            prefix = self._committed(entry, level) - 1
            part = TailPart(entry.pages, prefix, rows, rows - 1, tuple(parents.tolist()), entry.slot)
            positions = (entry.position + depths[1:] - 1).tolist()
            tails.add(part, forest.tokens[b, items[1:]].tolist(), positions)
            sources += (offsets[b] + parents[1:]).tolist()
            end = len(tails.token_ids)
            newest += range(end - int(forest.widths[b]), end)
        return tails, sources, newest


def _next_runs(
    number: int, runs: Sequence[_UnreadRows], output: Tensor, last: Tensor | None
) -> tuple[list[_UnreadRows], Tensor]:
    """The tokens that the next module reads, and this module's states at the token before each, given its `output`
    [rows, C] for the runs, and its `last` states [n, C] before each of the n runs that it continues."""
    onward, sources, end, before = list[_UnreadRows](), list[int](), 0, len(output)
    for run in runs:
        begin, end = end, end + len(run.token_ids)
        if run.reaching > number:
            sources.append(before)
            before += 1
            onward.append(run)
        elif end - begin > 1:
            onward.append(run._replace(token_ids=run.token_ids[1:], position=run.position + 1))
        sources += range(begin, end - 1)
    joined = output if last is None else torch.cat([output, last])
    return onward, joined[torch.tensor(sources, dtype=torch.int64, device=output.device)]


def _own(entry: CacheEntry) -> ModuleEntry:
    assert isinstance(entry, ModuleEntry), "the entry was made by another TreeDrafting"
    return entry
