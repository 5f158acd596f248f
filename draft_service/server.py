"""The draft service's RPCs: protobuf in, protobuf out, on top of sessions and a drafter."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np

from draft_service.drafters.base import CorpusDrafter, Drafter, device_of
from draft_service.faults import DrafterFailed, FaultLog
from draft_service.frame_reader import Inbox, slices
from draft_service.session import PackedGrowth, ProposeSession, SequenceAdmission
from draft_service.telemetry.metrics import DraftMetrics
from draft_service.telemetry.tracing import StreamTrace
from outrider.busy_polling import BusyPolling
from outrider.errors import Draining, InvalidField, NotSupported, OutriderError, UnknownSequence, check_most
from outrider.serving import current_tenant
from outrider.telemetry.tracing import Tracing
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import (
    advance_from_pb,
    corpus_to_pb,
    failure_to_pb,
    growth_to_pb,
    info_to_pb,
    limits_to_pb,
    open_from_pb,
)
from outrider.wire.frames import MAX_CLOSED_PER_FRAME, MAX_SEQUENCES_PER_FRAME, MAX_VOCABULARY, DraftInfo
from outrider.wire.hidden_states import features_from_pb
from outrider.wire.trees import check_token_ids, name_from_pb

logger = logging.getLogger(__name__)

SERVICE_NAME: str = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
# Of one message of a corpus: 256 kB. Chosen.
MAX_CORPUS_TOKENS = 65536

Result = TypeVar("Result")
Part = TypeVar("Part", draft_pb2.SequenceAdvance, draft_pb2.SequenceFeatures)
ProposeContext = grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """DraftService over one drafter, which all streams share, and the `Worker` behind its server. Runs on one event
    loop.

    A drafter on a GPU runs on a thread of its own, so that frames are read meanwhile. But a stream that keeps up with
    its target calls it on the loop, which wakes no thread for a commit, nor the loop for its growth: a commit was then
    handled after 585 us instead of 714, and whole trees were received after 347 instead of 442 (medians, two cores, the
    link in the engine's process: `benchmarks/results/2026-11-25-cpu-link-hops.md`).
    """

    def __init__(
        self,
        drafter: Drafter,
        admission: SequenceAdmission,
        info: DraftInfo,
        tracing: Tracing | None = None,
        busy_poll_seconds: float = 0.0,
    ) -> None:
        """The event loop polls for `busy_poll_seconds` after each frame."""
        self._drafter = drafter
        self.admission = admission
        self._info = info
        self._faults = FaultLog(info.drafter)
        self.metrics = DraftMetrics(info.drafter, info.version, drafter.stats)
        self._tracing = tracing or Tracing()
        on_gpu = device_of(drafter) != "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter") if on_gpu else None
        # Calls on the thread that may not be done yet.
        self._submitted: list[Future[Any]] = []
        self._streams: set[Inbox] = set()
        self._busy_polling = BusyPolling(busy_poll_seconds)

    def close(self) -> None:
        """Wait for the drafter's thread, so that the drafter can be stopped. Later calls run on the event loop."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def alive(self) -> bool:
        return True

    def failure(self) -> BaseException | None:
        """None: a drafter's failure ends its stream and not the service."""
        return None

    async def drain(self) -> None:
        """Refuse new sequences, wait for the open ones to end, and then end every `Propose` stream with `Draining`:
        targets keep theirs open also without sequences."""
        self.admission.draining = True
        while self.admission.sequences:
            # Seconds between checks whether the last sequence has ended. Chosen, not measured: short beside
            # `drain_seconds`, and a check reads one number.
            await asyncio.sleep(0.05)
        for inbox in self._streams:
            inbox.end(Draining("the draft service has stopped"))

    async def Propose(  # type: ignore[override]
        self, _requests: AsyncIterator[draft_pb2.ProposeRequest], context: ProposeContext
    ) -> None:
        session = ProposeSession(self._drafter, self.admission, current_tenant(), self._faults)
        trace = StreamTrace(self._tracing, context.invocation_metadata(), self._info.drafter)
        stream = _ProposeStream(session, self.metrics, trace, self._faults)
        inbox = Inbox(context.read)
        self.metrics.on_stream(1)
        code, reason = "CANCELLED", ""
        try:
            async with inbox:
                self._streams.add(inbox)
                # Frames that waited mean that the target is ahead: then more are read while these are handled.
                while True:
                    behind = inbox.waiting
                    frames = await inbox.next_frames()
                    if not frames:
                        break
                    *firsts, last = slices(frames)
                    for chunk in firsts:
                        for response in await self._on_drafter(stream.handle_frames, chunk):
                            await context.write(response)
                        # Let other streams run, also if everything is done on the event loop.
                        await asyncio.sleep(0)
                    # The loop reads nothing while it drafts, so it drafts only for one step's commits of the only
                    # stream.
                    at_once = not (behind or firsts) and len(self._streams) == 1 and all(map(_is_of_a_step, last))
                    draft = self._at_once if at_once else self._on_drafter
                    responses = await draft(stream.handle_and_grow, last)
                    while responses:
                        for response in responses:
                            await context.write(response)
                        # New frames go first, so that trees are made for the newest commits.
                        responses = [] if inbox.waiting else await draft(stream.grow)
                    # After the growth is sent: the target waits for it.
                    stream.record()
                    if not self._unfinished():
                        self._busy_polling.start()
            code = "OK"
        except OutriderError as error:
            code, reason = error.code.name, error.reason
            raise
        finally:
            self._streams.discard(inbox)
            # A second cancellation must not leave sequences open.
            await asyncio.shield(self._end(stream, trace, code, reason))

    async def _end(self, stream: _ProposeStream, trace: StreamTrace, code: str, reason: str) -> None:
        """End a stream's sequences, after any work of it on the drafter's thread, and then record it."""
        try:
            await self._on_drafter(stream.end)
        finally:
            stream.record()
            self.metrics.on_stream(-1)
            trace.end(code, reason)

    async def _on_drafter(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call `work`, which uses the drafter, one call after the other: here, or on the drafter's thread if there is
        one, so that frames are read meanwhile."""
        if self._thread is None:
            return work(*arguments)
        # A loop that polls would compete with the thread for the interpreter.
        self._busy_polling.stop()
        call = self._thread.submit(work, *arguments)
        self._submitted = [*self._unfinished(), call]
        return await asyncio.wrap_future(call)

    async def _at_once(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """As `_on_drafter`, but here if the thread is free, which blocks the event loop."""
        return await self._on_drafter(work, *arguments) if self._unfinished() else work(*arguments)

    def _unfinished(self) -> list[Future[Any]]:
        return [call for call in self._submitted if not call.done()]

    async def GetDraftInfo(
        self, _request: draft_pb2.GetDraftInfoRequest, _context: Any
    ) -> draft_pb2.GetDraftInfoResponse:
        return info_to_pb(self._info)

    async def AddCorpus(
        self, requests: AsyncIterator[draft_pb2.AddCorpusRequest], _context: Any
    ) -> draft_pb2.AddCorpusResponse:
        drafter = self._corpus_drafter()
        caller = current_tenant()
        tenant, corpus, tokens, nodes = "", "", 0, 0
        async for request in requests:
            if not tenant:
                tenant = name_from_pb(request.tenant, "tenant") or caller
                corpus = name_from_pb(request.corpus, "corpus")
                self.admission.check_tenant(caller, tenant)
            check_most("token_ids", len(request.token_ids), MAX_CORPUS_TOKENS)
            token_ids = _document(request.token_ids, self._info.vocabulary_size or MAX_VOCABULARY)
            # Off the event loop: streams must not wait for a document.
            inserted = await asyncio.to_thread(drafter.add_corpus, tenant, corpus, token_ids)
            self.metrics.on_corpus(inserted.tokens)
            tokens, nodes = tokens + inserted.tokens, inserted.nodes
        return draft_pb2.AddCorpusResponse(tokens=tokens, nodes=nodes)

    async def ListCorpora(self, request: draft_pb2.ListCorporaRequest, _context: Any) -> draft_pb2.ListCorporaResponse:
        drafter = self._corpus_drafter()
        caller = current_tenant()
        tenant = name_from_pb(request.tenant, "tenant") or caller
        self.admission.check_tenant(caller, tenant)
        return draft_pb2.ListCorporaResponse(corpora=map(corpus_to_pb, drafter.corpora(tenant)))

    async def DeleteCorpus(
        self, request: draft_pb2.DeleteCorpusRequest, _context: Any
    ) -> draft_pb2.DeleteCorpusResponse:
        drafter = self._corpus_drafter()
        caller = current_tenant()
        named = name_from_pb(request.tenant, "tenant")
        corpus = name_from_pb(request.corpus, "corpus")
        if not corpus:
            raise InvalidField("corpus", "is missing")
        self.admission.check_tenant(caller, named or caller)
        owner = None if self.admission.trusts(caller) and not named else named or caller
        # Off the event loop: it waits for earlier documents to be inserted.
        deleted = await asyncio.to_thread(drafter.delete_corpus, owner, corpus)
        logger.info("tenant %s deleted the corpus %s of tenant %s", caller, deleted.name, deleted.owner)
        return draft_pb2.DeleteCorpusResponse(corpus=corpus_to_pb(deleted))

    def _corpus_drafter(self) -> CorpusDrafter:
        """The drafter, if it can learn documents. Raises `NotSupported`."""
        if not isinstance(self._drafter, CorpusDrafter):
            raise NotSupported(f"the drafter {self._info.drafter!r} learns no corpora")
        return self._drafter


def _is_of_a_step(frame: draft_pb2.ProposeRequest) -> bool:
    """Whether a frame has the commits of one step, or is handled at once: not prompts and their hidden states, for
    which a drafter may have to compile or capture something."""
    return frame.WhichOneof("frame") in ("advance", "close", "credit")


class _ProposeStream:
    """Translates the frames of one stream. A bad part of a frame fails its own sequence only.

    Methods run where the drafter runs, but for `record`: it runs on the event loop, while no other method of the stream
    does, and updates the metrics and the totals of spans.
    """

    def __init__(self, session: ProposeSession, metrics: DraftMetrics, trace: StreamTrace, faults: FaultLog) -> None:
        self._session = session
        self._metrics = metrics
        self._trace = trace
        self._faults = faults
        # Calls that `record` makes, in order.
        self._records: list[Callable[[], None]] = []

    def handle_frames(self, frames: Iterable[draft_pb2.ProposeRequest]) -> list[draft_pb2.ProposeResponse]:
        return [response for frame in frames for response in self.handle_frame(frame)]

    def handle_and_grow(self, frames: Iterable[draft_pb2.ProposeRequest]) -> list[draft_pb2.ProposeResponse]:
        """Handle frames in order; returns their immediate responses, or else a frame of growth, if any is due.

        Both in one call on the drafter's thread, and without looking for further frames: with eight sequences one was
        always waiting, and growth that waited for the last never came.
        """
        return self.handle_frames(frames) or self.grow()

    def handle_frame(self, frame: draft_pb2.ProposeRequest) -> list[draft_pb2.ProposeResponse]:
        """Handle one frame; returns its immediate responses. Raises `InvalidField` for an unknown kind of frame."""
        kind = frame.WhichOneof("frame")
        if kind == "advance":
            return self._advance(frame.advance)
        if kind == "open":
            return [self._open(frame.open)]
        if kind == "close":
            check_most("close.sequence_ids", len(frame.close.sequence_ids), MAX_CLOSED_PER_FRAME)
            before = len(self._session)
            self._session.close(frame.close.sequence_ids)
            self._note(self._metrics.on_closed, before - len(self._session), aborted=False)
            self._trace.closed(frame.close.sequence_ids)
            return []
        if kind == "credit":
            self._session.grant(frame.credit.frames)
            return []
        if kind == "features":
            return self._features(frame.features)
        raise InvalidField("frame", "is not set, or of a kind unknown here")

    def grow(self) -> list[draft_pb2.ProposeResponse]:
        """One frame of growth, if any is due and there is credit for it; statuses of sequences whose growth failed."""
        awaiting_since, started = self._session.awaiting_since_ns, time.monotonic_ns()
        try:
            growths = self._session.propose_packed()
        except DrafterFailed as failed:
            return self._all_failed(failed)
        if not growths:
            return []
        response, failures = draft_pb2.ProposeResponse(), list[draft_pb2.ProposeResponse]()
        if isinstance(growths, PackedGrowth):
            sequence_ids, nodes = growths.sequence_ids, growths.nodes
            response.growth.MergeFromString(growths.message)
        else:
            sequence_ids, nodes = [], []
            for growth in growths:
                try:
                    response.growth.sequences.append(growth_to_pb(growth))
                # A tree of numbers that no message takes; see `_open`.
                except Exception as error:
                    failures.append(self._failed(growth.sequence_id, error))
                else:
                    sequence_ids.append(growth.sequence_id)
                    nodes.append(len(growth.token_ids))
            if not nodes:
                # The frame that its credit was for does not come.
                self._session.grant(1)
                return failures
        queue_ns, compute_ns = max(0, started - awaiting_since), time.monotonic_ns() - started
        self._note(self._metrics.on_growth, len(nodes), sum(nodes), queue_ns, compute_ns)
        if self._trace.follows:
            for sequence_id, count in zip(sequence_ids, nodes, strict=True):
                self._note(self._trace.grown, sequence_id, count, compute_ns)
        response.timings.queue_nanoseconds, response.timings.compute_nanoseconds = queue_ns, compute_ns
        return [*failures, response]

    def end(self) -> None:
        """End every sequence; those that were not closed count as aborted, also after a clean end of the stream."""
        self._note(self._metrics.on_closed, len(self._session), aborted=True)
        self._session.end()

    def record(self) -> None:
        """Update metrics and traces with everything since the last call."""
        records, self._records = self._records, []
        for record in records:
            record()

    def _note(self, record: Callable[..., None], *arguments: object, **named: object) -> None:
        self._records.append(partial(record, *arguments, **named))

    def _open(self, pb: draft_pb2.OpenSequence) -> draft_pb2.ProposeResponse:
        try:
            sequence = open_from_pb(pb, self._session.max_context)
            limits, features_from = self._session.open(sequence)
        # A bug in one sequence must not end the stream, which may carry every request of the target.
        except Exception as error:
            return self._failed(pb.sequence_id, error)
        self._note(self._metrics.on_opened, len(sequence.token_ids))
        self._trace.opened(sequence)
        opened = draft_pb2.SequenceOpened(
            sequence_id=pb.sequence_id, limits=limits_to_pb(limits), features_from=features_from
        )
        return draft_pb2.ProposeResponse(opened=opened)

    def _advance(self, frame: draft_pb2.AdvanceSequences) -> list[draft_pb2.ProposeResponse]:
        session, trace, advanced, tokens = self._session, self._trace, 0, 0

        def take(pb: draft_pb2.SequenceAdvance, path: str) -> None:
            nonlocal advanced, tokens
            advance = advance_from_pb(pb, session.vocabulary_of(pb.sequence_id), path)
            session.advance(advance)
            advanced, tokens = advanced + 1, tokens + len(advance.token_ids)
            if trace.follows:
                trace.advanced(advance.sequence_id, len(advance.token_ids))

        failures = self._handle_parts(frame.sequences, take, "advance.sequences")
        self._note(self._metrics.on_advanced, advanced, tokens)
        return failures

    def _features(self, frame: draft_pb2.SendFeatures) -> list[draft_pb2.ProposeResponse]:
        def take(pb: draft_pb2.SequenceFeatures, path: str) -> None:
            self._session.vocabulary_of(pb.sequence_id)
            self._session.add_features(features_from_pb(pb, path))

        failures = self._handle_parts(frame.sequences, take, "features.sequences")
        try:
            self._session.absorb(pb.sequence_id for pb in frame.sequences)
        except DrafterFailed as failed:
            failures += self._all_failed(failed)
        return failures

    def _handle_parts(
        self, parts: Sequence[Part], take: Callable[[Part, str], None], path: str
    ) -> list[draft_pb2.ProposeResponse]:
        """Call `take` with each sequence's part of a frame and its field path; returns statuses of those that failed,
        and one for all sequences that are not open: the target got a status for each when it failed, or closed it
        itself."""
        check_most(path, len(parts), MAX_SEQUENCES_PER_FRAME)
        failures: list[draft_pb2.ProposeResponse] = []
        unknown: list[int] = []
        for i, pb in enumerate(parts):
            try:
                take(pb, f"{path}[{i}]")
            except UnknownSequence:
                unknown.append(pb.sequence_id)
            # See `_open`.
            except Exception as error:
                failures.append(self._failed(pb.sequence_id, error))
        if unknown:
            missing = UnknownSequence("the sequence is not open on this stream", others=len(unknown) - 1)
            failures.append(self._failed(unknown[0], missing))
        return failures

    def _all_failed(self, failed: DrafterFailed) -> list[draft_pb2.ProposeResponse]:
        error = self._faults.refusal(failed.error)
        return [self._failed(sequence_id, error) for sequence_id in failed.sequence_ids]

    def _failed(self, sequence_id: int, error: Exception) -> draft_pb2.ProposeResponse:
        """Close a sequence that failed; returns its status. A bug is logged, and its text is not sent."""
        error = self._faults.refusal(error)
        before = len(self._session)
        self._session.close([sequence_id])
        self._note(self._metrics.on_closed, before - len(self._session), aborted=True)
        self._note(self._metrics.on_failed, error.reason)
        self._trace.failed(sequence_id, error.reason)
        return draft_pb2.ProposeResponse(status=failure_to_pb(sequence_id, error))


def _document(token_ids: Sequence[int], vocabulary_size: int) -> array[int]:
    """A document's tokens as a C array: to make and compare 65,536 Python integers would block every stream for 3 ms.
    Raises `InvalidField` for one outside [0, vocabulary_size)."""
    ids = np.array(token_ids, np.int64)
    if len(ids) and int(ids.max()) >= vocabulary_size:
        check_token_ids(tuple(token_ids), vocabulary_size, "token_ids")
    return array("i", ids.astype(np.int32).tobytes())
