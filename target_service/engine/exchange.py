"""An exchange of the model's weights: read beside running steps, then done between two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from outrider.errors import NotSupported, OutriderError, QuotaExceeded, WeightsChanged
from target_service.core.sequence import SequenceEvent, SequenceFailed
from target_service.core.weights import RunningRequests, UpdateDone, WeightsUpdated, WeightUpdate
from target_service.engine.loop import EngineLoop
from target_service.model.runner import ModelRunner
from target_service.model.weights.files import read_weights
from target_service.model.weights.room import HostRoom
from target_service.model.weights.slots import WeightSlot, specs_of, weight_slots, write_weights


@dataclass(slots=True)
class _Asked:
    """An update that was asked for and is not done."""

    update_id: int
    update: WeightUpdate
    done: UpdateDone
    # Where they lie until they are written.
    room: HostRoom
    begun_ns: int = field(default_factory=time.monotonic_ns)
    slots: list[WeightSlot] = field(default_factory=list)
    # None until they are read.
    weights: Mapping[str, Tensor] | None = None
    prepare_ns: int = 0
    given_up: bool = False


class WeightExchange:
    """One exchange at a time. `ask` and `give_up` may be called from any thread, all else belongs to the engine's."""

    def __init__(
        self, runner: ModelRunner, loop: EngineLoop, wake: Callable[[], None], beat: Callable[[], None]
    ) -> None:
        """`wake` tells the engine's thread that there is something to do; `beat` that it is alive."""
        self._runner = runner
        self._loop = loop
        self._wake = wake
        self._beat = beat
        self._lock = threading.Lock()
        self._asked: _Asked | None = None
        # Of the last exchange, in nanoseconds; 0 before the first.
        self.pause_ns = 0

    def ask(self, update_id: int, update: WeightUpdate, done: UpdateDone) -> None:
        """Begin to read weights; `done` gets what comes of it, once.

        Raises:
            QuotaExceeded: another update is under way.
        """
        asked = _Asked(update_id, update, done, HostRoom(self._runner.device))
        with self._lock:
            if self._asked is not None:
                raise QuotaExceeded("another update of the weights is under way")
            self._asked = asked
        threading.Thread(target=self._prepare, args=(asked,), name="weights", daemon=True).start()

    def give_up(self, update_id: int) -> None:
        """Nobody waits for the update any more: leave the old weights, unless it is done. `done` is not called."""
        with self._lock:
            if self._asked is not None and self._asked.update_id == update_id:
                self._asked.given_up = True
        self._wake()

    def fail(self, error: OutriderError) -> None:
        """The engine ends: tell whoever waits."""
        asked = self._finish()
        if asked is not None and not asked.given_up:
            asked.done(error)

    def turn(self) -> list[SequenceEvent]:
        """Between two steps: do what the update under way allows now. The events of sequences that it ended."""
        asked, scheduler = self._asked, self._loop.scheduler
        if asked is None or asked.weights is None:
            return []
        if asked.given_up:
            self._finish()
            return []
        if asked.update.running is RunningRequests.DRAIN:
            scheduler.hold()
            if scheduler.begun():
                return []
        self._loop.settling = True
        if not self._loop.settled:
            return []
        return self._exchange(asked, asked.weights)

    def _exchange(self, asked: _Asked, weights: Mapping[str, Tensor]) -> list[SequenceEvent]:
        begun_ns, scheduler = time.monotonic_ns(), self._loop.scheduler
        events: list[SequenceEvent] = []
        if asked.update.running is RunningRequests.ABORT:
            for sequence in scheduler.begun():
                error = WeightsChanged("the model's weights were exchanged; ask again")
                self._loop.end(sequence.sequence_id, error.reason)
                events.append(SequenceFailed(sequence.sequence_id, error, sequence.totals.draft_refused))
        continued = len(scheduler.begun())
        # Whatever fails in here leaves weights of both kinds, which is the engine's end.
        write_weights(asked.slots, weights, self._beat)
        self._loop.exchanged(version=self._loop.model_version + 1)
        self.pause_ns = time.monotonic_ns() - begun_ns
        memory = {tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}
        self._finish()
        asked.done(
            WeightsUpdated(
                model_version=self._loop.model_version,
                tensors=len(memory),
                bytes=sum(memory.values()),
                prepare_ns=asked.prepare_ns,
                pause_ns=self.pause_ns,
                aborted=len(events),
                continued=continued,
            )
        )
        return events

    def _finish(self) -> _Asked | None:
        """Nothing is asked any more, and whoever was held may begin. The update that was."""
        with self._lock:
            asked, self._asked = self._asked, None
            read = asked is not None and asked.weights is not None
        if asked is not None and read:
            asked.room.release()
        self._loop.settling = False
        self._loop.scheduler.release()
        return asked

    def _prepare(self, asked: _Asked) -> None:
        """Read the weights, in a thread of its own."""
        try:
            slots = weight_slots(self._runner.model)
            weights = read_weights(Path(asked.update.folder), specs_of(slots), asked.room)
            asked.room.lock()
        except OutriderError as error:
            self._refuse(asked, error)
        # Whatever a file holds, the engine goes on with the weights it has.
        except Exception as error:
            self._refuse(asked, NotSupported(f"the weights cannot be read: {type(error).__name__}"))
            raise
        else:
            asked.slots, asked.prepare_ns = slots, time.monotonic_ns() - asked.begun_ns
            with self._lock:
                # Last: the engine's thread looks for it.
                asked.weights = weights
                ended = self._asked is not asked
            if ended:
                # The engine has; until now the room was this thread's.
                asked.room.release()
            self._wake()

    def _refuse(self, asked: _Asked, error: OutriderError) -> None:
        asked.room.release()
        with self._lock:
            self._asked = None
        if not asked.given_up:
            asked.done(error)
