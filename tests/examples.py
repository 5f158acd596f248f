"""How many examples a property is tried with."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

# What tells processes that tests start; see `is_full`.
FULL = "OUTRIDER_TESTS_FULL"


def is_full() -> bool:
    """Whether `make test-full` runs, and not `make test`."""
    return os.environ[FULL] == "1" if FULL in os.environ else not settings.default.derandomize


def examples(number: int, **others: Any) -> settings:
    """`number` of them in `make test-full`, which draws others each time; in `make test`, whose are always the same,
    a quarter as many."""
    return settings(max_examples=number if is_full() else number // 4, **others)
