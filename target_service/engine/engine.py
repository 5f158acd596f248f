"""The engine's thread and its door: requests come in from any thread, events go out once per step."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from outrider.errors import (
    Draining,
    EngineDead,
    OutriderError,
    PositionOutOfRange,
    QuotaExceeded,
    UnknownSequence,
    WrongRoot,
)
from outrider.tree import TokenTree
from outrider.wire.frames import DraftEvents, DraftInfo, DraftLink
from target_service.core.events import EngineSnapshot
from target_service.core.sequence import SequenceEvent, SequenceFailed, SequenceRequest, Verdict
from target_service.engine.loop import EngineConfig, EngineLoop
from target_service.engine.stats import EngineObserver
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost

__all__ = ["Engine", "EngineConfig", "EngineObserver", "EngineSnapshot"]

log = logging.getLogger(__name__)
# How often an idle engine beats, in seconds.
_IDLE_BEAT = 0.05


class Engine:
    """Runs sequences to their end. Every public method may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        step_cost: StepCost | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        """`step_cost` of None verifies every drafted row that is allowed."""
        self._runner = runner
        self._max_waiting = config.max_waiting
        self._loop = EngineLoop(runner, config, step_cost=step_cost, observer=observer)
        self._ids = itertools.count(1)
        # Every sequence from submit to its last event; the loop's own table lags by the commands in the queue.
        self._open: dict[int, LiveSequence] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._deliver: Callable[[list[SequenceEvent]], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._draining = self._stopping = False
        self.failure: BaseException | None = None
        self.last_beat_ns = time.monotonic_ns()

    @property
    def draft_events(self) -> DraftEvents:
        """Where a draft link delivers what it hears."""
        return self._loop.drafting

    @property
    def draft_info(self) -> DraftInfo | None:
        """What the draft service says of itself; None while there is none."""
        return self._loop.drafting.info

    def attach_draft(self, link: DraftLink) -> None:
        """Draft through `link`. Before `start`."""
        self._loop.drafting.attach(link)

    def start(self, deliver: Callable[[list[SequenceEvent]], None]) -> None:
        """Start the loop. `deliver` gets all events of a step at once, in the engine's thread."""
        self._deliver = deliver
        self._thread.start()

    def submit(self, request: SequenceRequest, sequence_id: int | None = None) -> int:
        """Queue a request and return its sequence id: the one given, which must be new, or the next.

        Raises:
            Draining: the engine takes no new requests.
            QuotaExceeded: as many sequences wait as may.
            PositionOutOfRange: prompt and output could never fit the KV cache or the model's context.
            EngineDead: the loop has failed.
        """
        if self.failure is not None:
            raise EngineDead("the engine has failed")
        if self._draining:
            raise Draining("the target is draining")
        cache = self._runner.cache
        capacity = min(self._runner.max_context, cache.num_pages * cache.page_size)
        needed = len(request.token_ids) + request.max_tokens
        if needed > capacity:
            raise PositionOutOfRange("prompt and output do not fit", tokens=needed, capacity=capacity)
        with self._wake:
            scheduler = self._loop.scheduler
            waiting = len(self._open) - len(scheduler.running) - scheduler.evicted
            if waiting >= self._max_waiting:
                raise QuotaExceeded("too many requests wait", waiting=waiting)
            sequence_id = next(self._ids) if sequence_id is None else sequence_id
            live = self._loop.make(sequence_id, request)
            self._open[sequence_id] = live
            self._commands.append(lambda: self._loop.add(live))
            self._wake.notify_all()
        return sequence_id

    def verify(self, sequence_id: int, tree: TokenTree) -> None:
        """Verify a client's tree in the next step.

        Raises:
            UnknownSequence: no such sequence.
            WrongRoot: the tree's root is not the last committed token.
        """
        live = self._open.get(sequence_id)
        if live is None:
            raise UnknownSequence("the sequence is not open")
        sequence = live.sequence
        if tree.token_ids[0] != sequence.root:
            raise WrongRoot("the tree's root is not the last committed token")

        def put() -> None:
            self._loop.scheduler.verify(sequence, tree)

        self._command(put)

    def cancel(self, sequence_id: int) -> None:
        """End a sequence and free what it holds before the next step. Unknown ids are ignored."""

        def end() -> None:
            if self._loop.end(sequence_id, "cancelled") is not None:
                self._open.pop(sequence_id, None)

        self._command(end)

    def drain(self) -> None:
        """Refuse new requests; those under way go on."""
        self._draining = True

    def stop(self, grace: float) -> None:
        """Drain for at most `grace` seconds, fail what is left, and end the loop."""
        self.drain()
        deadline = time.monotonic() + grace
        while self._open and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        self._stopping = True
        if self._thread.is_alive():
            self._command(lambda: None)
            self._thread.join()

    def snapshot(self) -> EngineSnapshot:
        """What the engine holds right now; numbers may be a step old."""
        cache, loop = self._runner.cache, self._loop
        return EngineSnapshot(
            running=len(loop.scheduler.running),
            waiting=loop.scheduler.waiting,
            sequences=len(self._open),
            pages_used=cache.used_pages,
            pages_total=cache.num_pages,
            speculating=loop.drafting.active and loop.drafting.connected,
            draft_connected=loop.drafting.connected,
            kept_feature_bytes=loop.features.kept_bytes,
            evicted=loop.scheduler.evicted,
        )

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.last_beat_ns = time.monotonic_ns()
                self._iterate()
            self._fail_all(Draining("the target has stopped"))
        # Whatever escapes a step leaves KV and totals in doubt: every sequence is failed and the process exits.
        except Exception as error:
            log.exception("the engine has failed")
            self.failure = error
            self._fail_all(EngineDead("the engine has failed"))

    def _iterate(self) -> None:
        """Take what was asked, run one step or wait for something to do."""
        while self._commands:
            self._commands.popleft()()
        events = self._loop.step()
        if events is None:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._stopping, timeout=_IDLE_BEAT)
            self._loop.drafting.listen()
        elif events:
            self._emit(events)

    def _emit(self, events: list[SequenceEvent]) -> None:
        for event in events:
            if not isinstance(event, Verdict):
                self._open.pop(event.sequence_id, None)
        self._deliver(events)

    def _fail_all(self, error: OutriderError) -> None:
        """The last event of every sequence that is still open."""
        self._draining = True
        self._emit([SequenceFailed(sequence_id, error) for sequence_id in list(self._open)])
