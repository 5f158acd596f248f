"""Masks of the rows of many trees, computed by the engine's thread and by others that help it: one after the other they
may take the host longer than a pass takes the device."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.compiling import compiled

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from target_service.grammars.forced_text import ForcedText

Ints = NDArray[np.int32]
# Threads that compute masks beside the engine's, of as many processors at most. Chosen: a mask takes 10 to 30 us, up to
# 150 near the end of a string of bounded length, and a step has some hundred of them.
_MOST_HELPERS = min(15, (os.cpu_count() or 1) - 1)
# Masks for each thread that is woken. Chosen: to wake it takes as long as some masks, and on busy processors longer
# than all. So the engine's thread begins itself, and waits for no thread that has not begun: llguidance's own threads,
# which were waited for, took two and three times as long on two busy cores
# (`benchmarks/results/2026-11-28-cpu-form-passes.md`).
_MASKS_EACH = 16
# [32] each with one bit set.
_BITS = (1 << np.arange(32, dtype=np.int64)).astype(np.int32)
# A path of expected text ends where more tokens than these may come. Chosen: ten digits and what may follow them are
# still listed.
MOST_CHILDREN = 16


class TreeRows(NamedTuple):
    """Rows of a tree as a device lays them out: siblings may have the same token."""

    token_ids: Sequence[int]
    parents: Sequence[int]  # each below its row; that of the first, the root, is 0


@dataclass(slots=True, eq=False)
class RowChain:
    """Rows of a tree, each the parent of the next.

    Attributes:
        matcher: has read the tokens up to the first row: that of the output, or a copy as soon as it reads others.
        rows: the rows.
        token_ids: of the rows behind the first.
        last: the token that the matcher has read last, -1 for none.
    """

    matcher: LLMatcher
    rows: list[int]
    token_ids: list[int]
    last: int


@dataclass(slots=True, eq=False)
class MaskedRows:
    """The rows of a tree whose masks are to be computed, by a `matcher` that has read the tokens up to its root.

    Attributes:
        tree: the rows.
        lexer: what the masks of other trees may share with these: no two threads compute masks of one at once.
        chains: all of them but those behind text that the grammar forbids, as far as that was seen.
        seconds: of a processor that its masks took.
        most_seconds: after which no further mask is begun, if masks may be late.
        late: whether some masks were not computed for that reason.
        first: the place of its first mask.
        known: by row, masks that are not computed.
        depends_on_last: by row whose mask was computed here, whether it depends on the token before too, as where text
            is forced.
        forced: by row, tokens that come one after the other behind it, each of which is allowed alone; of the first
            row of each such text. Those behind the root may be known before.
    """

    tree: TreeRows
    lexer: object
    text: ForcedText
    chains: list[RowChain]
    forced: dict[int, tuple[int, ...]]
    known: Mapping[int, Ints] = field(default_factory=dict)
    depends_on_last: dict[int, bool] = field(default_factory=dict)
    seconds: float = 0.0
    most_seconds: float = inf
    late: bool = False
    first: int = 0

    @classmethod
    def of(
        cls,
        matcher: LLMatcher,
        tree: TreeRows,
        lexer: object,
        text: ForcedText,
        last: int,
        forced: tuple[int, ...],
        known: Mapping[int, Ints],
    ) -> MaskedRows:
        """Cut a tree into chains. Copies of the matcher read them: a copy takes a microsecond, and what it meets stays
        its own. `last` and `forced` are of the root, see `RowChain` and `MaskedRows`, as is `known`."""
        rows, forced_rows = list(range(len(tree.token_ids))), {0: forced} if forced else {}
        if list(tree.parents[1:]) == rows[:-1]:
            chain = RowChain(matcher, rows, list(tree.token_ids[1:]), last)
            return cls(tree, lexer, text, [chain], forced_rows, known)
        children: list[list[int]] = [[] for _ in tree.token_ids]
        for row in range(1, len(tree.token_ids)):
            children[tree.parents[row]].append(row)
        chains, begins = list[RowChain](), [(0, list[int]())]
        while begins:
            row, path = begins.pop()
            rows, token_ids, others = [row], list[int](), list[tuple[int, list[int]]]()
            while below := children[row]:
                others += [(other, [*path, *token_ids, tree.token_ids[other]]) for other in below[1:]]
                row = below[0]
                rows.append(row)
                token_ids.append(tree.token_ids[row])
            own = matcher
            if path and not all([row in known for row in rows]):
                own = matcher.deep_copy()
                if own.try_consume_tokens(path) < len(path):
                    continue
            begins += others
            chains.append(RowChain(own, rows, token_ids, path[-1] if path else last))
        return cls(tree, lexer, text, chains, forced_rows, known)

    def without_masks(self, reached: ReachedRows) -> ReachedRows:
        """The rows of this tree, `reached` until now, as if no mask of theirs was computed."""
        reached.places[:] = reached.words[:] = reached.counts[:] = 0
        return reached

    def places_from(self, free: int) -> Iterator[int]:
        """Places for masks that are computed again: those of this tree, and then those that are free."""
        rows = sum([len(chain.rows) for chain in self.chains])
        return itertools.chain(range(self.first, self.first + rows), itertools.count(free))


class ReachedRows(NamedTuple):
    """Rows of trees, one behind the other.

    Attributes:
        places: [rows] where the mask of each row is; 0 for rows that no walk reaches, as their grammars forbid them.
        words: [rows] words of the mask that allow any token, at most one more than `MOST_CHILDREN`; 0 where no mask
            was computed, and -1 for rows that no walk reaches.
        counts: [rows] how many tokens the mask allows, if those are no more than `MOST_CHILDREN`; else 0.
        listed: [rows, MOST_CHILDREN] these tokens; what lies behind them is undefined.
    """

    places: Ints
    words: Ints
    counts: Ints
    listed: Ints

    @classmethod
    def empty(cls, rows: int) -> ReachedRows:
        """Of so many rows, none of which has a mask."""
        places, words, counts = np.zeros((3, rows), np.int32)
        return cls(places, words, counts, np.zeros((rows, MOST_CHILDREN), np.int32))

    def part(self, first: int, end: int) -> ReachedRows:
        """The rows from one on, up to another."""
        return ReachedRows(
            self.places[first:end], self.words[first:end], self.counts[first:end], self.listed[first:end]
        )

    def few(self) -> list[tuple[int, ...]]:
        """The tokens that may follow each row; none where they are many, or no walk reaches it."""
        counts, listed = self.counts.tolist(), self.listed.tolist()
        return [tuple(tokens[:count]) if count else () for count, tokens in zip(counts, listed, strict=True)]


def compute_masks(trees: Sequence[MaskedRows], room: Ints, first_place: int = 1) -> tuple[ReachedRows, int]:
    """Write the masks of trees to `room` [1 + rows, words] from its `first_place` on; in the first of all stands the
    mask that allows the end tokens alone. Returns the rows, and the first place behind the masks. A matcher that has
    met a limit is in error."""
    counts = [sum([len(chain.rows) for chain in tree.chains]) for tree in trees]
    firsts = list(itertools.accumulate(counts, initial=first_place))
    groups: dict[int, list[MaskedRows]] = {}
    for tree, first in zip(trees, firsts[:-1], strict=True):
        tree.first = first
        groups.setdefault(id(tree.lexer), []).append(tree)
    # Nothing is computed where a grammar ends.
    room[first_place : firsts[-1]].fill(0)
    left, places = iter([*groups.values()]), _Places(room, room.ctypes.data, room.strides[0])

    def compute() -> None:
        # One tree ends where the next one begins: the clock takes longer to read than some masks.
        begin = time.thread_time()
        # A group is taken by one thread alone.
        while group := next(left, None):
            for tree in group:
                begin = _compute_in_turn(tree, places, begin)

    most = min(len(groups) - 1, (firsts[-1] - first_place) // _MASKS_EACH, _MOST_HELPERS)
    helpers = [_helpers().submit(compute) for _ in range(most)]
    compute()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    return _reached(trees, room, first_place), firsts[-1]


def _reached(trees: Sequence[MaskedRows], room: Ints, first_place: int) -> ReachedRows:
    token_ids, parents, rows, first = list[int](), list[int](), list[int](), 0
    for tree in trees:
        token_ids += tree.tree.token_ids
        parents += [-1, *[first + parent for parent in tree.tree.parents[1:]]]
        rows += [first + row for chain in tree.chains for row in chain.rows]
        first += len(tree.tree.token_ids)
    reached = ReachedRows.empty(first)
    reached.places[rows] = np.arange(first_place, first_place + len(rows))
    find_reached(np.array(token_ids, np.int32), np.array(parents, np.int32), room, *reached)
    return reached


@compiled
def find_reached(
    token_ids: Ints, parents: Ints, room: Ints, places: Ints, words: Ints, counts: Ints, listed: Ints
) -> None:
    """Write to `places`, `words`, `counts` and `listed` what `ReachedRows` has of rows, each behind its parent; -1 is
    the parent of a root. `places` has those of all masks that were computed."""
    for row in range(len(token_ids)):
        parent, token = parents[row], token_ids[row]
        counts[row] = 0
        if parent >= 0:
            word, bit = token >> 5, token & 31
            if words[parent] <= 0 or not (room[places[parent], word] >> bit) & 1 or (room[0, word] >> bit) & 1:
                places[row], words[row] = 0, -1
                continue
        count, found, place = 0, 0, places[row]
        if place > 0:
            for word in range(room.shape[1]):
                bits = room[place, word]
                if bits != 0:
                    count += 1
                    if count > MOST_CHILDREN:
                        break
                    for bit in range(32):
                        if (bits >> bit) & 1:
                            if found < MOST_CHILDREN:
                                listed[row, found] = 32 * word + bit
                            found += 1
        words[row] = count
        if count <= MOST_CHILDREN and found <= MOST_CHILDREN:
            counts[row] = found


@cache
def warm_up() -> None:
    """Compile what the first masks would wait for."""
    room, places = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    find_reached(places, places - 1, room, *ReachedRows.empty(1))
    # As parts of larger arrays too.
    find_reached(places, places - 1, room, *ReachedRows.empty(2).part(0, 1))
    list_tokens(room[0], places)


@compiled
def list_tokens(words: Ints, tokens: Ints) -> int:
    """Write the tokens that a mask allows to `tokens`. Returns how many there are, at most one more than fit."""
    count = 0
    for place in range(len(words)):
        if words[place] != 0:
            for bit in range(32):
                if (words[place] >> bit) & 1:
                    if count == len(tokens):
                        return count + 1
                    tokens[count] = 32 * place + bit
                    count += 1
    return count


class _Places(NamedTuple):
    """Where masks are written. numpy takes longer to tell an array's address than some calls take that need it."""

    room: Ints
    address: int  # of the first
    mask_bytes: int


