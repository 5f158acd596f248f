"""Exchanges the model's weights: reads them while steps run, and writes them between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import NotSupported, OutriderError, QuotaExceeded, WeightsChanged
from outrider.weight_updates import RunningRequests, WeightsUpdated
from target_service.core.sequence import SequenceEvent
from target_service.core.weights import UpdateDone, WeightUpdate
from target_service.engine.loop import EngineLoop
from target_service.model.rank_link import DropWeights, WriteWeights
from target_service.model.runner import ModelRunner
from target_service.model.weights.update import WaitingWeights


@dataclass(slots=True)
class _Pending:
    """An update that is not done yet."""

    update_id: int
    update: WeightUpdate
    done: UpdateDone
    # Holds the new weights until they are written.
    waiting: WaitingWeights
    begun_ns: int = field(default_factory=time.monotonic_ns)
    # Whether they are read, by every rank.
    read: bool = False
    prepare_ns: int = 0
    cancelled: bool = False


@dataclass(eq=False)
class WeightExchange:
    """One exchange at a time. `start_reading` and `cancel` may be called from any thread, the rest from the
    engine's."""

    runner: ModelRunner
    loop: EngineLoop
    # Wakes the engine's thread, and reports that it is alive.
    wake: Callable[[], None]
    beat: Callable[[], None]
    # Time of the last exchange in nanoseconds; 0 before the first.
    pause_ns: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _pending: _Pending | None = field(default=None, init=False)

    def start_reading(self, update_id: int, update: WeightUpdate, done: UpdateDone) -> None:
        """Begin to read weights; `done` receives the result, once. Raises `QuotaExceeded` while another update is under
        way."""
        pending = _Pending(update_id, update, done, WaitingWeights(self.runner.network))
        with self._lock:
            if self._pending is not None:
                raise QuotaExceeded("another update of the weights is under way")
            self._pending = pending
        threading.Thread(target=self._prepare, args=(pending,), name="weights", daemon=True).start()

    def cancel(self, update_id: int) -> None:
        """Keep the old weights, unless the update is done. Its `done` is not called."""
        with self._lock:
            if self._pending is not None and self._pending.update_id == update_id:
                self._pending.cancelled = True
        self.wake()

    def fail(self, error: OutriderError) -> None:
        """The engine ends: fail the update under way."""
        pending = self._finish()
        if pending is not None and not pending.cancelled:
            pending.done(error)

    def exchange_when_ready(self) -> list[SequenceEvent]:
        """Advance the update under way, between two steps. Returns the events of sequences that it ended."""
        pending, scheduler = self._pending, self.loop.scheduler
        if pending is None or not pending.read:
            return []
        if pending.cancelled:
            self._finish()
            return []
        if pending.update.running is RunningRequests.DRAIN:
            scheduler.hold_back()
            if scheduler.begun():
                return []
        self.loop.settling = True
        if not self.loop.settled:
            return []
        return self._exchange(pending)

    def _exchange(self, pending: _Pending) -> list[SequenceEvent]:
        begun_ns, scheduler = time.monotonic_ns(), self.loop.scheduler
        events: list[SequenceEvent] = []
        if pending.update.running is RunningRequests.ABORT:
            error = WeightsChanged("the model's weights were exchanged; send the request again")
            events += [self.loop.fail(sequence, error) for sequence in scheduler.begun()]
        continued = len(scheduler.begun())
        # A failure in here leaves a mix of old and new weights, which ends the engine.
        if self.runner.link is not None:
            self.runner.link.send(WriteWeights())
        pending.waiting.write(self.beat)
        self.loop.exchanged(version=self.loop.model_version + 1)
        self.pause_ns = time.monotonic_ns() - begun_ns
        sizes = pending.waiting.sizes
        self._finish()
        pending.done(
            WeightsUpdated(
                model_version=self.loop.model_version,
                tensors=len(sizes),
                bytes=sum(sizes),
                prepare=pending.prepare_ns / 1e9,
                pause=self.pause_ns / 1e9,
                aborted=len(events),
                continued=continued,
            )
        )
        return events

    def _finish(self) -> _Pending | None:
        """End the update under way, and let waiting sequences begin. Returns it."""
        with self._lock:
            pending, self._pending = self._pending, None
            read = pending is not None and pending.read
        if pending is not None and read:
            self._drop(pending)
        self.loop.settling = False
        self.loop.scheduler.release()
        return pending

    def _prepare(self, pending: _Pending) -> None:
        """Read the weights, in a separate thread."""
        link = self.runner.link
        try:
            pending.waiting.read(Path(pending.update.folder))
            if link is not None:
                # Behind this one, which has refused what is wrong with the files.
                link.read_weights(pending.update.folder)
        except OutriderError as error:
            self._refuse(pending, error)
        # Whatever a file holds, the engine continues with the old weights.
        except Exception as error:
            self._refuse(pending, NotSupported(f"the weights cannot be read: {type(error).__name__}"))
            raise
        else:
            pending.prepare_ns = time.monotonic_ns() - pending.begun_ns
            with self._lock:
                # Last: the engine's thread polls it.
                pending.read = True
                ended = self._pending is not pending
            if ended:
                # The engine ended meanwhile, and did not release the room that this thread used.
                self._drop(pending)
            self.wake()

    def _drop(self, pending: _Pending) -> None:
        """Give the memory of new weights back, on every rank."""
        if self.runner.link is not None:
            self.runner.link.send(DropWeights())
        pending.waiting.release()

    def _refuse(self, pending: _Pending, error: OutriderError) -> None:
        self._drop(pending)
        with self._lock:
            # Otherwise the engine has ended, and its error was the result.
            mine = self._pending is pending
            if mine:
                self._pending = None
        if mine and not pending.cancelled:
            pending.done(error)
