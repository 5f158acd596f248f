"""The sequences of one Verify stream: the step that each expects next, and repeated frames."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from outrider import errors
from outrider.errors import OutriderError
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import tree_from_pb
from target_service.api import replies
from target_service.api.admission import Admission
from target_service.config import TargetConfig
from target_service.core.events import Sequences
from target_service.core.sequence import SequenceEvent, SequenceFailed, SequenceFinished, StepVerdict
from target_service.telemetry.tracing import RequestTrace


@dataclass(slots=True)
class _Verification:
    """One sequence: the step that is due next, and the answer for a repeated frame. At most one step is under way:
    `pending` is the digest of its tree."""

    trace: RequestTrace
    length: int
    active_at: float
    step: int = 0
    pending: bytes | None = None
    answered: bytes | None = None
    answer: pb.VerifyResponse | None = None
    ended: bool = False


@dataclass(eq=False)
class VerifyStream:
    """Translates the frames of one stream. Belongs to the event loop; `next` ends when `read` has."""

    config: TargetConfig
    sequences: Sequences
    admission: Admission
    tenant: str
    # Begins the span of a sequence.
    trace: Callable[[], RequestTrace]
    _verifications: dict[int, _Verification] = field(default_factory=dict, init=False)
    _outbox: asyncio.Queue[pb.VerifyResponse | None] = field(default_factory=asyncio.Queue, init=False)
    _taken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # Set after each event of a sequence.
    _progress: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def next(self) -> pb.VerifyResponse | None:
        """The next response; None after the last."""
        response = await self._outbox.get()
        self._taken.set()
        return response

    async def read(self, frames: AsyncIterator[pb.VerifyRequest]) -> None:
        """Handle frames until they end, and wait for the verdicts that are due then. Sequences that were not closed are
        aborted after that. Reading pauses while more answers wait than the client may have sequences."""
        try:
            async for frame in frames:
                await self._handle(frame)
                while self._outbox.qsize() > self.config.max_sequences_per_stream:
                    self._taken.clear()
                    await self._taken.wait()
            # A client that has sent its last tree may still want the verdict. Where it has cancelled the call instead,
            # which ends the frames too, this task is cancelled.
            while any(verification.pending is not None for verification in self._verifications.values()):
                self._progress.clear()
                await self._progress.wait()
        finally:
            self.abort()
            self._outbox.put_nowait(None)

    async def reap(self) -> None:
        """End sequences whose client has sent no tree for too long, since they hold pages."""
        idle = self.config.verify_idle_seconds
        while True:
            await asyncio.sleep(idle / 4)
            oldest = time.monotonic() - idle
            for sequence_id, verification in list(self._verifications.items()):
                if verification.pending is None and verification.active_at < oldest:
                    self._close(sequence_id)
                    if not verification.ended:
                        error = errors.DeadlineExceeded("no tree came in time", idle_seconds=idle)
                        self._send(replies.failed(error, sequence_id=sequence_id, step=verification.step))

    def abort(self) -> None:
        for sequence_id in list(self._verifications):
            self._close(sequence_id)

    async def _handle(self, frame: pb.VerifyRequest) -> None:
        kind = frame.WhichOneof("frame")
        try:
            if kind == "open":
                await self._open(frame.open)
            elif kind == "tree":
                self._verify(frame.tree)
            elif kind == "close":
                self._close(frame.close.sequence_id)
            else:
                raise errors.InvalidField("frame", "one of open, tree and close must be set")
        except OutriderError as error:
            sequence_id, step = frame.tree.sequence_id, frame.tree.step
            client_tag = frame.open.client_tag
            self._send(replies.failed(error, sequence_id=sequence_id, client_tag=client_tag, step=step))

    async def _open(self, frame: pb.OpenVerification) -> None:
        if len(self._verifications) >= self.config.max_sequences_per_stream:
            ended = next((one for one, verification in self._verifications.items() if verification.ended), None)
            if ended is None:
                limit = self.config.max_sequences_per_stream
                raise errors.QuotaExceeded("too many sequences on this stream", limit=limit)
            del self._verifications[ended]
        trace, served = self.trace(), self.admission.served
        try:
            request = await self.admission.verification(frame, self.tenant, trace.traceparent)
            sequence_id = self.sequences.submit(request, self._on_event)
        except OutriderError as error:
            trace.failed(error)
            raise
        trace.accepted(sequence_id, request, served.name)
        self._verifications[sequence_id] = _Verification(trace, len(request.token_ids), time.monotonic())
        self._send(replies.opened(frame.client_tag, sequence_id, request, served.max_rows))

    def _verify(self, frame: pb.VerifyTree) -> None:
        verification = self._verifications.get(frame.sequence_id)
        if verification is None:
            raise errors.UnknownSequence("the sequence is not open on this stream")
        digest = hashlib.blake2b(frame.tree.SerializeToString(deterministic=True), digest_size=16).digest()
        if self._is_repeated(frame.step, digest, verification):
            return
        if verification.ended:
            raise errors.UnknownSequence("the sequence has ended")
        served = self.admission.served
        tree = tree_from_pb(frame.tree, served.vocabulary_size, served.max_rows, "tree")
        if verification.length + max(tree.depths) > served.max_context:
            raise errors.PositionOutOfRange("the tree reaches past the context", limit=served.max_context)
        self.sequences.engine.verify(frame.sequence_id, tree)
        verification.pending = digest
        verification.active_at = time.monotonic()

    def _is_repeated(self, step: int, digest: bytes, verification: _Verification) -> bool:
        """Whether the frame was sent before. Its verdict is then sent again, unless it is still under verification."""
        due = verification.step
        if step > due:
            raise errors.StepSkipped("the step lies ahead", step=step, due=due)
        if step == due:
            if verification.pending not in (None, digest):
                raise errors.StepReplayed("another tree is under verification for this step", step=step)
            return verification.pending is not None
        if step < due - 1 or digest != verification.answered or verification.answer is None:
            raise errors.StepReplayed("the step was answered, for another tree or too long ago", step=step, due=due)
        self._send(verification.answer)
        return True

    def _close(self, sequence_id: int) -> None:
        verification = self._verifications.pop(sequence_id, None)
        if verification is not None:
            self.sequences.cancel(sequence_id)
            verification.trace.abandoned(None)

    def _on_event(self, event: SequenceEvent) -> None:
        verification = self._verifications.get(event.sequence_id)
        if verification is None:
            return
        self._progress.set()
        if isinstance(event, StepVerdict):
            verification.length += len(event.token_ids)
            verification.step = event.step + 1
            verification.answered, verification.pending = verification.pending, None
            verification.answer = replies.verdict(event)
            verification.ended = event.finish is not None
            verification.active_at = time.monotonic()
            verification.trace.step(event)
            self._send(verification.answer)
        elif isinstance(event, SequenceFinished):
            verification.trace.finished(event.finish, event.totals)
        elif isinstance(event, SequenceFailed):
            del self._verifications[event.sequence_id]
            verification.trace.failed(event.error)
            self._send(replies.failed(event.error, sequence_id=event.sequence_id, step=verification.step))

    def _send(self, response: pb.VerifyResponse) -> None:
        self._outbox.put_nowait(response)
