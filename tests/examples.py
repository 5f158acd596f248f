"""How many examples a property is tried with."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(number: int, **others: Any) -> settings:
    """`number` of them in `make test-full`, which draws others each time; in `make test`, whose are always the same,
    a quarter as many."""
    return settings(max_examples=number // 4 if settings.default.derandomize else number, **others)
