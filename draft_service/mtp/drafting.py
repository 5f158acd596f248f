"""Trees that several modules draft: module k, counted from 1, the nodes of depth k, and the last one those below.

A module reads a token beside a state, and guesses the next token. DeepSeek-V3's formula (arXiv 2412.19437, section
2.2), written by the token p that is read:

    h[k][p] = M_k(norm(h[k - 1][p - 1]); norm(embedding(t[p]))),    h[0] being the target's states.

So what module k makes of a token rests on the target's state k tokens before: every module guesses the token after the
last, and what differs is how much of the text the target has read. Module 1 guesses the root's children, of the
target's newest state; at a child the target has no state, and module 2 speaks, and so on.

Each module has keys and values of its own over the committed text. When tokens are committed, all modules read them,
one after the other: module k beside what module k - 1 made of the token before each. Module k begins k - 1 tokens
late, for the token before its first has no row of module k - 1; so its rows in the cache are fewer, and a text shorter
than its modules gets trees that are no deeper than modules have rows. In a tree module k reads not only the nodes that
its level expands but all expanded ones above them, since they are text that it has not seen: a level costs one pass, as
with one module, of more rows.

Where a layout does not chain its modules (`MtpCheckpoint.chained`), h[k - 1][p - 1] is the state that module k - 1
itself read, and so always one of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.level_growth import DEPTH, Forest, Rules
from draft_service.neural.network import Network, RootStates, RowOutput
from draft_service.neural.tail_attention import Attend, TailPart
from draft_service.neural.tree_config import CacheShape, TreeShape
from draft_service.neural.tree_drafting import CacheEntry, Extension, TreeDrafting, Wanted


class ModuleNetwork(HeadNetwork):
    """One of several modules, whose layers stand one after the other in one cache."""

    def __init__(self, modules: Sequence[EagleHead], number: int, *, chained: bool) -> None:
        """`number` counts from 0; see `MtpCheckpoint` for `chained`."""
        super().__init__(modules[number])
        self._first_layer = sum(module.config.num_layers for module in modules[:number])
        # Of the whole cache.
        self.layers = sum(module.config.num_layers for module in modules)
        # The last one follows itself, for which there is its own output alone.
        self._hands_on_output = chained or number == len(modules) - 1

    def read(self, token_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> RowOutput:
        """See `Network.read`."""
        assert carried is not None, "a module reads states"

        def attend_own(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(self._first_layer + layer, query, key, value)

        output = super().read(token_ids, carried, positions, attend_own)
        return output if self._hands_on_output else RowOutput(carried, output.lm_input)


@dataclass(slots=True, eq=False)
class ModuleEntry(CacheEntry):
    """What is kept of one sequence.

    Attributes:
        rows: in the cache, of each module; those of the first are the `entries`.
        reaching: modules, from the first on, whose last row is of the last token.
        position: of the row that comes next, where no token is left out.
    """

    rows: list[int] = field(default_factory=list)
    reaching: int = 0
    position: int = 0


class _Run(NamedTuple):
    """Certain rows that a module is about to read: tokens, and the position of the first."""

    entry: ModuleEntry
    token_ids: Sequence[int]
    position: int
    # Modules that had read the token before those that came.
    reaching: int


class _Tails(NamedTuple):
    """All rows of growing trees' tails but the roots, one tree after the other."""

    parts: list[TailPart]
    token_ids: list[int]
    positions: list[int]
    # Place of each row's parent in what the level above made.
    sources: list[int]
    # Which trees they are.
    places: list[int]


