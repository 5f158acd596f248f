"""Which request a row of vLLM's batch holds, known by its text alone: a proposer is given no request ids.

A request's text only grows. So the request that a row holds is the one whose text, as it was last seen, the row's text
begins with. Rows are moved when others end, requests leave the batch when they are preempted and come back into another
row, and a row is used again: none of it is announced. A wrong guess costs accepted tokens, never a wrong output.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
# Steps, and seconds, after which a request that is in no row is forgotten: it has ended, or was preempted for long. A
# request that merely found no place in a step is back in the next ones. Chosen, not measured.
ABSENT_STEPS = 8
ABSENT_SECONDS = 1.0


@dataclass(eq=False)
class TrackedRequest:
    """A request that was seen: the place, length, end and digest of its text. Its `number` is never used twice."""

    number: int
    row: int
    length: int = 0
    tail: bytes = b""
    seen_step: int = 0
    seen_at: float = 0.0
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def may_begin(self, text: Tokens) -> bool:
        """Whether `text` [length] holds this request's last tokens where they were."""
        begin = self.length - len(self.tail) // text.itemsize
        return len(text) >= self.length and text[begin : self.length].tobytes() == self.tail

    def begins(self, text: Tokens) -> bool:
        """Whether `text` [length] begins with this request's whole text."""
        digest = hashlib.blake2b(text[: self.length].data, digest_size=16).digest()
        return self.may_begin(text) and bool(digest == self._digest.digest())

    def extend(self, text: Tokens) -> None:
        """Its text is `text` [length] now, which begins with what it was."""
        self._digest.update(text[self.length :].data)
        self.length = len(text)
        # Tokens at its end by which a request is known again in its own row, without looking at the rest of its text.
        self.tail = text[-64:].tobytes()


@dataclass(frozen=True, slots=True)
class Seen:
    """A request in a row of this step, and the tokens that its text has grown by; all of them for a new request."""

    request: TrackedRequest
    fresh: Tokens


class RequestTracker:
    """Every request that is in the batch or left it a moment ago."""

    def __init__(self, max_requests: int) -> None:
        """Of requests that are in no row, as many are remembered as rows there may be: `max_requests`."""
        self._max_absent = max_requests
        self._requests: set[TrackedRequest] = set()
        self._last_number = 0
        self._step = 0

    def __len__(self) -> int:
        return len(self._requests)

    def see(self, texts: Sequence[Tokens]) -> list[Seen | None]:
        """The request of each row, by the rows' texts ([length] each, contiguous); None for a row without text."""
        self._step += 1
        # Of two that were in one row, it was the later one's.
        by_age = sorted(self._requests, key=lambda request: request.seen_step)
        unclaimed = {request.row: request for request in by_age}
        absent = [request for request in by_age if unclaimed[request.row] is not request]
        found: list[TrackedRequest | None] = []
        for row, text in enumerate(texts):
            request = unclaimed.get(row)
            found.append(unclaimed.pop(row) if request is not None and request.may_begin(text) else None)
        absent += unclaimed.values()
        return [
            self._seen(row, text, request or _found(text, absent)) if len(text) else None
            for row, (text, request) in enumerate(zip(texts, found, strict=True))
        ]

    def _seen(self, row: int, text: Tokens, request: TrackedRequest | None) -> Seen:
        if request is None:
            self._last_number += 1
            request = TrackedRequest(self._last_number, row)
            self._requests.add(request)
        fresh = text[request.length :]
        request.extend(text)
        request.row, request.seen_step, request.seen_at = row, self._step, time.monotonic()
        return Seen(request, fresh)

    def evict_absent(self) -> list[TrackedRequest]:
        """Forget the requests that have been in no row for long, or that are too many. Returns them."""
        absent = [request for request in self._requests if request.seen_step < self._step]
        absent.sort(key=lambda request: request.seen_step)
        too_many = len(absent) - self._max_absent
        evicted = [request for place, request in enumerate(absent) if place < too_many or self._is_long_absent(request)]
        self._requests.difference_update(evicted)
        return evicted

    def _is_long_absent(self, request: TrackedRequest) -> bool:
        return self._step - request.seen_step > ABSENT_STEPS or time.monotonic() - request.seen_at > ABSENT_SECONDS

    def clear(self) -> Iterator[TrackedRequest]:
        """Forget every request; each is handed back once."""
        while self._requests:
            yield self._requests.pop()


def _found(text: Tokens, absent: list[TrackedRequest]) -> TrackedRequest | None:
    """The longest request that `text` begins with, taken out of `absent`."""
    likely = sorted((one for one in absent if one.may_begin(text)), key=lambda one: one.length, reverse=True)
    for request in likely:
        if request.begins(text):
            absent.remove(request)
            return request
    return None
