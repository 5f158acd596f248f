"""By which names requests may ask for a model."""

from __future__ import annotations

from collections.abc import Iterable


def answers_to(names: Iterable[str], asked: str) -> bool:
    """Whether a model that is served under these names is meant. The part of a name behind its last slash is enough: a
    folder's path or a hub id is what an operator types, and seldom what a client is configured with."""
    return any(asked in (name, name.rstrip("/").rpartition("/")[2]) for name in names)
