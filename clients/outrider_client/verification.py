"""Sessions for clients that draft themselves: they send trees, the target returns verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import grpc

from outrider.errors import OutriderError
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import TokenTree
from outrider.v1 import target_pb2
from outrider.wire.trees import error_of, mode_from_pb, mode_to_pb, sampling_to_pb, tree_to_pb, typical_to_pb
from outrider_client.blocks import AsyncClosing
from outrider_client.failures import ServiceUnreachable, typed_error, typed_errors
from outrider_client.results import FinishReason, Verdict

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

        After an error about the tree (`InvalidField`, `WrongRoot`) the sequence is unchanged.
        """
        verdict = await self._session._verify(self.sequence_id, self.step, tree)
        self.token_ids.extend(verdict.token_ids)
        self.step = verdict.next_step
        self.finish_reason = verdict.finish_reason
        return verdict

    async def close(self) -> None:
        """End the sequence and free its cache. Does nothing for one that has finished."""
        if self.finish_reason is None:
            await self._session._close_sequence(self.sequence_id)


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
        self._open: set[int] = set()
        # A stream allows one write at a time.
        self._writing = asyncio.Lock()
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
        frame = target_pb2.VerifyRequest(
            open=target_pb2.OpenVerification(
                client_tag=tag,
                token_ids=token_ids,
                sampling=sampling_to_pb(sampling or SamplingParams()),
                mode=mode_to_pb(mode),
                typical=typical_to_pb(typical),
            )
        )
        opened: target_pb2.VerificationOpened = await self._request(("opened", tag), frame)
        self._open.add(opened.sequence_id)
        return VerifiedSequence(self, opened, list(token_ids))

    async def close(self) -> None:
        """End every open sequence, then the stream."""
        if self._failure is None and not self._reader.done():
            with contextlib.suppress(OutriderError, ServiceUnreachable):
                for sequence_id in tuple(self._open):
                    await self._close_sequence(sequence_id)
                with typed_errors(self._address):
                    await self._call.done_writing()
        else:
            self._call.cancel()
        # The target ends the stream when it has read the end of our side; else it is cancelled.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), 2.0)
        self._call.cancel()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _verify(self, sequence_id: int, step: int, tree: TokenTree) -> Verdict:
        frame = target_pb2.VerifyRequest(
            tree=target_pb2.VerifyTree(sequence_id=sequence_id, step=step, tree=tree_to_pb(tree))
        )
        verdict: Verdict = await self._request(("verdict", sequence_id), frame)
        if verdict.finish_reason is not None:
            self._open.discard(sequence_id)
        return verdict

    async def _close_sequence(self, sequence_id: int) -> None:
        self._open.discard(sequence_id)
        await self._write(target_pb2.VerifyRequest(close=target_pb2.CloseVerification(sequence_id=sequence_id)))

    async def _request(self, key: _Key, frame: target_pb2.VerifyRequest) -> Any:
        if self._failure is not None:
            raise self._failure
        if key in self._waiting:
            raise RuntimeError("a sequence takes one tree at a time")
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            await self._write(frame)
            return await answer
        finally:
            del self._waiting[key]
            # The reader may have set an exception while the write failed too; asyncio logs those not retrieved.
            if answer.done() and not answer.cancelled():
                answer.exception()

    async def _write(self, frame: target_pb2.VerifyRequest) -> None:
        try:
            async with self._writing:
                await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The reader gets the reason why the call ended; a write to an ended call does not.
            await asyncio.wait({self._reader})
            raise self._failure or ServiceUnreachable(self._address, "the stream has ended") from None

    async def _read_all(self) -> None:
        failure: OutriderError | ServiceUnreachable
        try:
            while isinstance(response := await self._call.read(), target_pb2.VerifyResponse):
                self._deliver(response)
            failure = ServiceUnreachable(self._address, "the stream has ended")
        except grpc.RpcError as error:
            failure = typed_error(error, self._address)
        self._failure = failure
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(failure)

    def _deliver(self, response: target_pb2.VerifyResponse) -> None:
        kind = response.WhichOneof("frame")
        if kind == "opened":
            self._resolve(("opened", response.opened.client_tag), response.opened)
        elif kind == "verdict":
            self._resolve(("verdict", response.verdict.sequence_id), Verdict.from_pb(response.verdict))
        elif kind == "status":
            status = response.status
            key = ("verdict", status.sequence_id) if status.sequence_id else ("opened", status.client_tag)
            self._resolve(key, error_of(status.status))

    def _resolve(self, key: _Key, outcome: object) -> None:
        answer = self._waiting.get(key)
        if answer is None or answer.done():
            return
        if isinstance(outcome, OutriderError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
