"""Many calls of one method on one stream. Each is run by the method's own handler inside all interceptors, so it is
authenticated, counted, refused and ended as a call of its own is; only its responses travel with those of others.

gRPC takes some 40 us of a processor for each message of a stream, at either end
(`benchmarks/results/2026-11-27-cpu-door.md`). Here one message has what all calls have to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from outrider.admission.pacing import RefusalPace
from outrider.errors import InvalidField, OutriderError, QuotaExceeded, check_most
from outrider.runtime import end_tasks
from outrider.serving.calls import MAX_METADATA_BYTES
from outrider.serving.interceptors import Context, Continuation, Handler, Proceed, guarded
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import status_of

logger = logging.getLogger(__name__)
_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['TargetService'].full_name}"
# Entries of each list in one message of the caller, as documented in target.proto: reading small ones takes long, and a
# hundred times their bytes. Chosen: our clients write fewer.
_MOST_ORDERS = 4096
# Ends that are not sent before further calls begin: a caller that reads none holds no more. Chosen, not measured.
_MOST_UNSENT = 256
# Bytes that HTTP/2 counts for an entry of metadata beside its own.
_ENTRY_BYTES = 32
# What a call has to say now, and whether that is its last. May raise what ends the call.
Source = Callable[[], tuple[list[bytes], bool]]


class CarriedContext(grpc.aio.ServicerContext[Any, Any]):
    """What a handler sees of a carried call, in place of gRPC's own context."""

    def __init__(self, call: pb.CarriedCall, handler: Handler, carrier: Context, mark: Callable[[], None]) -> None:
        """`mark` is called when there is something to send."""
        self.number = call.call
        self.paused = self.cancelled_by_caller = self.expired = False
        self.end: pb.CarriedEnd | None = None
        self.task: asyncio.Task[None] | None = None
        self._request: bytes | None = call.request
        self._metadata = tuple(_entry(pair) for pair in call.metadata)
        self._handler, self._carrier, self._mark = handler, carrier, mark
        timeout = call.timeout_nanoseconds / 1e9 if call.HasField("timeout_nanoseconds") else None
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._outgoing: list[bytes] = []
        self._source: Source | None = None
        # Done with the last response of `_source`.
        self._all_sent: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._code: grpc.StatusCode | None = None
        self._details, self._trailing = "", tuple[tuple[str, str | bytes], ...]()

    async def send_from(self, source: Source) -> None:
        """Send what `source` returns whenever `has_more` was called, until it returns its last. Raises what it does."""
        self._source, self._all_sent = source, asyncio.get_running_loop().create_future()
        self._mark()
        await self._all_sent

    def has_more(self) -> None:
        """The source has further responses."""
        self._mark()

    def pending(self) -> list[bytes]:
        """The responses to send now."""
        if self._outgoing:
            responses, self._outgoing = self._outgoing, []
        else:
            responses = []
        all_sent = self._all_sent
        if self._source is None or all_sent is None or all_sent.done():
            return responses
        try:
            further, last = self._source()
        # Raised again in `send_from`, where the handler waits.
        except Exception as error:
            all_sent.set_exception(error)
        else:
            responses += further
            if last:
                all_sent.set_result(None)
        return responses

    @property
    def has_said_all(self) -> bool:
        """Whether `send_from` is about to return."""
        return self._all_sent is not None and self._all_sent.done()

    def pause(self) -> None:
        self.paused = True
        self._room.clear()

    def resume(self) -> None:
        self.paused = False
        self._room.set()
        self._mark()

    def seconds_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def ended(self, code: grpc.StatusCode, message: str = "") -> None:
        """End the call with a status, unless it was aborted with one."""
        final = self._code or code
        trailing = [_pair(key, value) for key, value in self._trailing]
        details = self._details if self._code is not None else message
        self.end = pb.CarriedEnd(call=self.number, code=final.value[0], message=details, trailing_metadata=trailing)
        self._mark()

    def refuse(self, error: OutriderError) -> None:
        """End a call that no handler will see."""
        self.drop_request()
        status = rpc_status.to_status(status_of(error))
        self._trailing = tuple(status.trailing_metadata)
        self.ended(status.code, status.details)

    def drop_request(self) -> None:
        """Free what nobody will read."""
        self._request = None

    # What handlers and interceptors use of gRPC's context.

    async def read(self) -> Any:
        request, self._request = self._request, None
        if request is None:
            return grpc.aio.EOF
        parse = self._handler.request_deserializer
        return request if parse is None else parse(request)

    async def write(self, message: Any) -> None:
        await self._room.wait()
        serialise = self._handler.response_serializer
        self._outgoing.append(message if serialise is None else serialise(message))
        self._mark()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self._code, self._details = code, details
        self._trailing = tuple(trailing_metadata) or self._trailing
        raise grpc.aio.AbortError("the carried call was aborted")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details or "", status.trailing_metadata or ())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self._trailing

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> Any:
        left = self.seconds_left()
        return None if left is None else max(0.0, left)

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def peer(self) -> str:
        return self._carrier.peer()

    def peer_identities(self) -> Any:
        return self._carrier.peer_identities()

    def peer_identity_key(self) -> Any:
        return self._carrier.peer_identity_key()

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self._carrier.auth_context()

    def done(self) -> bool:
        return self.end is not None

    def cancelled(self) -> bool:
        return self.cancelled_by_caller

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Do nothing: there is none beside the stream's own."""

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Do nothing: the stream's own holds."""

    def disable_next_message_compression(self) -> None:
        """Do nothing: the stream's own holds."""


