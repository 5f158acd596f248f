"""An engine without a model, for `engine.engine_process` and `serving.door`, whose steps take a given time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from outrider.sampling import FinishReason
from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo
from target_service.api.admission import ServedModel
from target_service.core.events import EngineSnapshot
from target_service.core.sequence import (
    Finish,
    SequenceEvent,
    SequenceFinished,
    SequenceRequest,
    SequenceTotals,
    StepStats,
    StepVerdict,
)
from target_service.core.weights import UpdateDone, WeightUpdate
from target_service.engine_process.server import Reporter

# Of the interpreter, for a step's host work.
HOST_SECONDS = 0.0003
ENDLESS = 10**9
# The token of "a", with a tokenizer of single bytes behind three other tokens.
_LETTER = 3 + 97
SERVED = ServedModel("steps", 259, 2 * ENDLESS, 1, "none", 16, 2 * ENDLESS, (2,))
STATS = StepStats(**dict.fromkeys(StepStats.__slots__, 1000))


class SteppingEngine:
    """The engine's interface; each step emits a token for every sequence."""

    draft_info: DraftInfo | None = None
    failure: BaseException | None = None

    def __init__(self, step_seconds: float, observer: Reporter | None = None) -> None:
        self._step_seconds = step_seconds
        self._observer = observer
        self._commands: list[Callable[[], Any]] = []
        self._running: dict[int, int] = {}
        self._requests: dict[int, SequenceRequest] = {}
        self._stopping = False
        self._ids = iter(range(1, ENDLESS))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.served = SERVED
        self.steps = 0
        self.last_beat_ns = time.monotonic_ns()
        self.deliver: Callable[[list[SequenceEvent]], None] = lambda _: None

    @property
    def engine(self) -> SteppingEngine:
        return self

    def start(self, deliver: Callable[[list[SequenceEvent]], None]) -> None:
        self.deliver = deliver
        self._thread.start()

    def submit(self, request: SequenceRequest, sequence_id: int | None = None) -> int:
        number = next(self._ids) if sequence_id is None else sequence_id
        self._requests[number] = request
        self._commands.append(lambda: self._running.update({number: 0}))
        return number

    def verify(self, sequence_id: int, tree: TokenTree) -> None:
        raise NotImplementedError("no client sends trees")

    def cancel(self, sequence_id: int) -> None:
        self._commands.append(lambda: self._end(sequence_id))

    def update_weights(self, update: WeightUpdate, done: UpdateDone) -> int:
        raise NotImplementedError("no client updates weights")

    def cancel_update(self, update_id: int) -> None:
        raise NotImplementedError("no client updates weights")

    def _end(self, sequence_id: int) -> None:
        request = self._requests.pop(sequence_id, None)
        if self._running.pop(sequence_id, None) is not None and request is not None and self._observer is not None:
            self._observer.on_finished(sequence_id, request, SequenceTotals(), "cancelled")

    def drain(self) -> None:
        """Nothing to do: all clients have left by then."""

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()

    def snapshot(self) -> EngineSnapshot:
        held = len(self._running)
        return EngineSnapshot(held, 0, held, 0, 1, speculating=False, draft_connected=False)

    def _run(self) -> None:
        while not self._stopping:
            begin, self.last_beat_ns = time.perf_counter(), time.monotonic_ns()
            while self._commands:
                self._commands.pop(0)()
            events = self._events()
            while time.perf_counter() - begin < HOST_SECONDS:
                pass
            time.sleep(max(0.0, self._step_seconds - (time.perf_counter() - begin)))
            self.steps += 1
            if self._observer is not None:
                self._observer.on_step(STATS)
            if events:
                self.deliver(events)

    def _events(self) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        for sequence_id, step in self._running.items():
            self._running[sequence_id] = step + 1
            events.append(StepVerdict(sequence_id, step, (), (100 + step % 20,), 0, compute_ns=10**6))
        return events


class AnsweringEngine(SteppingEngine):
    """One whose answers are letters, and end after as many tokens as were asked for."""

    def _events(self) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        for sequence_id, step in list(self._running.items()):
            request, made = self._requests[sequence_id], step + 1
            finish = Finish(FinishReason.LENGTH) if made == request.max_tokens else None
            events.append(
                StepVerdict(sequence_id, step, (), (_LETTER + step % 26,), 0, finish=finish, compute_ns=10**6)
            )
            self._running[sequence_id] = made
            if finish is not None:
                del self._running[sequence_id], self._requests[sequence_id]
                totals = SequenceTotals(prompt_tokens=len(request.token_ids), completion_tokens=made, steps=made)
                totals.started_ns = totals.first_token_ns = totals.arrived_ns
                totals.finished_ns = time.monotonic_ns()
                events.append(SequenceFinished(sequence_id, finish, totals))
        return events
