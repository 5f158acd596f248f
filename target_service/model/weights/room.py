"""Memory of the host in which new weights wait: page-locked where a GPU takes them, and given back afterwards.

A GPU fetches page-locked memory itself, at its link's full speed, while the driver moves pageable memory through a
buffer of its own, as fast as one core can. Locking takes a while, so it is done beside running steps.

The memory is of as many bytes as the weights, and is not kept from one exchange to the next: it would be as much of the
host's memory as the model's size, out of reach of everything else, for an exchange that may never come.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

log = logging.getLogger(__name__)
# Locked, copied and given back at a time. The driver may make launches wait while it locks or unlocks, and Python's
# other threads wait while pages are given back. At this size no step waited noticeably for either: 14.4 GB took 0.27 s
# to be copied, and the longest time between two steps was 0.31 to 0.33 s
# (benchmarks/results/2026-11-24-h200-weights.json). Other sizes were not tried.
PIECE = 64 << 20
# Of a tensor's first byte, as PyTorch has it.
_ALIGNMENT = 64


class HostRoom:
    """Room for the tensors of one exchange. Belongs to one thread at a time, `reserve` first.

    Weights of a CPU are put into plain memory, a piece for each tensor, and the room does nothing more for them.
    """

    def __init__(self, device: torch.device) -> None:
        """For weights that go to `device`."""
        self._device = device
        self._memory: mmap.mmap | None = None
        self._begin = 0
        self._size = 0
        self._used = 0
        self._locked: list[int] = []

    @property
    def locked_bytes(self) -> int:
        """Of the room's, those that are page-locked."""
        return sum(min(PIECE, self._used - offset) for offset in self._locked)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take addresses for tensors of `sizes` bytes; memory comes as they are filled.

        Raises:
            MemoryError: the system has none.
        """
        if self._device.type != "cuda":
            return
        self._size = sum(map(_aligned, sizes))
        try:
            # One piece more, to begin at a whole one.
            memory = mmap.mmap(-1, self._size + PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {self._size} bytes of weights: {error.strerror}") from None
        # Where the system has large pages, there are fewer to fill, to lock and to give back.
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            log.debug("weights wait in small pages")
        self._memory, self._begin = memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PIECE

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for a tensor, which says nothing yet. It is valid until `release`."""
        if self._memory is None:
            return torch.empty(shape, dtype=dtype)
        size, offset = prod(shape) * dtype.itemsize, self._used
        if not size:
            return torch.empty(shape, dtype=dtype)
        self._used += _aligned(size)
        assert self._used <= self._size, "more is taken than was reserved"
        place = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._begin + offset)
        return place.view(dtype).view(shape)

    def lock(self) -> None:
        """Page-lock what was taken. Once it is filled: pages that are there are locked sooner. What the system does not
        lock stays as it is, and is copied as correctly and more slowly."""
        for offset, address, size in self._pieces():
            try:
                _page_lock(self._device, address, size)
            except RuntimeError as error:
                left = self._used - offset
                log.warning("%d of %d bytes of weights are not page-locked: %s", left, self._used, error)
                return
            self._locked.append(offset)

    def release(self) -> None:
        """Give the memory back, in a thread of its own: for much of it that takes a while. Nobody may read what lies
        there any more."""
        pieces = list(self._pieces())
        memory, self._memory = self._memory, None
        if memory is not None:
            threading.Thread(target=self._release, args=(memory, pieces), name="weights-release", daemon=True).start()

    def _release(self, memory: mmap.mmap, pieces: Sequence[tuple[int, int, int]]) -> None:
        locked = set(self._locked)
        for offset, address, size in pieces:
            if offset in locked:
                _page_unlock(self._device, address)
            memory.madvise(mmap.MADV_DONTNEED, self._begin + offset, size)
        self._locked.clear()

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Of what was taken: how far into it each piece begins, at which address, and its bytes."""
        if self._memory is None or not self._used:
            return
        first = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() + self._begin
        for offset in range(0, self._used, PIECE):
            yield offset, first + offset, min(PIECE, self._used - offset)


def copy_in_pieces(memory: Tensor, source: Tensor) -> None:
    """Copy `source` into `memory`, of the same shape and type, without waiting for a device: `source` has to stay until
    that is done. No copy reaches across a room's pieces: each is locked by itself, and the driver may refuse one that
    takes from several."""
    if not memory.is_contiguous():
        # Some other way than straight there; from memory that no piece ends in.
        memory.copy_(source.clone())
        return
    into, values, size = memory.view(-1), source.view(-1), source.element_size()
    begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
    while begin < end:
        until = min(end, (begin // PIECE + 1) * PIECE)
        part = slice((begin - source.data_ptr()) // size, (until - source.data_ptr()) // size)
        into[part].copy_(values[part], non_blocking=True)
        begin = until


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_lock(device: torch.device, address: int, size: int) -> None:
    """Raise `RuntimeError` where the system does not allow it."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # A thread's device is the first until it is told another.
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(address, size, 0))
    if status:
        raise RuntimeError(f"CUDA error {status}")


def _page_unlock(device: torch.device, address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        status = int(runtime.cudaHostUnregister(address))
    if status:
        log.warning("memory of weights stays page-locked: CUDA error %d", status)
