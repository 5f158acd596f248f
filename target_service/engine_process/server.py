"""The engine's process: `python -m target_service.engine_process FD`, started by `client.EngineLink`.

It loads the model, measures step costs, connects the draft, and runs the engine. It receives commands over one socket,
and sends one report per step. It ends after `Stop`, when a step fails, and when the socket closes, which means that the
serving process is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.errors import OutriderError
from outrider.processes.framing import FrameCutter
from outrider.processes.outbox import Outbox
from outrider.runtime import configure_logging, settled
from outrider.sampling import FinishReason
from outrider.weight_updates import WeightsUpdated
from outrider.wire.frames import DraftInfo
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceEvent, SequenceFailed, SequenceRequest, SequenceTotals, StepStats
from target_service.engine_process import messages
from target_service.preflight import EngineRefused, check_sources, prepared_draft
from tree_kernels.prefix_tree import PageChange

if TYPE_CHECKING:
    from target_service.assembly import Assembled
    from target_service.engine.engine import Engine

    Build = Callable[[TargetConfig, "Reporter"], Assembled]

logger = logging.getLogger(__name__)

# Longest wait for the serving process to read the last events. Chosen, not measured.
_FLUSH_SECONDS = 2.0
# Outcomes that events report already.
_IN_EVENTS = frozenset(reason.value for reason in FinishReason)


class Reporter:
    """Collects what the engine did between two reports. An `EngineObserver`."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        # Reports leave from the engine's thread, and in quiet times from the main one.
        self._lock = threading.Lock()
        self._steps: list[StepStats] = []
        self._ended: list[tuple[int, SequenceTotals, str]] = []
        self._switches: list[bool] = []
        self._pages: list[PageChange] = []

    def on_step(self, stats: StepStats) -> None:
        with self._lock:
            self._steps.append(stats)

    def on_finished(self, sequence_id: int, _request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        if outcome not in _IN_EVENTS:
            with self._lock:
                self._ended.append((sequence_id, totals, outcome))

    def on_speculation(self, active: bool) -> None:
        with self._lock:
            self._switches.append(active)

    def on_pages(self, changes: list[PageChange]) -> None:
        with self._lock:
            self._pages += changes

    def found_model(self) -> None:
        """Tell that the model's files are there."""
        self._outbox.send(messages.pack(messages.ModelFound()))

    def loaded_model(self, vocabulary_size: int, end_token_ids: tuple[int, ...]) -> None:
        """Tell that the model is loaded, while the engine is made ready."""
        self._outbox.send(messages.pack(messages.ModelLoaded(vocabulary_size, end_token_ids)))

    def report(self, engine: Engine, events: list[SequenceEvent]) -> None:
        """Send what was collected, with a step's events. Never waits for the other process."""
        # All under the lock, or a snapshot could be sent behind a newer one, with an older version of the weights.
        with self._lock:
            # First: a sequence that ends meanwhile is then reported before its pages are.
            snapshot, beat_ns = engine.snapshot(), engine.last_beat_ns
            collected = self._steps, self._ended, self._switches, self._pages
            self._steps, self._ended, self._switches, self._pages = [], [], [], []
            self._outbox.send(messages.pack(messages.Report(events, *collected, snapshot, beat_ns)))


class EngineServer:
    """Runs an engine for the process at the other end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._reporter = Reporter(self._outbox)
        self._stopping = threading.Event()
        self._engine: Engine | None = None

    def serve(self, config: TargetConfig, frames: FrameCutter, build: Build) -> int:
        """Build an engine and run it to its end. Returns the exit status."""
        threading.Thread(target=self._run_commands, args=(frames,), name="commands", daemon=True).start()
        try:
            hosted = build(config, self._reporter)
        except EngineRefused as refusal:
            self._outbox.send(messages.pack(messages.StartRefused(refusal.status, refusal.reason)))
            self._outbox.flush(_FLUSH_SECONDS)
            return refusal.status
        self._engine = hosted.engine
        with settled():
            # After settling, which takes a while.
            self._outbox.send(messages.pack(messages.Ready(replace(hosted.served, tokenizer=None))))
            self._serve(hosted.engine)
        hosted.stop()
        self._outbox.flush(_FLUSH_SECONDS)
        return 0 if hosted.engine.failure is None else 1

    def _serve(self, engine: Engine) -> None:
        engine.start(lambda events: self._reporter.report(engine, events))
        drafter: DraftInfo | None = None
        # Interval of heartbeats while the engine reports no steps, in seconds.
        while engine.failure is None and not self._stopping.wait(0.05):
            self._reporter.report(engine, [])
            if engine.draft_info != drafter:
                drafter = engine.draft_info
                self._outbox.send(messages.pack(messages.DrafterChanged(drafter)))
        if engine.failure is not None:
            self._outbox.send(messages.pack(messages.Dead("the engine has failed")))

    def _run_commands(self, frames: FrameCutter) -> None:
        """Run the commands of the serving process until the socket closes."""
        try:
            for message in messages.receive(self._connection, frames):
                self._command(message)
        # Whatever the error was: a process that no longer reads must end, which the other one notices.
        except Exception:
            logger.exception("bug in a command")
        if not self._stopping.is_set():
            # The serving process is gone, and what loads or computes here would only occupy the device.
            os._exit(1)

    def _command(self, message: object) -> None:
        if isinstance(message, messages.Stop):
            self._stopping.set()
            return
        engine = self._engine
        assert engine is not None, "the engine is not ready"
        if isinstance(message, messages.Submit):
            try:
                engine.submit(message.request, message.sequence_id)
            except OutriderError as error:
                self._reporter.report(engine, [SequenceFailed(message.sequence_id, error)])
        elif isinstance(message, messages.Cancel):
            engine.cancel(message.sequence_id)
        elif isinstance(message, messages.UpdateWeights):
            self._update(engine, message)
        elif isinstance(message, messages.CancelUpdate):
            engine.cancel_update(message.update_id)
        elif isinstance(message, messages.Verify):
            try:
                engine.verify(message.sequence_id, message.tree)
            except OutriderError as error:
                # The sequence has ended meanwhile, which a report will show.
                logger.debug("a tree that came too late: %s", error.reason)

    def _update(self, engine: Engine, message: messages.UpdateWeights) -> None:
        def done(result: WeightsUpdated | OutriderError) -> None:
            # First, so that the new version is reported before the update is done.
            self._reporter.report(engine, [])
            fields = (None, result) if isinstance(result, OutriderError) else (result, None)
            self._outbox.send(messages.pack(messages.WeightsDone(message.update_id, *fields)))

        try:
            engine.update_weights(message.update, done, message.update_id)
        except OutriderError as error:
            done(error)


def build(config: TargetConfig, reporter: Reporter) -> Assembled:
    """Prepare the draft, then load the model and assemble its engine. Raises `EngineRefused`."""
    connect = prepared_draft(config)
    check_sources(config)
    reporter.found_model()
    # Imported late: PyTorch takes seconds, and wrong names should be refused at once.
    from target_service.assembly import assemble, load_model

    runner = load_model(config)
    if config.captures:
        reporter.loaded_model(runner.vocabulary_size, runner.end_token_ids)
    return assemble(config, runner, reporter, connect)


def serve_engine(descriptor: int, build: Build) -> int:
    """Run what `build` makes for the process at the other end of an inherited socket. Returns the exit status."""
    # Ctrl-C and a supervisor's SIGTERM reach every process of the group. The serving process needs its engine to drain;
    # this one ends after it.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        frames = FrameCutter()
        for message in messages.receive(connection, frames):
            if isinstance(message, messages.Configure):
                configure_logging(message.config.log_level)
                return EngineServer(connection).serve(message.config, frames, build)
    return 1
