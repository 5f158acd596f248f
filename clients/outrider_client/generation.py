"""One running generation: its events as they arrive, then its result."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from outrider.errors import OutriderError
from outrider.sampling import TypicalAcceptance, VerificationMode
from outrider.v1 import target_pb2
from outrider.wire.same_names import message_of, value_of
from outrider.wire.trees import DRAFT_REFUSED_KEY, mode_to_pb, typical_to_pb
from outrider_client.answers import Answer
from outrider_client.carrier import CarriedGenerate
from outrider_client.failures import ServiceUnreachable, typed_error
from outrider_client.policy import Policy
from outrider_client.results import Chunk, RequestTimes, Result, SpeculationTotals, Started, reason_from_pb
from outrider_client.tracing import RequestSpan

# For a call's status behind its last event, which comes with it. Chosen: long for a network, short for a reader.
_END_SECONDS = 2.0
_Call = Any  # grpc.aio.UnaryStreamCall, whose type parameters differ between stub versions.


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are used for one request. None leaves the choice to the target.

    It never changes the output, except with `VerificationMode.TYPICAL`, which the target's operator has to allow;
    `typical` is its rule, with the target's defaults when None. `trees` requests `Chunk.tree`,
    and `token_texts` `Chunk.token_texts`.
    """

    enabled: bool | None = None
    mode: VerificationMode | None = None
    max_nodes: int | None = None
    corpus: str = ""
    typical: TypicalAcceptance | None = None
    trees: bool = False
    token_texts: bool = False

    def to_pb(self) -> target_pb2.SpeculationOptions:
        changed = {"mode": mode_to_pb(self.mode), "typical": typical_to_pb(self.typical)}
        return message_of(target_pb2.SpeculationOptions, self, **changed)


