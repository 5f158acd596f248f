"""The device and the stream on which PyTorch launches kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def drafting_stream(device: torch.device | str) -> torch.cuda.Stream:
    """A stream of this GPU for a drafter's kernels, and for the capture of graphs of them.

    Its priority is above that of a target's streams. On a GPU that they share, a drafter's blocks are then placed
    before the waiting ones of a pass. A tree is many small kernels one after the other: on an H100 trees
    came 5.0 ms after their commits with a target's priority, and 3.5 ms with this one
    (`benchmarks/results/2026-11-25-h100-widened-thirteenth.md`). In another process this needs MPS.
    """
    # Any above 0, which streams have by default; PyTorch takes -1 on every GPU.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextmanager
def launching_on(device: str) -> Iterator[None]:
    """Launch this thread's kernels on this device in the block, on the `drafting_stream` that all drafters of it share.
    The device may differ from the process's default one: a draft may share the target's process and not its GPU."""
    if not device.startswith("cuda"):
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_shared_stream(device)):
        yield


_shared_stream = cache(drafting_stream)
