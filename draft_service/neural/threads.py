"""Where PyTorch computes: in which threads of a CPU, and on which of several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def in_passing_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that ends with it; raises what it does.

    OpenMP keeps a team of workers for every thread that ever computed, and once the teams together have more workers
    than there are cores, each operation pays for waking them. A drafter starts in another thread than it drafts in, so
    it loads and warms up in one that takes its team along.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as pool:
        pool.submit(work).result()


def launching_on(device: str) -> AbstractContextManager[object]:
    """Kernels that are launched meanwhile run where the drafter's tensors are, which need not be where the rest of the
    process has its own: a draft may share the target's process and not its GPU."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


@contextmanager
def on_stream_of_its_own(device: str) -> Iterator[None]:
    """What this thread launches on a GPU meanwhile waits for nothing that other threads launched. Streams of PyTorch's
    have the lowest priority unless another is asked for."""
    if not device.startswith("cuda"):
        yield
        return
    with launching_on(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
