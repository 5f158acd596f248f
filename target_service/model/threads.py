"""Where PyTorch may compute on a CPU without slowing itself down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that ends with it; returns or raises what it does.

    OpenMP keeps a team of workers for every thread that ever computed. Once the teams together have more workers than
    there are cores, none spins between operations any more, and each operation pays for waking them: on two cores a
    one-row step of SmolLM2-135M takes 50 ms instead of 28. A thread that ends takes its team along, so that the
    engine's stays the only one.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as pool:
        return pool.submit(work).result()
