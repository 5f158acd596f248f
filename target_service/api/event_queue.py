"""Queues the events of one sequence for a reader that may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from outrider.errors import QuotaExceeded
from target_service.core.sequence import SequenceEnd, SequenceEvent, StepVerdict


class EventQueue:
    """A queue of one sequence's events that cancels the sequence when it exceeds its limit."""

    def __init__(self, limit: int, cancel: Callable[[int], None]) -> None:
        """`cancel` receives the id of a sequence whose reader lags by more than `limit` steps."""
        self._limit = limit
        self._cancel = cancel
        self._events: list[SequenceEvent] = []
        self._arrived = asyncio.Event()
        self._overflowed = False
        # Called when there are events; by default it wakes the task that waits for them.
        self.on_arrival: Callable[[], object] = self._arrived.set

    def put(self, event: SequenceEvent) -> None:
        """Add an event. At the limit, drop the queued events and cancel the sequence, to free its memory at once."""
        if len(self._events) >= self._limit and not isinstance(event, SequenceEnd):
            self._overflowed = True
            self._events.clear()
            self._cancel(event.sequence_id)
        else:
            self._events.append(event)
        self.on_arrival()

    async def next_events(self) -> list[SequenceEvent]:
        """All queued events, at least one. Raises `QuotaExceeded` when the reader was too slow. For one reader."""
        while not (events := self.queued()):
            self._arrived.clear()
            await self._arrived.wait()
        return events

    def queued(self) -> list[SequenceEvent]:
        """All queued events; none where there are none yet. Raises `QuotaExceeded` when the reader was too slow."""
        if self._overflowed and not self._events:
            raise QuotaExceeded("the client reads too slowly", steps=self._limit)
        events, self._events = self._events, []
        return events


def joined(events: Sequence[SequenceEvent]) -> Iterable[SequenceEvent]:
    """The events of one sequence, with consecutive verdicts joined where one chunk can hold them. A chunk's drafted
    tokens are its first, so a verdict with some begins a chunk. So does one of other weights."""
    return _joined(events) if len(events) > 1 else events


def _joined(events: Sequence[SequenceEvent]) -> Iterator[SequenceEvent]:
    run: list[StepVerdict] = []
    for event in events:
        verdict = event if isinstance(event, StepVerdict) else None
        if run and (verdict is None or verdict.drafted_tokens or verdict.model_version != run[0].model_version):
            yield _join(run)
            run = []
        if verdict is not None:
            run.append(verdict)
        else:
            yield event
    if run:
        yield _join(run)


def _join(run: list[StepVerdict]) -> StepVerdict:
    """One verdict with the tokens of several, and the last one's step."""
    if len(run) == 1:
        return run[0]
    first, shown = run[0].drafts_by_step, [verdict.tree for verdict in run if verdict.tree is not None]
    return msgspec.structs.replace(
        run[-1],
        accepted_rows=run[0].accepted_rows,
        token_ids=tuple([token for verdict in run for token in verdict.token_ids]),
        drafted_tokens=run[0].drafted_tokens,
        logprobs=tuple([entry for verdict in run for entry in verdict.logprobs]),
        queue_ns=sum(verdict.queue_ns for verdict in run),
        compute_ns=sum(verdict.compute_ns for verdict in run),
        tree=shown[-1] if shown else None,
        # All tokens of the later verdicts are the model's own, one for each step.
        drafts_by_step=first and (*first, *(0 for verdict in run[1:] for _ in verdict.token_ids)),
    )