class ModuleDrafting(TreeDrafting):
    """`TreeDrafting` with a module for each level. Positions are those of the first module's rows: rotary ones are
    relative, so that it is all the same which of its own a module counts from."""

    def __init__(self, modules: Sequence[EagleHead], tree: TreeShape, cache: CacheShape, *, chained: bool) -> None:
        """`modules` in the order of their depths; see `MtpCheckpoint` for `chained`."""
        self._networks = [ModuleNetwork(modules, number, chained=chained) for number in range(len(modules))]
        super().__init__(self._networks[0], tree, cache)
        # What each module made of the last token that it read.
        others = [RootStates(self.states.nobody, self.network.device) for _ in modules[1:]]
        self._states = [self.states, *others]

    def follow(self) -> CacheEntry:
        return ModuleEntry(rows=[0] * len(self._networks))

    def forget(self, followed: CacheEntry) -> None:
        super().forget(followed)
        entry = _own(followed)
        entry.rows, entry.reaching = [0] * len(self._networks), 0

    def _network_of(self, level: int) -> Network:
        return self._networks[self._module_of(level)]

    def _certain(self, followed: CacheEntry, level: int) -> int:
        return _own(followed).rows[self._module_of(level)]

    def _module_of(self, level: int) -> int:
        """The module, counted from 0, that reads the nodes of a level."""
        return min(level, len(self._networks) - 1)

    def _rules(self, wanted: Sequence[Wanted], shape: TreeShape) -> Rules:
        """What the sequences ask for, no deeper than there are modules that reach their roots, unless all do."""
        rules = super()._rules(wanted, shape)
        for b, one in enumerate(wanted):
            reaching = _own(one.followed).reaching
            if reaching < len(self._networks):
                rules.ints[b, DEPTH] = min(rules.ints[b, DEPTH], reaching)
        return rules

    def _extend(self, pieces: Sequence[tuple[Extension, int, int]], carried: Tensor | None) -> None:
        """One pass of every module over certain rows."""
        assert carried is not None, "modules read states"
        runs: list[_Run] = []
        for extension, start, stop in pieces:
            entry, position = _own(extension.followed), extension.first_position + start
            reaching = entry.reaching if position == entry.position else 0
            runs.append(_Run(entry, extension.token_ids[start:stop], position, reaching))
            entry.position, entry.reaching = position + stop - start, 0
        for number, states in enumerate(self._states):
            going_on = [run.entry.pages for run in runs if run.reaching > number]
            last = states.read(states.places(going_on)).carried if going_on else None
            made = self._read_certain(number, runs, carried)
            runs, carried = _following(number, runs, made, last)
            if not runs:
                return

    def _read_certain(self, number: int, runs: Sequence[_Run], carried: Tensor) -> Tensor:
        """A module's pass over certain rows, given [rows, C]. Returns what it hands on of each, [rows, C]."""
        parts, tokens, positions = list[TailPart](), list[int](), list[int]()
        for entry, token_ids, position, _ in runs:
            count = len(token_ids)
            parts.append(TailPart(entry.pages, entry.rows[number], count, count))
            entry.rows[number] += count
            entry.entries, entry.reaching = entry.rows[0], number + 1
            tokens += token_ids
            positions += range(position, position + count)
        output = self._read(parts, tokens, carried, positions, number)
        ends = torch.from_numpy(np.cumsum([part.rows for part in parts]) - 1).to(self.network.device)
        states = self._states[number]
        states.write(states.places([part.pages for part in parts]), output, ends)
        return output.carried

    def _level(
        self, wanted: Sequence[Wanted], forest: Forest, before: npt.NDArray[np.int32], carried: Tensor, level: int
    ) -> RowOutput:
        """As `TreeDrafting._level`. Of a level that has a module of its own, which is not the last, `carried` is of the
        roots and all rows of the tails, one tree after the other."""
        if level >= len(self._networks):
            return super()._level(wanted, forest, before, carried, level)
        tails = self._tails(wanted, forest, before, level)
        sources = torch.tensor(tails.sources, device=carried.device)
        output = self._read(tails.parts, tails.token_ids, carried[sources], tails.positions, level)
        ends = np.cumsum([part.new for part in tails.parts])
        widths = forest.widths[tails.places]
        newest = torch.from_numpy(
            np.concatenate([np.arange(end - width, end) for end, width in zip(ends, widths, strict=True)])
        ).to(carried.device)
        lm_input = output.lm_input[newest]
        if level == len(self._networks) - 1:
            return RowOutput(output.carried[newest], lm_input)
        states = self._states[level]
        roots = states.read(states.places([part.pages for part in tails.parts])).carried
        rows = torch.split(output.carried, [part.new for part in tails.parts])
        joined = [piece for root, own in zip(torch.split(roots, 1), rows, strict=True) for piece in (root, own)]
        return RowOutput(torch.cat(joined), lm_input)

    def _tails(self, wanted: Sequence[Wanted], forest: Forest, before: npt.NDArray[np.int32], level: int) -> _Tails:
        """What a level's own module reads: all rows of the tails of trees that still grow."""
        tails = _Tails([], [], [], [], [])
        # Rows of each tree in what the level above made, which went on where that had anything to expand.
        above = np.where(before > 0, forest.rows - forest.widths, 0)
        offsets = np.cumsum(above) - above
        for b, one in enumerate(wanted):
            if not forest.widths[b]:
                continue
            rows = int(forest.rows[b])
            parents, depths, items = forest.tail_parents[b, :rows], np.zeros(rows, np.int64), np.zeros(rows, np.int64)
            expanded = np.flatnonzero(forest.tails[b, : forest.sizes[b]] >= 0)
            items[forest.tails[b, expanded]] = expanded
            for row in range(1, rows):
                depths[row] = depths[parents[row]] + 1
            prefix = self._certain(one.followed, level) - 1
            tails.parts.append(TailPart(one.followed.pages, prefix, rows, rows - 1, tuple(parents.tolist())))
            tails.token_ids.extend(forest.tokens[b, items[1:]].tolist())
            tails.positions.extend((one.position + depths[1:] - 1).tolist())
            tails.sources.extend((offsets[b] + parents[1:]).tolist())
            tails.places.append(b)
        return tails


def _following(number: int, runs: Sequence[_Run], made: Tensor, last: Tensor | None) -> tuple[list[_Run], Tensor]:
    """What the next module reads: the same tokens, each beside what this one made of the token before.

    Args:
        number: of this module, from 0.
        made: [rows, C] what it made of the runs.
        last: [n, C] what it had made of the last token before each of the n runs that go on where it stood.
    """
    onward, sources, end, before = list[_Run](), list[int](), 0, len(made)
    for run in runs:
        begin, end = end, end + len(run.token_ids)
        if run.reaching > number:
            sources.append(before)
            before += 1
            onward.append(run)
        elif end - begin > 1:
            onward.append(run._replace(token_ids=run.token_ids[1:], position=run.position + 1))
        sources += range(begin, end - 1)
    joined = made if last is None else torch.cat([made, last])
    return onward, joined[torch.tensor(sources, dtype=torch.int64, device=made.device)]


def _own(followed: CacheEntry) -> ModuleEntry:
    assert isinstance(followed, ModuleEntry), "the sequence is followed by other drafting"
    return followed
