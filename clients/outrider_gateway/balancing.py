"""Which target takes a request: rendezvous hashing with bounded load.

A tenant's requests go to the target that ranks first for it, where its trie and its prefixes are warm, unless that one
has more than its share of the load; then to the second, and so on. A target that comes or goes moves only the tenants
that ranked it first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping


def ranked(key: str, addresses: Iterable[str]) -> list[str]:
    """The addresses in the order in which `key` prefers them: the same in every gateway."""

    def score(address: str) -> bytes:
        return hashlib.blake2b(f"{key}\0{address}".encode(), digest_size=16).digest()

    return sorted(addresses, key=score, reverse=True)


def choose(key: str, loads: Mapping[str, int], bound: float) -> str:
    """The first that `key` prefers of those with less than `bound` times the mean load, the new request included.
    `loads` has at least one entry. The least loaded is never above the mean, so one is always found."""
    if len(loads) == 1:
        return next(iter(loads))
    capacity = math.ceil(bound * (sum(loads.values()) + 1) / len(loads))
    return next(address for address in ranked(key, loads) if loads[address] < capacity)
