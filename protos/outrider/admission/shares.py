"""Places for which many compete: whoever holds most of them leaves some for others, however many hold as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from outrider.errors import QuotaExceeded

# One tenant's factor: alone it takes three quarters of all places, two of them three sevenths each, and so on. Chosen.
TENANT_FACTOR = 3
# One peer's: alone seven eighths, since a proxy is the peer of everybody behind it. Chosen.
PEER_FACTOR = 7


class Shares:
    """`total` places, of which a holder takes further ones while it has at most `factor` times as many as are free.

    The rule is that of shared buffers in switches: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998). A lone holder gets factor / (1 + factor) of the places. Of n holders each comes to
    factor / (1 + n * factor) as places are given back, and a factor-th of that stays free. Holders are of kinds, such
    as tenant and peer; one use may be held by one of each kind. A holder without places takes no memory.
    """

    def __init__(self, what: str, total: int, factors: Mapping[str, int]) -> None:
        """`what` the places are for, in the plural, for messages. `factors` are by the kind of holder."""
        self.total = total
        self.taken = 0
        self._what = what
        self._factors = factors
        self._held: dict[str, Counter[str]] = {kind: Counter() for kind in factors}

    def held(self, kind: str, name: str) -> int:
        """Places of one holder."""
        return self._held[kind][name]

    def reserve(self, count: int = 1, **holders: str) -> None:
        """Take places for these holders, by kind. Raises `QuotaExceeded`, and takes nothing then."""
        free = self.total - self.taken
        if count > free:
            raise QuotaExceeded(f"too many {self._what} at once", limit=self.total)
        for kind, name in holders.items():
            if self._held[kind][name] + count > self._factors[kind] * free:
                raise QuotaExceeded(f"too many {self._what} of this {kind} at once", limit=self.total)
        self.taken += count
        for kind, name in holders.items():
            self._held[kind][name] += count

    def give_back(self, count: int = 1, **holders: str) -> None:
        """Give back what the same holders took."""
        self.taken -= count
        for kind, name in holders.items():
            held = self._held[kind]
            held[name] -= count
            if not held[name]:
                del held[name]

    @contextmanager
    def using(self, count: int = 1, **holders: str) -> Iterator[None]:
        """Hold places while the block runs. Raises `QuotaExceeded` on entry."""
        self.reserve(count, **holders)
        try:
            yield
        finally:
            self.give_back(count, **holders)