@dataclass(slots=True)
class _Said:
    """What goes into one message: responses of calls, their bytes, and ends; `last` is whether a call's last response
    is among them without its end."""

    calls: list[int] = field(default_factory=list)
    responses: list[bytes] = field(default_factory=list)
    ends: list[pb.CarriedEnd] = field(default_factory=list)
    size: int = 0
    last: bool = False


class CarriedCalls:
    """The calls on one stream. As many run at once as on a connection without it; further ones are refused, each by
    itself, and the stream is read no faster than refusals are sent."""

    def __init__(self, handler: Handler, context: Context, most: int) -> None:
        self._handler, self._context, self._most = handler, context, most
        self._running: dict[int, CarriedContext] = {}
        self._latest = 0
        # Those with something to send, each once.
        self._ready: dict[int, CarriedContext] = {}
        self._changed, self._sent = asyncio.Event(), asyncio.Event()
        self._finishing = False
        # One at a time waits.
        self._pace = RefusalPace(1)

    async def serve(self) -> None:
        """Run the calls until all have ended, once there are no further ones or `finish` was called."""
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            await self._write(reading)
        finally:
            await end_tasks(reading, *[call.task for call in self._running.values() if call.task is not None])

    def finish(self) -> None:
        """End the stream when no call on it runs any more."""
        self._finishing = True
        self._changed.set()

    async def _read(self) -> None:
        while (orders := await self._context.read()) is not grpc.aio.EOF:
            await self._follow(orders)
            # Else it would be kept until the next one.
            del orders
        # No message can do so any more.
        for call in self._running.values():
            call.resume()
        self.finish()

    async def _follow(self, orders: pb.GenerateManyRequest) -> None:
        lists = {"begin": orders.begin, "cancel": orders.cancel, "pause": orders.pause, "resume": orders.resume}
        for name, entries in lists.items():
            check_most(name, len(entries), _MOST_ORDERS, "entries in one message")
        for call in orders.begin:
            await self._begin(call)
        for running in self._named(orders.cancel):
            # Once: a second time would disturb what it does at its end.
            if not running.cancelled_by_caller and running.task is not None:
                running.cancelled_by_caller = True
                running.task.cancel()
        for running in self._named(orders.pause):
            running.pause()
        for running in self._named(orders.resume):
            running.resume()

    def _named(self, numbers: Iterable[int]) -> list[CarriedContext]:
        return [self._running[number] for number in numbers if number in self._running]

    async def _begin(self, begun: pb.CarriedCall) -> None:
        if begun.call <= self._latest:
            raise InvalidField("begin.call", "must be larger than all before it")
        self._latest = number = begun.call
        # Those that run are at most `_most` of them.
        while len(self._ready) >= self._most + _MOST_UNSENT:
            self._sent.clear()
            await self._sent.wait()

        def mark() -> None:
            if not self._ready:
                self._changed.set()
            self._ready[number] = call

        fits = _fits(begun.metadata)
        if not fits:
            del begun.metadata[:]
        call = CarriedContext(begun, self._handler, self._context, mark)
        if fits and len(self._running) < self._most:
            self._start(call)
            return
        many = QuotaExceeded("too many calls at once on one stream", limit=self._most)
        call.refuse(many if fits else InvalidField("metadata", f"has more than {MAX_METADATA_BYTES} bytes"))
        await self._pace.wait("")

    def _start(self, call: CarriedContext) -> None:
        self._running[call.number] = call
        call.task = asyncio.create_task(self._run(call))
        # Not in the task: one that is cancelled with the message that begins it never runs.
        call.task.add_done_callback(lambda _: self._forget(call))

    def _forget(self, call: CarriedContext) -> None:
        del self._running[call.number]
        # For `finish`.
        self._changed.set()

    async def _run(self, call: CarriedContext) -> None:
        """Run a call to its end."""
        loop, left = asyncio.get_running_loop(), call.seconds_left()
        deadline = None if left is None else loop.call_later(left, _expire, call)
        try:
            # Wrapped by an interceptor that has it read its request, and so a coroutine of this kind.
            handle: Any = self._handler.stream_stream
            await handle(None, call)
            call.ended(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            call.ended(grpc.StatusCode.UNKNOWN)
        except asyncio.CancelledError:
            if call.expired:
                call.ended(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            elif not call.cancelled_by_caller:
                raise
        # The outermost boundary of the call, as gRPC's own is of others.
        except Exception:
            logger.exception("bug while handling a carried call")
            call.ended(grpc.StatusCode.UNKNOWN, "internal error")
        finally:
            if deadline is not None:
                deadline.cancel()

    async def _write(self, reading: asyncio.Task[None]) -> None:
        """Send what is ready, in one message at a time: what becomes ready meanwhile goes into the next. Raises what
        `reading` did, between two messages: gRPC sends no status beside a message, nor beside one that was given up.
        """
        while not (self._finishing and not self._running and not self._ready):
            if not self._ready:
                await self._changed.wait()
                self._changed.clear()
            if reading.done():
                reading.result()
            said = _Said()
            self._collect(said)
            if said.last:
                # Its handler ends in the loop's next turn: the end goes with what it said last, for which a reader
                # would otherwise wake twice.
                await asyncio.sleep(0)
                self._collect(said)
            if said.calls or said.ends:
                await self._context.write(
                    pb.GenerateManyResponse(calls=said.calls, responses=said.responses, ends=said.ends)
                )
            self._sent.set()

    def _collect(self, said: _Said) -> None:
        """Add what is ready."""
        ready, self._ready = self._ready, {}
        # After so many bytes a message is sent; what else is ready goes into the next. Chosen: far below what clients
        # take.
        while ready and said.size < 1 << 20:
            number = next(iter(ready))
            call = ready.pop(number)
            if call.cancelled_by_caller or (call.paused and call.end is None):
                continue
            for response in call.pending():
                said.calls.append(number)
                said.responses.append(response)
                said.size += len(response)
            if call.end is not None:
                said.ends.append(call.end)
            elif call.has_said_all:
                said.last = True
        if ready:
            # Calls may have become ready anew.
            self._ready = {**ready, **self._ready}


class CarryingInterceptor(grpc.aio.ServerInterceptor):
    """Runs the other interceptors of a server, and gives streams of carried calls the handler of these calls inside
    them. It must be the server's only one: the others are run here, as gRPC looks up one handler for a call."""

    def __init__(self, others: Sequence[grpc.aio.ServerInterceptor], most: int) -> None:
        """`others` are outermost first; `most` calls run at once on a stream."""
        self._others = tuple(others)
        self.most = most
        self.streams: set[CarriedCalls] = set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await self._wrapped(continuation, handler_call_details)
        if handler is None or handler_call_details.method != f"{_SERVICE}/GenerateMany":
            return handler
        # Of gRPC's own type, which it insists on.
        details: Any = type(handler_call_details)
        metadata = handler_call_details.invocation_metadata
        carried = await self._wrapped(continuation, details(f"{_SERVICE}/Generate", metadata))

        async def guard(request: Any, _context: Context, proceed: Proceed) -> Any:
            _carrying.set((self, carried))
            return await proceed(request)

        return guarded(handler, guard)

    async def _wrapped(self, lookup: Continuation, details: grpc.HandlerCallDetails, place: int = 0) -> Handler | None:
        """A method's handler inside the other interceptors from `place` on."""
        if place == len(self._others):
            return await lookup(details)
        return await self._others[place].intercept_service(
            lambda inner: self._wrapped(lookup, inner, place + 1), details
        )

    def finish(self) -> None:
        """End each stream when no call on it runs any more."""
        for stream in self.streams:
            stream.finish()


# Of the stream being handled: its server's interceptor, and the handler of its calls.
_carrying: ContextVar[tuple[CarryingInterceptor, Handler | None]] = ContextVar("outrider_carrying")


async def carry_calls(context: Context) -> None:
    """Handle a stream of carried calls."""
    interceptor, handler = _carrying.get()
    assert handler is not None, "the carried method is of the same service"
    stream = CarriedCalls(handler, context, interceptor.most)
    interceptor.streams.add(stream)
    try:
        await stream.serve()
    finally:
        interceptor.streams.discard(stream)


def _expire(call: CarriedContext) -> None:
    call.expired = True
    if call.task is not None:
        call.task.cancel()


def _fits(metadata: Sequence[pb.CallMetadata]) -> bool:
    """Whether a call's metadata are as few as those of a call of its own."""
    if len(metadata) > MAX_METADATA_BYTES // _ENTRY_BYTES:
        return False
    return sum(len(pair.key) + len(pair.value) + _ENTRY_BYTES for pair in metadata) <= MAX_METADATA_BYTES


def _entry(pair: pb.CallMetadata) -> tuple[str, str | bytes]:
    """An entry of metadata as gRPC has it."""
    # The metadata key suffix of values that are bytes.
    if pair.key.endswith("-bin"):
        return pair.key, pair.value
    # What is not ASCII is refused where it is looked at, as any other wrong value.
    return pair.key, pair.value.decode("latin-1")


def _pair(key: str, value: str | bytes) -> pb.CallMetadata:
    return pb.CallMetadata(key=key, value=value if isinstance(value, bytes) else value.encode("latin-1"))
