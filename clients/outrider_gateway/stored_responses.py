"""Responses that are kept for `previous_response_id` and for GET: a bounded memory of the gateway, by tenant."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from outrider_client.messages import ChatTurn

# Part of all bytes that one tenant may have. Chosen, as the shares of admission are.
_TENANT_PART = 4


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the conversation up to its end, without instructions."""

    body: bytes
    turns: tuple[ChatTurn, ...]

    @property
    def size(self) -> int:
        """Bytes that it is counted as."""
        texts = sum(len(turn.content) + len(turn.reasoning) for turn in self.turns)
        calls = sum(len(call.arguments) for turn in self.turns for call in turn.tool_calls)
        # Of a response and each of its turns, beside their text. Chosen: about what Python takes for them.
        return len(self.body) + texts + calls + 512 * (1 + len(self.turns))


class StoredResponses:
    """The latest responses. Belongs to the event loop; its methods wait for nothing, and are coroutines because another
    process's are."""

    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Up to `most_bytes` of all tenants, a quarter of them of one, each for so many seconds. `clock` returns
        monotonic seconds."""
        self._most, self._seconds, self._clock = most_bytes, seconds, clock
        # By tenant and id, the oldest first, with the time until which it is kept.
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, float]] = OrderedDict()
        self._bytes: dict[str, int] = {}

    @property
    def kept_bytes(self) -> int:
        return sum(self._bytes.values())

    async def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Keep a response. False for one that is too large; the oldest ones make room for others."""
        self._expire()
        if response.size > self._most // _TENANT_PART:
            return False
        self._kept[tenant, response_id] = response, self._clock() + self._seconds
        self._bytes[tenant] = self._bytes.get(tenant, 0) + response.size
        while self._bytes[tenant] > self._most // _TENANT_PART:
            self._drop_oldest(tenant)
        while self.kept_bytes > self._most:
            # Of the tenant that has most, so that nobody pushes out others.
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))
        return True

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A tenant's own response; None for any other, and for one that is kept no longer."""
        self._expire()
        found = self._kept.get((tenant, response_id))
        return None if found is None else found[0]

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was such a response."""
        self._expire()
        return self._drop((tenant, response_id))

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._kept[oldest][1] > now:
                return
            self._drop(oldest)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(next(key for key in self._kept if key[0] == tenant))

    def _drop(self, key: tuple[str, str]) -> bool:
        found = self._kept.pop(key, None)
        if found is None:
            return False
        self._bytes[key[0]] -= found[0].size
        if not self._bytes[key[0]]:
            del self._bytes[key[0]]
        return True
