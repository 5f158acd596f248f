"""Memory that a gateway's processes share, with a lock for each part of it.

A lock is one on a byte of the file behind the memory, which the kernel frees when its holder dies, in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

# Of the 64-bit words that processors write at once.
WORD_BYTES = 8


@dataclass(eq=False)
class SharedMemory:
    """Memory of a file without a name. Parts are taken in the same order and sizes by every process."""

    descriptor: int
    size: int
    _map: mmap.mmap = field(init=False, repr=False)
    _taken: int = 0

    def __post_init__(self) -> None:
        self._map = mmap.mmap(self.descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Memory of zeros for this process, and for those that get its descriptor."""
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), size)
            return cls(os.dup(file.fileno()), size)

    def part(self, words: int) -> SharedPart:
        """The next so many words. Raises `ValueError` where there are not so many."""
        begin, self._taken = self._taken, self._taken + words * WORD_BYTES
        if self._taken > self.size:
            raise ValueError(f"{self._taken} bytes of {self.size} are wanted")
        return SharedPart(self.descriptor, memoryview(self._map)[begin : self._taken], begin)


class SharedPart:
    """Some words of shared memory, and their lock, which excludes other processes and not other threads."""

    def __init__(self, descriptor: int, view: memoryview, begin: int) -> None:
        self._descriptor, self._begin = descriptor, begin
        # Of 64 bits: whole numbers, and numbers.
        self.integers, self.reals = view.cast("q"), view.cast("d")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other processes while the block runs. For microseconds of work: they wait for it."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._begin)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._begin)
