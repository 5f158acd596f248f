"""Where PyTorch may compute on a CPU without slowing itself down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_passing_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that ends with it; raises what it does.

    OpenMP keeps a team of workers for every thread that ever computed, and once the teams together have more workers
    than there are cores, each operation pays for waking them. A drafter starts in another thread than it drafts in, so
    it loads and warms up in one that takes its team along.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as pool:
        pool.submit(work).result()
