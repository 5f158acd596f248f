"""Counts of places that several processes see as one: each writes those of its own holders, and reads all.

So a limit is one decision, and what a process held is given back by clearing its region when it has died.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

from outrider_gateway.workers.shared_memory import SharedMemory

# Words of an entry: a holder's key and its places. Of a region: what is taken in all.
_ENTRY, _HEAD = 2, 1


def region_words(most_holders: int) -> int:
    """Words of one process's region with so many holders at most."""
    return _HEAD + _ENTRY * _entries(most_holders)


def _entries(most_holders: int) -> int:
    """A power of two, at most half of which is in use, so that searches are short."""
    return 1 << (2 * most_holders).bit_length()


class SharedCounts:
    """`outrider.admission.shares.HolderCounts` of several processes.

    A region is a hash table with linear probing. Keys are hashes of 64 bits with a secret, so that nobody can choose
    names that are counted as one; by chance two of a thousand holders are in one of 10^13 gateways.
    """

    def __init__(self, memory: SharedMemory, workers: int, own: int | None, most_holders: int, secret: bytes) -> None:
        """`own` is the region that this process writes, of `workers`; None writes none. `most_holders` bounds those of
        one process."""
        self._own, self._workers, self._secret = own, workers, secret
        self._mask = _entries(most_holders) - 1
        self._region = region_words(most_holders)
        self._part = memory.part(workers * self._region)
        self._words = self._part.integers

    @property
    def taken(self) -> int:
        return sum(self._words[worker * self._region] for worker in range(self._workers))

    def exclusive(self) -> AbstractContextManager[None]:
        return self._part.locked()

    def held(self, kind: str, name: str) -> int:
        key = self._key(kind, name)
        return sum(self._held_by(worker, key) for worker in range(self._workers))

    def most_held_by(self, kind: str, name: str) -> tuple[int, int]:
        """The process that has most of a holder's places, and how many."""
        key = self._key(kind, name)
        return max(((worker, self._held_by(worker, key)) for worker in range(self._workers)), key=lambda one: one[1])

    def taken_by(self, worker: int) -> int:
        """Places that one process has taken."""
        return self._words[worker * self._region]

    def add(self, count: int, holders: Mapping[str, str]) -> None:
        """See `HolderCounts.add`. Raises `ValueError` for more holders than there is room for."""
        assert self._own is not None, "this process has no places"
        self._words[self._own * self._region] += count
        for kind, name in holders.items():
            at = self._find(self._own, key := self._key(kind, name))
            if not self._words[at]:
                self._words[at], self._words[at + 1] = key, 0
            self._words[at + 1] += count
            if not self._words[at + 1]:
                self._remove(at)

    def clear(self, worker: int) -> None:
        """Give back all that a process held, once it has ended."""
        with self.exclusive():
            begin = worker * self._region
            for place in range(begin, begin + self._region):
                self._words[place] = 0

    def _key(self, kind: str, name: str) -> int:
        """Never 0, which marks a free entry."""
        digest = hashlib.blake2b(f"{kind}\0{name}".encode(), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "big", signed=True) or 1

    def _held_by(self, worker: int, key: int) -> int:
        at = self._find(worker, key)
        return self._words[at + 1] if self._words[at] else 0

    def _find(self, worker: int, key: int) -> int:
        """Where a region has a key, or would have it."""
        table = worker * self._region + _HEAD
        entry = key & self._mask
        for _ in range(self._mask + 1):
            at = table + _ENTRY * entry
            if self._words[at] in (key, 0):
                return at
            entry = entry + 1 & self._mask
        raise ValueError("more holders than there is room for")

    def _remove(self, at: int) -> None:
        """Free an entry, and move those behind it that were pushed past it."""
        assert self._own is not None
        table = self._own * self._region + _HEAD
        free = (at - table) // _ENTRY
        entry = free
        while True:
            entry = entry + 1 & self._mask
            other = table + _ENTRY * entry
            key = self._words[other]
            if not key:
                break
            # Whether it may stand where the free entry is: its own place is not between that and here.
            if (entry - key & self._mask) >= (entry - free & self._mask):
                target = table + _ENTRY * free
                self._words[target], self._words[target + 1] = key, self._words[other + 1]
                free = entry
        self._words[table + _ENTRY * free] = 0
        self._words[table + _ENTRY * free + 1] = 0