class Generation:
    """A running request. Iterate over it for chunks; `result()` reads the rest and returns the totals.

    Leaving an `async with` block, or `cancel()`, ends the request and frees what it held on the target. Errors are
    those of `outrider.errors`, or `ServiceUnreachable`.

    `started` is the request as the target accepted it; None until the first event has arrived. `draft_refused` is why
    the draft service did not draft for the request, or not to its end: a reason of `outrider.errors`, such as
    "UNKNOWN_CORPUS". Known once the request has ended, also by an error; empty when nothing was refused.

    Example:
        async with client.generate(text="Once upon a time") as generation:
            async for chunk in generation:
                sys.stdout.write(chunk.text)
        result = await generation.result()
    """

    def __init__(
        self, begin: Callable[..., _Call], address: str, span: RequestSpan, *, policy: Policy, timeout: float | None
    ) -> None:
        """`begin` makes the call, given a `timeout`. It runs with the first read, so that times start with the
        request, and again as `policy` allows, within `timeout` seconds in all."""
        self._policy = policy
        self._timeout = timeout
        self._cancelled = asyncio.Event()
        self._begin = begin
        self._address = address
        self._span = span
        self._call: _Call | None = None
        self._begun_at = 0.0
        self.started: Started | None = None
        # The output so far, and when it began.
        self._token_ids: list[int] = []
        self._answer = Answer()
        self._first_token_at: float | None = None
        self._result: Result | None = None
        self.draft_refused = ""
        # Whether a chunk can be taken at once, and what takes it.
        self._taker: tuple[Callable[[], bool], Callable[[Chunk], None]] | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request. Does nothing once it has finished."""
        self._cancelled.set()
        if self._call is not None and self._result is None:
            self._call.cancel()
            self._span.end("CANCELLED")

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they arrive. A second iteration continues where the first stopped."""
        while self._result is None:
            event = await self._read()
            kind = event.WhichOneof("event")
            if kind == "started":
                self.started = Started.from_pb(event.started)
                self._span.started(self.started)
            elif kind == "chunk":
                yield self._noted(event)
            elif kind == "finished":
                self._finish(event.finished)
                await self._read_end()

    def hand_over(self, ready: Callable[[], bool], take: Callable[[Chunk], None]) -> None:
        """Where calls share a stream (`Client.carries`), give further chunks to `take` as they arrive, while somebody
        waits for the next and `ready()`; iterating gives all others. Waking a task costs more than what it does with a
        chunk. What `take` raises ends the iteration."""
        self._taker = ready, take
        self._connect_taker()

    def _connect_taker(self) -> None:
        if self._taker is not None and isinstance(self._call, CarriedGenerate):
            self._call.taker = self._taken

    def _taken(self, event: target_pb2.GenerateResponse) -> bool:
        if self._taker is None or not event.HasField("chunk"):
            return False
        ready, take = self._taker
        if not ready():
            return False
        take(self._noted(event))
        return True

    def _noted(self, event: target_pb2.GenerateResponse) -> Chunk:
        """The chunk of an event, which is a part of the result from now on."""
        chunk = Chunk.from_pb(event.chunk, event.timings)
        if self._first_token_at is None and chunk.token_ids:
            self._first_token_at = time.perf_counter()
        self._token_ids.extend(chunk.token_ids)
        self._answer.add(chunk.parts)
        return chunk

    async def result(self) -> Result:
        """The totals and the whole output, after reading all remaining chunks."""
        async for _ in self:
            pass
        assert self._result is not None
        return self._result

    async def _read(self) -> target_pb2.GenerateResponse:
        if self._call is None:
            event = await self._first_event()
        else:
            try:
                event = await self._call.read()
            except grpc.RpcError as error:
                await self._read_trailers(self._call)
                raise self._failed(typed_error(error, self._address)) from error
        if not isinstance(event, target_pb2.GenerateResponse):
            # gRPC's end-of-stream marker, before the event that must come last.
            raise self._failed(OutriderError("the stream ended without its last event"))
        return event

    async def _first_event(self) -> object:
        """Make the call, and retry as the policy allows: before the first event, nothing is lost."""
        self._begun_at = time.perf_counter()

        async def attempt(left: float | None) -> object:
            if self._cancelled.is_set():
                raise asyncio.CancelledError
            self._call = self._begin(timeout=left)
            self._connect_taker()
            try:
                return await self._call.read()
            except grpc.RpcError as error:
                raise typed_error(error, self._address) from error

        try:
            timeout = math.inf if self._timeout is None else self._timeout
            return await self._policy.call(timeout, attempt, self._cancelled)
        except (OutriderError, ServiceUnreachable) as error:
            raise self._failed(error) from error.__cause__

    async def _read_end(self) -> None:
        """Read the call's status, so that the target does not count the call as cancelled."""
        assert self._call is not None
        # A target that keeps the call open after its last event is not waited for.
        if not self._call.done():
            with contextlib.suppress(grpc.RpcError, TimeoutError):
                await asyncio.wait_for(self._call.read(), _END_SECONDS)
        await self._read_trailers(self._call)
        if self._result is not None and self.draft_refused:
            self._result = replace(self._result, draft_refused=self.draft_refused)

    async def _read_trailers(self, call: _Call) -> None:
        if call.done() and not call.cancelled():
            metadata = await call.trailing_metadata()
            self.draft_refused = str((metadata or {}).get(DRAFT_REFUSED_KEY, ""))

    def _failed(self, error: OutriderError | ServiceUnreachable) -> OutriderError | ServiceUnreachable:
        if isinstance(error, OutriderError):
            self._span.end(error.code.name, error.reason)
        else:
            self._span.end(grpc.StatusCode.UNAVAILABLE.name)
        return error

    def _finish(self, pb: target_pb2.GenerateFinished) -> None:
        ended_at = time.perf_counter()
        matched = pb.WhichOneof("matched")
        self._result = value_of(
            Result,
            pb.usage,
            text=self._answer.text,
            reasoning=self._answer.reasoning,
            tool_calls=self._answer.tool_calls,
            token_ids=tuple(self._token_ids),
            finish_reason=reason_from_pb(pb.finish_reason),
            stop_token_id=pb.stop_token_id if matched == "stop_token_id" else None,
            stop_string=pb.stop_string if matched == "stop_string" else None,
            speculation=SpeculationTotals.from_pb(pb.speculation),
            times=RequestTimes.from_pb(pb.times),
            time_to_first_token=(self._first_token_at or ended_at) - self._begun_at,
            duration=ended_at - self._begun_at,
            trace_id=self._span.trace_id,
            draft_refused="",
        )
        self._span.finished(self._result)
