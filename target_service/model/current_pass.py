"""The pass that a thread computes, for models whose layers do not hand keyword arguments on to their attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_state = threading.local()


@contextmanager
def computing(step: Any) -> Iterator[None]:
    """Let `current_pass` return `step` during the block."""
    _state.step = step
    try:
        yield
    finally:
        _state.step = None


def current_pass() -> Any | None:
    """What every layer needs of the pass that this thread computes; None outside of one."""
    return getattr(_state, "step", None)
