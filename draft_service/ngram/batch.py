"""All sequences of a frame in one compiled call: committed tokens are inserted into own tries, and trees are grown.

A call from Python costs more than a small tree, since numba unpacks arrays one by one. So the loops read persistent
tables with one row per sequence, which refer to tries by the addresses of their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from draft_service.compiling import Numbers, Reals, compiled, inlined, pointer
from draft_service.drafters.grown import GrownTrees
from draft_service.drafters.packing import signed
from draft_service.ngram.arrays import COLUMNS, NEVER_LOG2, Tokens, insert
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.growth import TreeBounds, grow
from draft_service.ngram.prediction import UNIT, Evidence, Trie
from draft_service.ngram.trie import NgramTrie
from outrider.wire.frames import TreeLimits

Table = npt.NDArray[np.int64]

# Most fresh tokens that one call inserts for one sequence. More are inserted when they arrive.
ROOM = 64
# Columns of a trie's row: addresses and lengths of its arrays.
ROWS, ROWS_LENGTH, SLOTS, SLOTS_LENGTH = range(4)
# Columns of a sequence's row: first its own trie, as above; that trie's rows used; tokens in its window, and in all;
# bounds of its tree (0 nodes: none is grown here); whether candidates draw, with which seed.
USED, KNOWN, LENGTH, NODES, DEPTH, COUPLED, SEED = range(4, 11)
COLUMNS_OF_SEQUENCE = 11

Asked = tuple[int, int, int, int]


@inlined
def _trie_at(tries: Table, number: int) -> Trie:
    """The arrays of a trie, whose owner must keep them alive."""
    at = tries[number]
    rows = numba.carray(pointer(at[ROWS]), (at[ROWS_LENGTH], COLUMNS), np.int32)
    return rows, numba.carray(pointer(at[SLOTS]), at[SLOTS_LENGTH], np.int64)


@compiled
def learn_and_grow(
    tries: Table,
    asked: Table,
    fresh: Tokens,
    table: Table,
    windows: Tokens,
    powers: Reals,
    evidence: Evidence,
    floor: float,
    breadth: int,
    trees: Numbers,
    scores: Reals,
    rows: Table,
) -> None:
    """Insert the fresh tokens, then grow the trees.

    Args:
        tries: [t, 4] addresses; the caller keeps the arrays alive and holds the locks.
        asked: [n, 4], for each tree its sequence's place, where the tenant's and the shared trie stand in `tries`,
            and how many of `fresh` are its.
        fresh: [f] committed tokens, tree by tree.
        table: [places, 11], `USED`, `KNOWN` and `LENGTH` are brought up to date.
        windows: [places, longest + ROOM], the last tokens up to column `longest`, and room for fresh ones.
        powers: [places], exponents of draws.
        floor, breadth: see `TreeBounds`.
        trees: [n, 2, 1 + nodes] tokens and parents, filled.
        scores: [n, 1 + nodes], filled likewise.
        rows: [n, 2], filled: rows of the tree, and of the own trie.
    """
    longest, begin = windows.shape[1] - ROOM, 0
    for i in range(len(asked)):
        place = asked[i, 0]
        row, window = table[place], windows[place]
        own = _trie_at(table, place)
        count, known = asked[i, 3], row[KNOWN]
        if count > 0:
            window[longest : longest + count] = fresh[begin : begin + count]
            begin += count
            before, new = window[longest - known : longest], window[longest : longest + count]
            row[USED] = insert(own[0], own[1], row[USED], before, new, longest + 1, UNIT, NEVER_LOG2)
            for k in range(longest):
                window[k] = window[k + count]
            row[KNOWN], row[LENGTH] = min(longest, known + count), row[LENGTH] + count
        rows[i, 0], rows[i, 1] = 1, row[USED]
        trees[i, 0, 0], trees[i, 1, 0], scores[i, 0] = window[longest - 1], 0, 1.0
        if row[NODES] > 0:
            shape = TreeBounds(row[NODES], row[DEPTH], breadth, floor, row[COUPLED] != 0, powers[place])
            three = own, _trie_at(tries, asked[i, 1]), _trie_at(tries, asked[i, 2])
            context = window[longest - row[KNOWN] : longest]
            seed, position = np.uint64(row[SEED]), np.uint64(row[LENGTH])
            rows[i, 0] = grow(three, context, evidence, shape, seed, position, trees[i], scores[i])


class TrieBatch:
    """The tables of all followed sequences. One thread at a time."""

    def __init__(self, config: TrieConfig, evidence: Evidence) -> None:
        self._evidence = evidence
        self._bounds = float(config.min_score), config.breadth
        self._longest = config.max_match
        self._free: list[int] = []
        self._table: Table = np.zeros((0, COLUMNS_OF_SEQUENCE), np.int64)
        self._windows: Tokens = np.zeros((0, self._longest + ROOM), np.int32)
        self._powers: Reals = np.zeros(0)
        self._rows = 1 + config.num_draft_tokens
        self._trees: Numbers = np.empty((0, 2, self._rows), np.int32)
        self._scores: Reals = np.empty((0, self._rows), np.float64)
        # Addresses of the tries of the last call, which are often the same again.
        self._last: tuple[list[tuple[int, int, int, int]], Table] = [], np.zeros((0, 4), np.int64)

    def add_sequence(
        self, own: NgramTrie, token_ids: Sequence[int], limits: TreeLimits, power: float | None, seed: int
    ) -> int:
        """Add a sequence; returns its place. A `power` of None draws nothing; with 0 nodes no trees are grown here."""
        if not self._free:
            self._widen()
        place = self._free.pop()
        nodes = min(limits.max_nodes, self._rows - 1)
        self._table[place, NODES:] = nodes, limits.max_depth, power is not None, signed(seed)
        self._powers[place] = 1.0 if power is None else power
        self.restart(place, own, token_ids)
        return place

    def remove_sequence(self, place: int) -> None:
        self._free.append(place)

    def moved(self, place: int, own: NgramTrie) -> None:
        """The own trie has new arrays."""
        self._table[place, : USED + 1] = *own.address, own.used

    def restart(self, place: int, own: NgramTrie, token_ids: Sequence[int]) -> None:
        """All of `token_ids` are in the own trie."""
        recent = token_ids[-self._longest :]
        self._windows[place, self._longest - len(recent) : self._longest] = recent
        self._table[place, KNOWN : LENGTH + 1] = len(recent), len(token_ids)
        self.moved(place, own)

    def grow(self, tries: Sequence[NgramTrie], asked: Sequence[Asked], fresh: Sequence[int]) -> GrownTrees:
        """Insert the fresh tokens of these sequences, and grow their trees, which the next call overwrites. Column 1 of
        their `sizes` has the rows that the own trie now uses. For the arguments see `learn_and_grow`; a tree has at
        most `ROOM` of the fresh tokens.

        The caller holds the locks of `tries`, which another thread inserts into, and has made room in the own tries.
        """
        count = len(asked)
        if count > len(self._trees):
            self._trees = np.empty((count, 2, self._rows), np.int32)
            self._scores = np.empty((count, self._rows), np.float64)
        rows: Table = np.empty((count, 2), np.int64)
        addresses = [trie.address for trie in tries]
        if addresses != self._last[0]:
            self._last = addresses, np.array(addresses, np.int64)
        learn_and_grow(
            self._last[1],
            np.array(asked, np.int64),
            np.array(fresh, np.int32),
            self._table,
            self._windows,
            self._powers,
            self._evidence,
            *self._bounds,
            self._trees,
            self._scores,
            rows,
        )
        return GrownTrees(self._trees[:count], self._scores[:count], rows)

    def _widen(self) -> None:
        before = len(self._table)
        places = max(16, 2 * before)
        self._free.extend(range(places - 1, before - 1, -1))
        # New rows repeat the others until `enter` writes them.
        self._table = np.resize(self._table, (places, COLUMNS_OF_SEQUENCE))
        self._windows = np.resize(self._windows, (places, self._longest + ROOM))
        self._powers = np.resize(self._powers, places)
