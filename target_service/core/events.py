"""Delivers events from the engine to the event loop: once per step, then to one sink per sequence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from outrider.errors import OutriderError
from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo
from target_service.core.quotas import TenantQuotas
from target_service.core.sequence import (
    SequenceEnd,
    SequenceEvent,
    SequenceFailed,
    SequenceRequest,
    SequenceTotals,
    StepStats,
    StepVerdict,
)
from target_service.core.weights import FIRST_VERSION, UpdateDone, WeightUpdate
from tree_kernels.prefix_tree import PageChange

logger = logging.getLogger(__name__)

Sink = Callable[[SequenceEvent], None]
# Between two looks at what still runs of an engine that drains. Chosen: little beside the end of any request.
DRAIN_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's present state."""

    running: int
    waiting: int
    sequences: int
    pages_used: int
    pages_total: int
    speculating: bool
    draft_connected: bool
    # Of the pages that are not used, those that hold prefixes.
    pages_cached: int = 0
    # Bytes of hidden states kept for a draft that connects late.
    kept_feature_bytes: int = 0
    # Version of the weights, and time of their last exchange; 0 before the first.
    model_version: int = FIRST_VERSION
    exchange_ns: int = 0
    # Of `sequences`, those that were preempted while their client sent no tree.
    evicted: int = 0
    # Passes without a draft are still being timed at this load, so that none is used.
    measuring: bool = False
    # Why the draft was lost; empty while one is connected, and before the first.
    draft_lost: str = ""


class ServingEngine(Protocol):
    """The engine's interface for serving, see `target_service.engine.engine.Engine`."""

    @property
    def draft_info(self) -> DraftInfo | None: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def last_beat_ns(self) -> int: ...
    def submit(self, request: SequenceRequest) -> int: ...
    def verify(self, sequence_id: int, tree: TokenTree) -> None: ...
    def cancel(self, sequence_id: int) -> None: ...
    def update_weights(self, update: WeightUpdate, done: UpdateDone) -> int: ...
    def cancel_update(self, update_id: int) -> None: ...
    def snapshot(self) -> EngineSnapshot: ...
    def drain(self) -> None: ...


class EngineObserver(Protocol):
    """Receives what the engine did: each step, the end of each sequence, with its finish reason, "cancelled" or an
    error's reason, and that drafting was switched by load. Called from the engine's thread; must be quick and must not
    raise."""

    def on_step(self, stats: StepStats) -> None: ...
    def on_finished(self, sequence_id: int, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None: ...
    def on_speculation(self, active: bool) -> None: ...


@runtime_checkable
class PagesObserver(Protocol):
    """An `EngineObserver` that also receives which shared pages came and went, where that is recorded."""

    def on_pages(self, changes: list[PageChange]) -> None: ...


@dataclass(eq=False)
class Sequences:
    """The engine's sequences, for handlers on the event loop. All but `deliver` belongs to the loop."""

    engine: ServingEngine
    quotas: TenantQuotas = field(default_factory=TenantQuotas)
    # By id: the sink and the tenant.
    _open: dict[int, tuple[Sink, str]] = field(default_factory=dict, init=False)
    # Ids of sequences without an event yet.
    _waiting: set[int] = field(default_factory=set, init=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False)

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, request: SequenceRequest, sink: Sink) -> int:
        """Start a sequence whose events go to `sink`. Returns its id; raises what `Engine.submit` raises, and
        `QuotaExceeded` where its tenant is at a limit.

        No event is missed: they are dispatched in a later iteration of the loop.
        """
        self.quotas.check_sequence(request)
        sequence_id = self.engine.submit(request)
        self._open[sequence_id] = (sink, request.tenant)
        self._waiting.add(sequence_id)
        self.quotas.opened(sequence_id, request)
        return sequence_id

    def cancel(self, sequence_id: int) -> None:
        """Remove the sink, and end the sequence unless it has ended."""
        if sequence_id in self._open:
            self._forget(sequence_id)
            self.engine.cancel(sequence_id)

    def fail_all(self, error: OutriderError) -> None:
        """End every sequence with an error."""
        for sequence_id, (sink, _) in list(self._open.items()):
            self.cancel(sequence_id)
            sink(SequenceFailed(sequence_id, error))

    def deliver(self, events: list[SequenceEvent]) -> None:
        """Hand one step's events to the event loop. Called in the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self.dispatch, events)
        except RuntimeError:
            # The loop closes only after every call has ended, so no call waits for these.
            logger.debug("events of a last step after the event loop's end")

    def dispatch(self, events: list[SequenceEvent]) -> None:
        """Pass one step's events to their sinks, on the event loop."""
        for event in events:
            opened = self._open.get(event.sequence_id)
            if opened is None:
                continue
            sink, tenant = opened
            # Of a step's events nearly all are verdicts, which their type shows at once.
            if type(event) is not StepVerdict and isinstance(event, SequenceEnd):
                self._forget(event.sequence_id)
            elif event.sequence_id in self._waiting:
                self._waiting.discard(event.sequence_id)
                self.quotas.began(event.sequence_id, tenant)
            sink(event)

    def _forget(self, sequence_id: int) -> None:
        _, tenant = self._open.pop(sequence_id)
        self._waiting.discard(sequence_id)
        self.quotas.ended(sequence_id, tenant)