def _compute_in_turn(tree: MaskedRows, places: _Places, begin: float) -> float:
    """Write the masks of a tree's chains, one behind the other from its place on, and note how long that took this
    thread, whose own time was `begin` before. Returns what it is then."""
    begin_wall, first = time.perf_counter(), tree.first

    def is_late() -> bool:
        # A processor's time is never longer, and takes longer to read.
        elapsed = time.perf_counter() - begin_wall
        return elapsed > tree.most_seconds and time.thread_time() - begin > tree.most_seconds

    for chain in tree.chains:
        _compute_chain(tree, chain, places, first, is_late)
        if tree.late:
            break
        first += len(chain.rows)
    end = time.thread_time()
    tree.seconds = end - begin
    return end


def _compute_chain(tree: MaskedRows, chain: RowChain, places: _Places, first: int, is_late: Callable[[], bool]) -> None:
    """Write the masks of a chain from the `first` place on, up to one behind which the grammar forbids the next row."""
    # The row that comes next, tokens that the matcher has read, and whether it is still that of the output: what it
    # meets at the root is the output's own.
    row, read, is_output = 0, 0, not chain.rows[0]
    room, address, mask_bytes = places
    while row < len(chain.rows):
        if first + row > tree.first and is_late():
            tree.late = True
            return
        words = tree.known.get(chain.rows[row])
        if words is not None:
            room[first + row] = words
            row += 1
            continue
        forced = tree.forced.get(chain.rows[row])
        if forced is None:
            if read < row:
                if is_output:
                    chain.matcher, is_output = chain.matcher.deep_copy(), False
                if chain.matcher.try_consume_tokens(chain.token_ids[read:row]) < row - read:
                    return
                read = row
            forced = tree.text.behind(chain.matcher, chain.token_ids[row - 1] if row else chain.last)
            if forced:
                tree.forced[chain.rows[row]] = forced
            else:
                chain.matcher.unsafe_compute_mask_ptr(address + (first + row) * mask_bytes, mask_bytes)
                tree.depends_on_last[chain.rows[row]] = forced is not None
                row += 1
                if row == len(chain.rows):
                    return
        for token in forced or ():
            room[first + row, token >> 5] = _BITS[token & 31]
            tree.depends_on_last[chain.rows[row]] = True
            row += 1
            if row == len(chain.rows) or chain.token_ids[row - 1] != token:
                return


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _MOST_HELPERS), thread_name_prefix="masks")
