"""Launches that end at once where a number on the device is not positive: what is not worth its time is left out of a
captured graph without the host.

A kernel with `CONDITIONAL` reads `condition` once the launch before it has ended, and then does nothing. Before that it
may read it as a hint, from the L2 cache: it is up to date where a launch in between has waited for its writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_condition: ContextVar[Tensor | None] = ContextVar("condition", default=None)


@contextmanager
def launched_if_positive(condition: Tensor) -> Iterator[None]:
    """Have launches of `tree_kernels.linear` and `tree_kernels.growth` within do nothing, and leave their outputs as
    they are, where `condition` [1] int32 is not positive when they run; and Triton's attention find no work where it is
    divided within. Other launches do not ask."""
    before = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(before)


def conditional_launch(other: Tensor) -> dict[str, Any]:
    """Arguments of a kernel's launch: the condition, for which `other` stands in where there is none."""
    condition = _condition.get()
    return {"condition": other if condition is None else condition, "CONDITIONAL": condition is not None}
