"""A client of the engine in another process, with the interface of `target_service.engine.engine.Engine`.

Everything here runs on the event loop: it receives reports and sends commands, so that the serving process needs no
thread for its engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from outrider.errors import EngineDead
from outrider.processes.children import exit_status, start_child
from outrider.processes.framing import FrameCutter
from outrider.processes.python import module_command
from outrider.runtime import end_tasks, in_thread_to_leave
from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineObserver, EngineSnapshot, PagesObserver, Sequences
from target_service.core.front import EngineFront
from target_service.core.sequence import SequenceEvent, SequenceFinished, SequenceRequest, SequenceTotals
from target_service.core.weights import UpdateDone, WeightUpdate
from target_service.engine_process import messages
from target_service.grammars import vocabulary
from target_service.preflight import EngineRefused
from target_service.text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

# Longer than any step; one that takes longer hangs.
STOP_SECONDS = 5.0


class EngineLink(EngineFront, asyncio.Protocol):
    """Starts the engine's process and represents it. Requests that `Engine` would refuse are refused here. Construct it
    before the process has threads, then use it as a `lifecycle.EngineHost`."""

    def __init__(
        self,
        config: TargetConfig,
        command: Sequence[str] = module_command("target_service.engine_process"),
        tokenizer: Callable[[], ModelTokenizer] | None = None,
    ) -> None:
        """Start `command` with the number of its socket as last argument. `tokenizer` loads the tokenizer, once the
        model is loaded; without it, only token ids are accepted."""
        super().__init__(config.max_waiting)
        self._frames = FrameCutter()
        self._observer: EngineObserver | None = None
        self._sequences: Sequences | None = None
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()
        self._snapshot = EngineSnapshot(0, 0, 0, 0, 0, speculating=False, draft_connected=False)
        self._stopping = False
        self._updates: dict[int, UpdateDone] = {}
        self._tokenizer = tokenizer
        self._served: ServedModel | None = None
        # Set once the model's files are there.
        self._found = asyncio.Event()
        # Set once its weights are loaded, and what the other process says of them then.
        self._weights_loaded = asyncio.Event()
        self._model: messages.ModelLoaded | None = None
        # Set once the engine is ready, or loading has failed.
        self._loaded = asyncio.Event()
        self._refused: EngineRefused | None = None
        self.draft_info: DraftInfo | None = None
        self._process, self._socket = start_child(command)
        self._socket.sendall(messages.pack(messages.Configure(config)))

    @property
    def pid(self) -> int:
        return self._process.pid

    # `lifecycle.EngineHost`.

    async def load(self) -> ServedModel:
        """Wait until the model is loaded. Raises `EngineRefused` when it cannot be, after the process has ended."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)
        tokenizer = asyncio.create_task(self._load_tokenizer())
        forms = asyncio.create_task(self._prepare_forms(tokenizer))
        try:
            await self._loaded.wait()
            if self._served is None:
                status = await asyncio.to_thread(self._process.wait)
                await self.stop()
                raise self._refused or EngineRefused(1, f"the engine's process ended with status {status}")
            return replace(self._served, tokenizer=await tokenizer)
        finally:
            await end_tasks(tokenizer, forms)

    async def _load_tokenizer(self) -> ModelTokenizer | None:
        """The model's tokenizer, loaded as soon as the other process has pulled the model."""
        await self._found.wait()
        return None if self._tokenizer is None else await in_thread_to_leave(self._tokenizer)

    async def _prepare_forms(self, tokenizer: asyncio.Future[ModelTokenizer | None]) -> None:
        """Do what the first form of output would wait for here, while the other process captures steps."""
        await self._weights_loaded.wait()
        model, known = self._model, await asyncio.shield(tokenizer)
        if model is not None and known is not None:
            of_forms = known, model.vocabulary_size, model.end_token_ids
            await in_thread_to_leave(partial(vocabulary.warm_up, *of_forms))

    async def engine(self, observer: EngineObserver | None) -> EngineLink:
        """This link. `observer` is called on the event loop."""
        self._observer = observer
        return self

    async def start(self, sequences: Sequences) -> None:
        """Dispatch events to `sequences` from now on. The engine is running already."""
        self._sequences = sequences
        self.last_beat_ns = time.monotonic_ns()

    async def stop(self) -> None:
        """Fail the remaining sequences, and end the process; kill it when a step hangs."""
        self.drain()
        self._stopping = True
        if self._transport is not None and self._served is None:
            # While it loads, it ends with its socket.
            self._transport.abort()
        elif self._transport is not None:
            self._send(messages.Stop())
            try:
                await asyncio.wait_for(self._closed.wait(), STOP_SECONDS)
            except TimeoutError:
                logger.error("a step of the engine hangs; leaving without it")
                self._process.kill()
            self._transport.abort()
        await asyncio.to_thread(self._end_process)

    # The interface of `Engine`, see there.

    def submit(self, request: SequenceRequest) -> int:
        sequence_id = self._admit(request, self._snapshot.running + self._snapshot.evicted)
        self._add(sequence_id, request)
        self._send(messages.Submit(sequence_id, request))
        return sequence_id

    def verify(self, sequence_id: int, tree: TokenTree) -> None:
        self.check_tree(sequence_id, tree)
        self._send(messages.Verify(sequence_id, tree))

    def cancel(self, sequence_id: int) -> None:
        if sequence_id in self._open:
            self._send(messages.Cancel(sequence_id))

    def update_weights(self, update: WeightUpdate, done: UpdateDone) -> int:
        """`done` is called on the event loop, also if another update is under way."""
        update_id = self.check_update()
        self._updates[update_id] = done
        self._send(messages.UpdateWeights(update_id, update))
        return update_id

    def cancel_update(self, update_id: int) -> None:
        if self._updates.pop(update_id, None) is not None:
            self._send(messages.CancelUpdate(update_id))

    def snapshot(self) -> EngineSnapshot:
        """The last reported snapshot, with the number of sequences open here. Any thread."""
        return replace(self._snapshot, sequences=len(self._open))

    def _send(self, message: messages.Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.pack(message))

    # `asyncio.Protocol`.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in map(messages.unpack, self._frames.feed(data)):
            if isinstance(message, messages.Report):
                self._receive(message)
            elif isinstance(message, messages.WeightsDone):
                done, result = self._updates.pop(message.update_id, None), message.updated or message.refused
                if done is not None and result is not None:
                    done(result)
            elif isinstance(message, messages.DrafterChanged):
                self.draft_info = message.info
            elif isinstance(message, messages.Dead):
                self._fail(message.reason)
            elif isinstance(message, messages.ModelFound):
                self._found.set()
            elif isinstance(message, messages.ModelLoaded):
                self._model = message
                self._weights_loaded.set()
            elif isinstance(message, messages.Ready):
                self._found.set()
                self._served, self._capacity = message.served, message.served.max_context
                self._loaded.set()
            elif isinstance(message, messages.StartRefused):
                self._refused = EngineRefused(message.status, message.reason)
                self._loaded.set()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._closed.set()
        self._loaded.set()
        if not self._stopping and self._served is not None:
            self._fail("the engine's process has ended")
        self._end_all()

    def _receive(self, report: messages.Report) -> None:
        self._snapshot, self.last_beat_ns = report.snapshot, report.beat_ns
        observer = self._observer
        if observer is not None:
            for stats in report.steps:
                observer.on_step(stats)
            for active in report.switches:
                observer.on_speculation(active)
            if report.pages and isinstance(observer, PagesObserver):
                observer.on_pages(report.pages)
        for sequence_id, totals, outcome in report.ended:
            self._close(sequence_id, totals, outcome)
        for event in report.events:
            if isinstance(event, SequenceFinished):
                self._close(event.sequence_id, event.totals, event.finish.reason.value)
        self._dispatch(report.events)

    def _close(self, sequence_id: int, totals: SequenceTotals, outcome: str) -> None:
        request = self._forget(sequence_id)
        if request is not None and self._observer is not None:
            self._observer.on_finished(sequence_id, request, totals, outcome)

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = EngineDead(reason)
        self._end_all()

    def _end_all(self) -> None:
        """Dispatch the last event of every open sequence, and fail updates that are under way."""
        updates, self._updates = self._updates, {}
        for done in updates.values():
            done(EngineDead("the engine has failed"))
        self._dispatch(self._failed(EngineDead("the engine has failed")))

    def _dispatch(self, events: list[SequenceEvent]) -> None:
        """Dispatch events in a later iteration of the loop, so that an error in a sink does not end the connection."""
        self._observe(events)
        if events and self._sequences is not None:
            asyncio.get_running_loop().call_soon(self._sequences.dispatch, events)

    def _end_process(self) -> None:
        """Close the socket, which ends the process, and kill it if it hangs."""
        self._socket.close()
        status = exit_status(self._process)
        if self.failure is not None:
            logger.error("the engine's process ended with status %d", status)
