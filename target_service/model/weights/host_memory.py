"""Host memory for new weights: page-locked where they go to a GPU, and given back afterwards.

A GPU copies page-locked memory at its link's full speed, while the driver copies pageable memory through a buffer, as
fast as one core can. Locking takes a while, so it is done while steps run.

The memory has the size of the weights, and is not kept from one exchange to the next: nothing else could use it, for an
exchange that may never come.
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
# Bytes locked, copied and given back at a time. Launches may wait while the driver locks or unlocks, and Python's other
# threads wait while pages are given back. At this size no step waited noticeably for either: copying 14.4 GB took
# 0.27 s, and the longest time between two steps was 0.31 to 0.33 s
# (benchmarks/results/2026-11-24-h200-weights.json). Other sizes were not tried.
PIECE = 64 << 20
# Bytes, of a tensor's address, as in PyTorch.
_ALIGNMENT = 64


class HostMemory:
    """Memory for the tensors of one exchange: `reserve`, `allocate`, `lock`, `release`. Used by one thread at a time.

    On a CPU, `allocate` makes a plain tensor, and the other methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is where the weights go."""
        self._device = device
        self._memory: mmap.mmap | None = None
        self._begin = 0
        self._size = 0
        self._used = 0
        self._locked: list[int] = []

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(min(PIECE, self._used - offset) for offset in self._locked)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Reserve addresses for tensors of `sizes` bytes; the system adds memory as they are filled. Raises
        `MemoryError` where the system has too little."""
        if self._device.type != "cuda":
            return
        self._size = sum(map(_aligned, sizes))
        try:
            # One piece more, for alignment to pieces.
            memory = mmap.mmap(-1, self._size + PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {self._size} bytes of weights: {error.strerror}") from None
        # There are fewer large pages to fill, to lock and to give back.
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            log.debug("weights wait in small pages")
        self._memory, self._begin = memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PIECE

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until `release`."""
        size, offset = prod(shape) * dtype.itemsize, self._used
        if self._memory is None or not size:
            return torch.empty(shape, dtype=dtype)
        self._used += _aligned(size)
        assert self._used <= self._size, "more is taken than was reserved"
        place = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._begin + offset)
        return place.view(dtype).view(shape)

    def lock(self) -> None:
        """Page-lock what was taken, once it is filled: existing pages are locked faster. What the system does not lock
        is copied more slowly."""
        for offset, address, size in self._pieces():
            try:
                _page_lock(self._device, address, size)
            except RuntimeError as error:
                left = self._used - offset
                log.warning("%d of %d bytes of weights are not page-locked: %s", left, self._used, error)
                return
            self._locked.append(offset)

    def release(self) -> None:
        """Give the memory back, in a thread, since that takes a while. Its tensors must not be read any more."""
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
        """Offset, address and bytes of each piece of what was taken."""
        if self._memory is None or not self._used:
            return
        first = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() + self._begin
        for offset in range(0, self._used, PIECE):
            yield offset, first + offset, min(PIECE, self._used - offset)


def copy_in_pieces(memory: Tensor, source: Tensor) -> None:
    """Copy `source` into `memory`, of the same shape and type, without waiting for a device; `source` has to stay until
    the copy is done. No copy crosses pieces: each is locked separately, and the driver may refuse one of several."""
    if not memory.is_contiguous():
        # PyTorch copies in steps here, and the clone is in no piece.
        memory.copy_(source.clone())
        return
    target, values, size = memory.view(-1), source.view(-1), source.element_size()
    start = begin = source.data_ptr()
    while begin < start + source.nbytes:
        end = min(start + source.nbytes, (begin // PIECE + 1) * PIECE)
        part = slice((begin - start) // size, (end - start) // size)
        target[part].copy_(values[part], non_blocking=True)
        begin = end


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _page_lock(device: torch.device, address: int, size: int) -> None:
    """Raise `RuntimeError` where the system does not allow it."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # A thread's current device is the first one until it is set.
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
