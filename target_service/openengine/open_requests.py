"""The requests that run, by the ids that their callers gave them, so that they can be aborted."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.errors import SequenceExists, UnknownSequence
from target_service.core.events import Sequences


@dataclass(eq=False)
class OpenRequest:
    """One request. `changed` is set when its sequences have events, and when it is aborted."""

    # One for each output, once it is accepted.
    sequence_ids: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False


class OpenRequests:
    """Belongs to the event loop. A tenant finds its own requests only."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        # Both by tenant and id, the ended ones oldest first.
        self._running: dict[tuple[str, str], OpenRequest] = {}
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()

    @contextmanager
    def running(self, tenant: str, request_id: str) -> Iterator[OpenRequest]:
        """A request of this id while the block runs, which ends its sequences. Raises `SequenceExists` for one whose id
        a running one has."""
        key = tenant, request_id
        if key in self._running:
            raise SequenceExists("a request of this request_id runs already")
        request = self._running[key] = OpenRequest()
        try:
            yield request
        finally:
            self.cancel(request)
            del self._running[key]
            if request.sequence_ids:
                self._ended[key] = None
                self._ended.move_to_end(key)
                # Whose abort is no error. Chosen: seconds of a busy target.
                if len(self._ended) > 4096:
                    self._ended.popitem(last=False)

    def cancel(self, request: OpenRequest) -> None:
        """End the sequences of a request, which free what they hold."""
        for sequence_id in request.sequence_ids:
            self._sequences.cancel(sequence_id)

    def abort(self, tenant: str, request_id: str) -> bool:
        """Abort a request; False where it has ended. Raises `UnknownSequence` for an id that is not known."""
        request = self._running.get((tenant, request_id))
        if request is not None:
            self._abort(request)
        elif (tenant, request_id) not in self._ended:
            raise UnknownSequence("no request of this request_id is known")
        return request is not None

    def abort_all(self, tenant: str | None) -> int:
        """Abort all requests of a tenant, or of all tenants. Returns how many."""
        found = [request for (owner, _), request in self._running.items() if tenant in (None, owner)]
        for request in found:
            self._abort(request)
        return len(found)

    def _abort(self, request: OpenRequest) -> None:
        request.aborted = True
        self.cancel(request)
        request.changed.set()
