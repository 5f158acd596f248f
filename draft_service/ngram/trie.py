"""The n-gram trie: flat arrays that grow, and evict the least useful rows once they are full."""

from __future__ import annotations

import sys
import threading

import numpy as np

from draft_service.ngram.arrays import (
    COLUMNS,
    HALF_LIFE_LOG2,
    MAX_CLOCK,
    ROOT,
    SEEN,
    Rows,
    Slots,
    Tokens,
    insert,
    set_clock_back,
)
from draft_service.ngram.eviction import copy_survivors, enter_all, slots_for, sound, survivors

# A full trie is cut to this share, so that cuts are rare.
_KEEP_SHARE = 0.75
_EMPTY = np.zeros(0, dtype=np.int32)


class NgramTrie:
    """Every window of at most `depth` tokens of what was inserted, with counts that halve every half-life.

    `address` has the addresses and lengths of `rows` and `slots`, for loops over many tries; valid as long as
    `arrays()`. One thread inserts; any thread reads `arrays()` while it holds `lock`. Growing and cutting happen on
    fresh arrays outside the lock, so a reader waits for one chunk of insertion at most.
    """

    def __init__(self, depth: int, capacity: int, half_life_log2: int = HALF_LIFE_LOG2, first_rows: int = 256) -> None:
        """`capacity`: most nodes (rows) held; `half_life_log2`: of the tokens inserted until counts halve."""
        if not 2 <= depth <= 64:
            raise ValueError(f"depth must be 2..64, is {depth}")
        if capacity < 2 * depth:
            raise ValueError(f"capacity must be at least {2 * depth} nodes, is {capacity}")
        self.depth = depth
        self.capacity = capacity
        self.half_life_log2 = half_life_log2
        self.lock = threading.Lock()
        self.evictions = 0
        self.used = 1
        # Tokens inserted per hold of the lock: readers wait for about a quarter of a millisecond at most. Four pieces
        # at least between two cuts, however small the trie.
        self._chunk = min(128, max(1, (capacity - 1) // (4 * depth)))
        rows = min(max(first_rows, 2 * depth), capacity)
        self._use(np.zeros((rows, COLUMNS), dtype=np.int32), np.zeros(slots_for(rows), dtype=np.int64))

    def _use(self, rows: Rows, slots: Slots) -> None:
        self.rows, self.slots = rows, slots
        self.address = (_address(rows), len(rows), _address(slots), len(slots))

    @property
    def nodes(self) -> int:
        """Nodes below the root."""
        return self.used - 1

    @property
    def tokens(self) -> int:
        """The clock: tokens inserted, but for what it was set back by."""
        return int(self.rows[ROOT, SEEN])

    @property
    def bytes(self) -> int:
        return self.rows.nbytes + self.slots.nbytes

    def arrays(self) -> tuple[Rows, Slots]:
        """The arrays. Valid while `lock` is held, or for good once nothing is inserted any more."""
        return self.rows, self.slots

    def insert(
        self, token_ids: Tokens, context: Tokens = _EMPTY, weight: int = 1, most_nodes: int = sys.maxsize
    ) -> tuple[int, int]:
        """Count every window that ends in `token_ids` with a `weight` for one occurrence. They follow `context`, which
        was inserted before; its last `depth - 1` tokens are used. Evicts when full. Stops before more than `most_nodes`
        are made. Returns tokens inserted, nodes made."""
        done, made, depth = 0, 0, self.depth
        while done < len(token_ids):
            size = min(self._chunk, len(token_ids) - done, (most_nodes - made) // depth)
            if size <= 0:
                break
            before = token_ids[:done] if done >= depth else np.concatenate((context, token_ids[:done]))
            before = np.ascontiguousarray(before[-(depth - 1) :], dtype=np.int32)
            piece = token_ids[done : done + size]
            self.make_room(size * depth)
            if self.tokens > MAX_CLOCK:
                self._set_clock_back()
            with self.lock:
                used = insert(self.rows, self.slots, self.used, before, piece, depth, weight, self.half_life_log2)
                made, self.used = made + used - self.used, used
            done += size
        return done, made

    def make_room(self, wanted: int) -> None:
        """Make `wanted` rows free, by growing or evicting. Only for the thread that inserts."""
        if self.used + wanted <= len(self.rows):
            return
        if self.used + wanted > self.capacity:
            self.evict(min(int(self.capacity * _KEEP_SHARE), self.capacity - wanted))
        if self.used + wanted > len(self.rows):
            self._grow(min(self.capacity, max(self.used + wanted, 2 * len(self.rows))))

    def _grow(self, capacity: int) -> None:
        rows: Rows = np.zeros((capacity, COLUMNS), dtype=np.int32)
        rows[: self.used] = self.rows[: self.used]
        slots: Slots = np.zeros(slots_for(capacity), dtype=np.int64)
        enter_all(rows, slots, self.used)
        with self.lock:
            self._use(rows, slots)

    def _set_clock_back(self) -> None:
        rows = self.rows.copy()
        set_clock_back(rows, self.used, self.half_life_log2)
        with self.lock:
            self._use(rows, self.slots)

    def evict(self, target: int) -> None:
        """Keep at most `target` rows, the most useful: seen most, counted with decay, and most recently."""
        numbers, kept = survivors(self.rows, self.used, max(1, target), self.half_life_log2)
        rows: Rows = np.zeros_like(self.rows)
        slots: Slots = np.zeros_like(self.slots)
        copy_survivors(self.rows, self.used, numbers, rows, slots)
        with self.lock:
            self._use(rows, slots)
            self.used = kept
            self.evictions += 1

    @classmethod
    def restored(cls, rows: Rows, depth: int, capacity: int, half_life_log2: int) -> NgramTrie:
        """A trie from the used rows of another, cut if they are more than `capacity`. Raises `ValueError` unless they
        are sound."""
        if rows.dtype != np.int32 or rows.ndim != 2 or rows.shape[1] != COLUMNS or not len(rows):
            raise ValueError(f"rows must be int32 [1.., {COLUMNS}], are {rows.dtype} {rows.shape}")
        trie = cls(depth, max(capacity, len(rows)), half_life_log2, first_rows=len(rows))
        if not sound(np.ascontiguousarray(rows)):
            raise ValueError("rows do not form a trie")
        trie.used = len(rows)
        trie.rows[: len(rows)] = rows
        enter_all(trie.rows, trie.slots, trie.used)
        if len(rows) > capacity:
            trie.evict(int(capacity * _KEEP_SHARE))
            return cls.restored(trie.rows[: trie.used], depth, capacity, half_life_log2)
        return trie


def _address(array: Rows | Slots) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
