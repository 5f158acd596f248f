"""Times of refusals that several processes see as one, so that a caller's pace is the same whichever refuses it."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager

from outrider_gateway.workers.shared_memory import SharedMemory

# Tenants and peers that are refused at the same time. With more, those that may soonest be refused at once again are
# forgotten. Chosen: as many as callers are remembered.
_ENTRIES, _WAYS = 4096, 8
# A key and a time.
_ENTRY = 2
TABLE_WORDS = _ENTRY * _ENTRIES


class SharedRefusalTimes:
    """`outrider.admission.pacing.RefusalTimes` of several processes: a table of `_ENTRIES`, in which a key has one of
    `_WAYS` places. Monotonic time is the same in all processes of a machine."""

    def __init__(self, memory: SharedMemory, secret: bytes) -> None:
        """`secret` keeps callers from choosing names that are counted as one."""
        self._part = memory.part(TABLE_WORDS)
        self._secret = secret

    def exclusive(self) -> AbstractContextManager[None]:
        return self._part.locked()

    def get(self, tenant: str, now: float) -> float:
        at = self._place(self._key(tenant))
        return now if at is None else max(self._part.reals[at + 1], now)

    def put(self, tenant: str, sent_by: float) -> None:
        key = self._key(tenant)
        at = self._place(key)
        if at is None:
            at = min(self._places(key), key=lambda place: self._part.reals[place + 1])
        self._part.integers[at], self._part.reals[at + 1] = key, sent_by

    def _key(self, tenant: str) -> int:
        digest = hashlib.blake2b(tenant.encode(), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _place(self, key: int) -> int | None:
        return next((at for at in self._places(key) if self._part.integers[at] == key), None)

    @staticmethod
    def _places(key: int) -> range:
        first = _ENTRY * (key % (_ENTRIES // _WAYS)) * _WAYS
        return range(first, first + _ENTRY * _WAYS, _ENTRY)
