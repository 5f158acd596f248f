"""Sessions for clients that draft themselves: they send trees, the target returns verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import grpc

from outrider.errors import OutriderError, UnknownSequence
from outrider.runtime import end_tasks
from outrider.sampling import FinishReason, SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import TokenTree
from outrider.v1 import target_pb2
from outrider.wire.trees import error_of, mode_from_pb, mode_to_pb, sampling_to_pb, tree_to_pb, typical_to_pb
from outrider_client.connection import AsyncClosing
from outrider_client.failures import ServiceUnreachable, cancellations, typed_error
from outrider_client.results import Verdict

_Call = Any  # grpc.aio.StreamStreamCall, whose type parameters differ between stub versions.
# ("opened", client tag) or ("verdict", sequence id).
_Key = tuple[str, int]


class VerifiedSequence:
    """A sequence that the client drafts for. `token_ids` is the prompt and everything committed since."""

    def __init__(self, session: VerifySession, opened: target_pb2.VerificationOpened, token_ids: list[int]) -> None:
        self._session = session
        self.sequence_id = opened.sequence_id
        self.step = opened.step
        self.seed = opened.seed
        self.mode = mode_from_pb(opened.mode)
        self.max_rows = opened.max_rows
        self.token_ids = token_ids
        self.finish_reason: FinishReason | None = None

    @property
    def root(self) -> int:
        """The last committed token: the root of the next tree."""
        return self.token_ids[-1]

    async def verify(self, tree: TokenTree) -> Verdict:
        """One step: the rows of `tree` (at most `max_rows`) that the target accepts, and its own next token.

        After an error about the tree (`InvalidField`, `WrongRoot`) the sequence is unchanged. A cancelled step goes on
        at the target: the next is refused with `RuntimeError` until its verdict has come, and then begins after it.
        """
        request = target_pb2.VerifyTree(sequence_id=self.sequence_id, step=self.step, tree=tree_to_pb(tree))
        answer = self._session._request(("verdict", self.sequence_id), target_pb2.VerifyRequest(tree=request))
        verdict: Verdict = await asyncio.shield(answer)
        return verdict

    async def close(self) -> None:
        """End the sequence and free its cache. Does nothing for one that has finished."""
        if self.finish_reason is None:
            session, sequence_id = self._session, self.sequence_id
            session._open.pop(sequence_id, None)
            # The target sends no verdict any more.
            session._resolve(("verdict", sequence_id), UnknownSequence("the sequence is closed"))
            await asyncio.shield(session._begin_write(_close_frame(sequence_id)))


class VerifySession(AsyncClosing):
    """One `Verify` stream, which carries many sequences.

    Example:
        async with client.verify() as session:
            sequence = await session.open([1, 5, 9])
            while sequence.finish_reason is None:
                await sequence.verify(my_drafter.tree(sequence.token_ids))
    """

    def __init__(self, call: _Call, address: str) -> None:
        self._call = call
        self._address = address
        self._tags = itertools.count(1)
        self._waiting: dict[_Key, asyncio.Future[Any]] = {}
        self._open: dict[int, VerifiedSequence] = {}
        # A stream allows one write at a time.
        self._writing = asyncio.Lock()
        # Event loops hold their tasks weakly.
        self._writes: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read_all())
        self._failure: OutriderError | ServiceUnreachable | None = None

    async def open(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        mode: VerificationMode | None = None,
        typical: TypicalAcceptance | None = None,
    ) -> VerifiedSequence:
        """Start a sequence from a prompt of at least one token, whose last is the first root. `typical` is the rule for
        mode TYPICAL."""
        tag = next(self._tags)
        opening = target_pb2.OpenVerification(
            client_tag=tag,
            token_ids=token_ids,
            sampling=sampling_to_pb(sampling or SamplingParams()),
            mode=mode_to_pb(mode),
            typical=typical_to_pb(typical),
        )
        answer = self._request(("opened", tag), target_pb2.VerifyRequest(open=opening))
        try:
            opened: target_pb2.VerificationOpened = await asyncio.shield(answer)
        except asyncio.CancelledError:
            # The target opens it all the same.
            answer.add_done_callback(self._close_unwanted)
            raise
        sequence = self._open[opened.sequence_id] = VerifiedSequence(self, opened, list(token_ids))
        return sequence

    async def close(self) -> None:
        """End every open sequence, then the stream. Steps under way fail."""
        try:
            if not self._reader.done():
                with contextlib.suppress(OutriderError, ServiceUnreachable):
                    for sequence_id in tuple(self._open):
                        await asyncio.shield(self._begin_write(_close_frame(sequence_id)))
                    await asyncio.shield(self._begin_write(None))
                # The target ends the stream when it has read the end of our side; else it is cancelled.
                await asyncio.wait({self._reader}, timeout=2.0)
        finally:
            self._call.cancel()
            await end_tasks(self._reader)

    def _close_unwanted(self, answer: asyncio.Future[Any]) -> None:
        if answer.exception() is None:
            self._begin_write(_close_frame(answer.result().sequence_id)).add_done_callback(_retrieve)

    def _request(self, key: _Key, frame: target_pb2.VerifyRequest) -> asyncio.Future[Any]:
        """Send a frame. Its answer stays awaited when the caller is cancelled, so that no other caller gets it."""
        if self._failure is not None:
            raise self._failure
        if key in self._waiting:
            raise RuntimeError("a sequence takes one tree at a time")

        def written(write: asyncio.Task[None]) -> None:
            if not write.cancelled() and (error := write.exception()) is not None:
                self._resolve(key, error)

        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_retrieve)
        self._begin_write(frame).add_done_callback(written)
        return answer

    def _begin_write(self, frame: target_pb2.VerifyRequest | None) -> asyncio.Task[None]:
        """Write in a task of its own: gRPC cancels the whole stream when the task that writes is cancelled."""
        write = asyncio.create_task(self._write_now(frame))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def _write_now(self, frame: target_pb2.VerifyRequest | None) -> None:
        """Write a frame, or with None the end of our side."""
        try:
            async with self._writing:
                if frame is None:
                    await self._call.done_writing()
                else:
                    await self._call.write(frame)
        except (grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            # gRPC raises the last for a call that was cancelled, too.
            if isinstance(error, asyncio.CancelledError) and cancellations():
                raise
            # The reader gets the reason why the call ended; a write to an ended call does not.
            await asyncio.wait({self._reader})
            raise self._failure or self._ended() from None

    def _ended(self) -> ServiceUnreachable:
        return ServiceUnreachable(self._address, "the stream has ended")

    async def _read_all(self) -> None:
        failure: OutriderError | ServiceUnreachable = self._ended()
        try:
            while isinstance(response := await self._call.read(), target_pb2.VerifyResponse):
                self._deliver(response)
        except grpc.RpcError as error:
            failure = typed_error(error, self._address)
        finally:
            # Also when the call was cancelled, here or by the end of the connection.
            self._failure = failure
            for key in tuple(self._waiting):
                self._resolve(key, failure)

    def _deliver(self, response: target_pb2.VerifyResponse) -> None:
        kind = response.WhichOneof("frame")
        if kind == "opened":
            self._resolve(("opened", response.opened.client_tag), response.opened)
        elif kind == "verdict":
            self._take(Verdict.from_pb(response.verdict))
        elif kind == "status":
            status = response.status
            key = ("verdict", status.sequence_id) if status.sequence_id else ("opened", status.client_tag)
            self._resolve(key, error_of(status.status))

    def _take(self, verdict: Verdict) -> None:
        """The sequence goes on after the verdict, also where the caller waits for it no more."""
        key = ("verdict", verdict.sequence_id)
        sequence = self._open.get(verdict.sequence_id)
        if sequence is not None and key in self._waiting:
            sequence.token_ids.extend(verdict.token_ids)
            sequence.step, sequence.finish_reason = verdict.next_step, verdict.finish_reason
            if verdict.finish_reason is not None:
                del self._open[verdict.sequence_id]
        self._resolve(key, verdict)

    def _resolve(self, key: _Key, outcome: object) -> None:
        answer = self._waiting.pop(key, None)
        if answer is None:
            return
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


def _close_frame(sequence_id: int) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(close=target_pb2.CloseVerification(sequence_id=sequence_id))


def _retrieve(done: asyncio.Future[Any]) -> None:
    """asyncio logs exceptions that are never retrieved, and cancelled callers leave theirs."""
    if not done.cancelled():
        done.exception()
