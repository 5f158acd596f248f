"""The engine: a thread that runs the loop. Requests come in from any thread, events go out once per step."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.devices import choose_device
from outrider.errors import Draining, EngineDead, OutriderError
from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo
from target_service.config import TargetConfig
from target_service.core.events import EngineObserver, EngineSnapshot, PagesObserver
from target_service.core.front import EngineFront
from target_service.core.sequence import SequenceEvent, SequenceRequest
from target_service.core.weights import UpdateDone, WeightUpdate
from target_service.engine.exchange import WeightExchange
from target_service.engine.loop import EngineLoop
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.live_sequence import LiveSequence
from target_service.speculation.policy.step_cost import StepCost
from tree_models.in_pass import SequenceKeys

log = logging.getLogger(__name__)


class Engine(EngineFront):
    """Runs sequences to their end. Every public method may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        config: TargetConfig,
        *,
        step_cost: StepCost | None = None,
        observer: EngineObserver | None = None,
        shared_prompts: Iterable[Sequence[int]] = (),
    ) -> None:
        """`step_cost` of None verifies every drafted row that is allowed. All tenants share pages of `shared_prompts`,
        token ids that prompts may begin with."""
        cache = runner.cache
        super().__init__(config.max_waiting, min(runner.max_context, cache.num_pages * cache.page_size))
        self._runner = runner
        self._loop = EngineLoop(runner, config, step_cost=step_cost, observer=observer)
        self._loop.take_arrivals = self._run_commands
        for token_ids in shared_prompts:
            self._loop.scheduler.pages.share_between_tenants(token_ids)
        self._pages_observer: PagesObserver | None = observer if isinstance(observer, PagesObserver) else None
        # Receives the events of a draft link, which is attached before `start`.
        self.drafting = self._loop.drafting
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        # Sequences whose grammars are compiled: only then do they join the others that wait.
        self._compiling: dict[int, LiveSequence] = {}
        # Threads that compile forms of output. The serving process compiles them first, two at a time and tenants in
        # turn.
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        self._deliver: Callable[[list[SequenceEvent]], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._exchange = WeightExchange(runner, self._loop, self._wake_up, self._beat)

    @property
    def draft_info(self) -> DraftInfo | None:
        """Information from the draft service; None while it is not connected."""
        return self.drafting.info

    def keys_of(self, sequence_id: int) -> SequenceKeys | None:
        """See `EngineLoop.keys_of`. Only in the engine's thread."""
        return self._loop.keys_of(sequence_id)

    def use_pause(self) -> bool:
        """See `Steps.use_pause`. Only before `start`, behind which the engine's thread does this while nothing runs."""
        return self._loop.steps.use_pause()

    def start(self, deliver: Callable[[list[SequenceEvent]], None]) -> None:
        """Start the loop. `deliver` receives all events of a step at once, in the engine's thread."""
        self._deliver = deliver
        self._thread.start()

    def submit(self, request: SequenceRequest, sequence_id: int | None = None) -> int:
        """Queue a request and return its sequence id: the one given, which must be new, or the next.

        Raises `Draining`, `EngineDead`, `QuotaExceeded` where too many sequences wait, and `PositionOutOfRange` where
        prompt and output could never fit the KV cache or the model's context.
        """
        scheduler = self._loop.scheduler
        with self._wake:
            sequence_id = self._admit(request, len(scheduler.running) + scheduler.evicted, sequence_id)
            live = self._loop.make(sequence_id, request)
            self._add(sequence_id, request)
            if request.grammar is None:
                self._commands.append(lambda: self._loop.add(live))
                self._wake.notify_all()
                return sequence_id
            self._compiling[sequence_id] = live
            form = request.grammar, request.tenant
            if self._loop.grammars.has_matcher(*form):
                self._constrain(live)
            else:
                self._compilers.submit(self._constrain, live)
            if self._loop.grammars.keeps(*form) and not self._loop.grammars.has_matcher(*form):
                # For the next one that asks for it.
                self._compilers.submit(self._loop.grammars.prepare, *form)
        return sequence_id

    def _constrain(self, live: LiveSequence) -> None:
        """Compile a sequence's grammar, then let it begin. Where it has to be compiled, in a thread of its own."""
        error: OutriderError | None = None
        try:
            self._loop.constrain(live)
        except OutriderError as refused:
            error = refused
        # Whatever a compiler does with a form, it is that request's failure alone.
        except Exception:
            log.exception("bug in compiling a form of output")
            error = OutriderError("structured_output: compiling it failed")
        self._command(lambda: self._begin_constrained(live, error))

    def _begin_constrained(self, live: LiveSequence, error: OutriderError | None) -> None:
        # It may have been cancelled meanwhile.
        if self._compiling.pop(live.sequence.sequence_id, None) is not None:
            self._loop.add(live)
            if error is not None:
                self._emit([self._loop.fail(live.sequence, error)])

    def verify(self, sequence_id: int, tree: TokenTree) -> None:
        """Verify a client's tree in the next step. Raises what `check_tree` raises."""
        self.check_tree(sequence_id, tree)

        def put() -> None:
            # It may have ended meanwhile.
            live = self._compiling.get(sequence_id) or self._loop.live.get(sequence_id)
            if live is not None:
                self._loop.scheduler.verify(live.sequence, tree)

        self._command(put)

    def cancel(self, sequence_id: int) -> None:
        """End a sequence and free what it holds before the next step. Unknown ids are ignored."""

        def end() -> None:
            compiling = self._compiling.pop(sequence_id, None)
            if compiling is not None:
                self._loop.add(compiling)
            if self._loop.end(sequence_id, "cancelled") is not None:
                self._forget(sequence_id)

        self._command(end)

    def update_weights(self, update: WeightUpdate, done: UpdateDone, update_id: int | None = None) -> int:
        """Exchange the model's weights; returns the update's id: the one given, which must be new, or the next. `done`
        receives the result, once, in a thread of the engine.

        Raises `Draining`, `EngineDead`, and `QuotaExceeded` while another update is under way.
        """
        update_id = self.check_update(update_id)
        self._exchange.start_reading(update_id, update, done)
        return update_id

    def cancel_update(self, update_id: int) -> None:
        """Keep the old weights, unless they were exchanged already. Unknown ids are ignored."""
        self._exchange.cancel(update_id)

    def stop(self) -> None:
        """Fail the remaining sequences, and end the loop. Waits for the step under way."""
        self.drain()
        self._stopping = True
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._wake_up()
            self._thread.join()

    def snapshot(self) -> EngineSnapshot:
        """The engine's present state; numbers may be a step old."""
        cache, loop = self._runner.cache, self._loop
        return EngineSnapshot(
            running=len(loop.scheduler.running),
            waiting=loop.scheduler.waiting,
            sequences=len(self._open),
            pages_used=cache.used_pages,
            pages_total=cache.num_pages,
            pages_cached=cache.spare_pages,
            speculating=self.drafting.active and self.drafting.connected,
            draft_connected=self.drafting.connected,
            kept_feature_bytes=loop.features.kept_bytes + loop.scheduler.pages.state_bytes,
            evicted=loop.scheduler.evicted,
            model_version=loop.model_version,
            exchange_ns=self._exchange.pause_ns,
            measuring=loop.gathering.measures,
            draft_lost=self.drafting.lost,
        )

    def _wake_up(self) -> None:
        self._command(lambda: None)

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            choose_device(str(self._runner.device))
            while not self._stopping:
                self._beat()
                self._iterate()
            self._fail_all(Draining("the target has stopped"))
        # After an exception in a step KV and totals may be wrong: every sequence fails and the process exits.
        except Exception as error:
            log.exception("the engine has failed")
            self.failure = error
            self._fail_all(EngineDead("the engine has failed"))

    def _iterate(self) -> None:
        """Run the queued commands, then one step, or wait for a command."""
        self._run_commands()
        if ended := self._exchange.exchange_when_ready():
            self._emit(ended)
        events = self._loop.step()
        if self._pages_observer is not None and (changes := self._loop.scheduler.pages.pop_changes()):
            self._pages_observer.on_pages(changes)
        if events is None:
            with self._wake:
                # How often an idle engine beats, in seconds.
                self._wake.wait_for(lambda: self._commands or self._stopping, timeout=0.05)
            self.drafting.listen()
        elif events:
            self._emit(events)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _beat(self) -> None:
        self.last_beat_ns = time.monotonic_ns()

    def _emit(self, events: list[SequenceEvent]) -> None:
        self._observe(events)
        self._deliver(events)

    def _fail_all(self, error: OutriderError) -> None:
        # Under the lock, so that a request is either refused or among those that fail.
        with self._wake:
            self.drain()
            failed = self._failed(error)
        self._exchange.fail(error)
        self._emit(failed)
