"""Places for which many compete: whoever holds most of them leaves some for others, however many hold as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from outrider.errors import QuotaExceeded

# One tenant's factor: alone it takes three quarters of all places, two of them three sevenths each, and so on. Chosen.
TENANT_FACTOR = 3
# One peer's: alone seven eighths, since a proxy is the peer of everybody behind it. Chosen.
PEER_FACTOR = 7


class HolderCounts(Protocol):
    """How many places each holder has, by kind and name, and how many are taken in all."""

    @property
    def taken(self) -> int: ...

    def exclusive(self) -> AbstractContextManager[object]:
        """While the block runs, nobody else changes a count."""

    def held(self, kind: str, name: str) -> int: ...

    def add(self, count: int, holders: Mapping[str, str]) -> None:
        """Count so many more places of these holders, one of each kind; fewer if it is negative."""


class OwnCounts:
    """The counts of one thread. A holder without places takes no memory."""

    def __init__(self) -> None:
        self.taken = 0
        self._held: Counter[tuple[str, str]] = Counter()

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def held(self, kind: str, name: str) -> int:
        return self._held[kind, name]

    def add(self, count: int, holders: Mapping[str, str]) -> None:
        self.taken += count
        for holder in holders.items():
            self._held[holder] += count
            if not self._held[holder]:
                del self._held[holder]


class Shares:
    """`total` places, of which a holder takes further ones while it has at most `factor` times as many as are free.

    The rule is that of shared buffers in switches: dynamic thresholds (Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998). A lone holder gets factor / (1 + factor) of the places. Of n holders each comes to
    factor / (1 + n * factor) as places are given back, and a factor-th of that stays free. Holders are of kinds, such
    as tenant and peer; one use may be held by one of each kind.
    """

    def __init__(self, what: str, total: int, factors: Mapping[str, int], counts: HolderCounts | None = None) -> None:
        """`what` the places are for, in the plural, for messages. `factors` are by the kind of holder. `counts` are
        those of this object alone where they are not given."""
        self.total = total
        self._what = what
        self._factors = factors
        self._counts: HolderCounts = OwnCounts() if counts is None else counts

    @property
    def taken(self) -> int:
        return self._counts.taken

    def held(self, kind: str, name: str) -> int:
        """Places of one holder."""
        return self._counts.held(kind, name)

    def reserve(self, count: int = 1, **holders: str) -> None:
        """Take places for these holders, by kind. Raises `QuotaExceeded`, and takes nothing then."""
        with self._counts.exclusive():
            if (refused := self._refusal(count, holders)) is not None:
                raise QuotaExceeded(refused, limit=self.total)
            self._counts.add(count, holders)

    def has_room(self, count: int = 1, **holders: str) -> bool:
        """Whether these holders could take places now."""
        return self._refusal(count, holders) is None

    def give_back(self, count: int = 1, **holders: str) -> None:
        """Give back what the same holders took."""
        with self._counts.exclusive():
            self._counts.add(-count, holders)

    def _refusal(self, count: int, holders: Mapping[str, str]) -> str | None:
        """Why these holders get no places, if they do not."""
        free = self.total - self._counts.taken
        if count > free:
            return f"too many {self._what} at once"
        for kind, name in holders.items():
            if self._counts.held(kind, name) + count > self._factors[kind] * free:
                return f"too many {self._what} of this {kind} at once"
        return None

    @contextmanager
    def using(self, count: int = 1, **holders: str) -> Iterator[None]:
        """Hold places while the block runs. Raises `QuotaExceeded` on entry."""
        self.reserve(count, **holders)
        try:
            yield
        finally:
            self.give_back(count, **holders)
