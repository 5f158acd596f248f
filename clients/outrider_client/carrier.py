"""`Generate` calls of one connection on one stream: one message for all chunks of a step, in place of one for each.

For servers that forward the calls of others. A target that has no such stream, or refuses it, gets calls of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from outrider.limits import TENANT_KEY, TOKEN_KEY
from outrider.runtime import end_tasks
from outrider.v1 import target_pb2 as pb

Metadata = Iterable[tuple[str, str | bytes]]
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# Bytes of a request, above which it is a call of its own, and of a message, after which the next one begins: with
# those of other calls it must not become longer than the target takes. Chosen: an eighth of what it takes by default.
_MOST_BYTES = 128 * 1024
# Entries of each list of a message: fewer than the target takes.
_MOST_ORDERS = 1024
# Events that one call may keep here unread before the target keeps them. Chosen: several steps of a fast engine.
_MOST_UNREAD = 64


class CarriedGenerate:
    """One call, with what a reader uses of gRPC's own. For one reader."""

    def __init__(self, carrier: CallCarrier, number: int, request: pb.GenerateRequest, begun: _Begun) -> None:
        self._carrier, self.number, self._request, self._begun = carrier, number, request, begun
        self._events: deque[pb.GenerateResponse] = deque()
        # A call of its own, where the stream ended before anything came.
        self._alone: Any = None
        self._status: Exception | None = None
        self._trailing = grpc.aio.Metadata()
        self._ended = self._cancelled = self._paused = self._answered = False
        # Set while the reader waits for the next event.
        self._waiting: asyncio.Future[None] | None = None
        # Takes an event in place of a waiting reader, and returns whether it did.
        self.taker: Callable[[pb.GenerateResponse], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if begun.timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(begun.timeout, self._expire)

    async def read(self) -> Any:
        """The next event, or gRPC's mark of the end. Raises `grpc.aio.AioRpcError` for a call that failed."""
        while not self._events:
            if self._alone is not None:
                return await self._alone.read()
            if self._cancelled:
                raise asyncio.CancelledError
            if self._ended:
                if self._status is not None:
                    raise self._status
                return grpc.aio.EOF
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        event = self._events.popleft()
        if self._paused and not self._events:
            self._paused = False
            self._carrier.resume(self.number)
        return event

    def cancel(self) -> bool:
        """End the call. Does nothing once it has ended."""
        if self._alone is not None:
            return bool(self._alone.cancel())
        if self._ended or self._cancelled:
            return False
        self._cancelled = True
        self._carrier.cancel(self.number)
        self._end()
        return True

    def done(self) -> bool:
        """Whether it has ended, and all of it was read."""
        return bool(self._alone.done()) if self._alone is not None else self._ended and not self._events

    def cancelled(self) -> bool:
        """Whether `cancel` ended it."""
        return bool(self._alone.cancelled()) if self._alone is not None else self._cancelled

    async def trailing_metadata(self) -> Any:
        """The metadata that came with its end."""
        return self._trailing if self._alone is None else await self._alone.trailing_metadata()

    # What the carrier sends.

    def put(self, response: bytes) -> None:
        """An event has come."""
        self._answered = True
        event = pb.GenerateResponse.FromString(response)
        waiting = self._waiting
        if self.taker is not None and waiting is not None and not waiting.done():
            try:
                if self.taker(event):
                    return
            # Raised again by the reader's read: it is about this call alone.
            except Exception as error:
                self._carrier.cancel(self.number)
                self.fail(error)
                return
        self._events.append(event)
        if len(self._events) > _MOST_UNREAD and not self._paused:
            self._paused = True
            self._carrier.pause(self.number)
        self._wake()

    def finish(self, end: pb.CarriedEnd) -> None:
        """The call has ended."""
        self._trailing = grpc.aio.Metadata(*map(_entry, end.trailing_metadata))
        code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
        self.fail(None if code is grpc.StatusCode.OK else _error(code, end.message, self._trailing))

    def lose(self, error: grpc.aio.AioRpcError) -> None:
        """The stream has ended, by this error. A call without any answer yet is made anew, by itself."""
        if self._answered:
            self.fail(error)
        else:
            self._alone = self._carrier.alone(self._request, self._begun)
            self._end()

    def fail(self, error: Exception | None) -> None:
        """Nothing more comes; `error` is why, where it failed."""
        if not self._ended:
            self._ended, self._status = True, error
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _expire(self) -> None:
        if not self._ended and self._alone is None:
            self._carrier.cancel(self.number)
            self.fail(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Begun:
    """How a call was begun: its metadata, and the time by which it has to end."""

    def __init__(self, metadata: Metadata, timeout: float | None) -> None:
        self.metadata, self.timeout = tuple(metadata), timeout
        # Metadata that identify the caller.
        self.caller = tuple(pair for pair in self.metadata if pair[0] in (TENANT_KEY, TOKEN_KEY))
        now = asyncio.get_running_loop().time()
        self._until = None if timeout is None else now + timeout

    def seconds_left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - asyncio.get_running_loop().time())


class _Orders:
    """What the target is to be told on one stream, in messages that are short enough."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._begin, self._cancel = deque[pb.CarriedCall](), deque[int]()
        # By call, whether it is paused: only the latest counts.
        self._paused: dict[int, bool] = {}

    def add_call(self, call: pb.CarriedCall) -> None:
        self._begin.append(call)
        self.changed.set()

    def cancel(self, number: int) -> None:
        self._paused.pop(number, None)
        self._cancel.append(number)
        self.changed.set()

    def pause(self, number: int, paused: bool) -> None:
        self._paused[number] = paused
        self.changed.set()

    def next_message(self) -> pb.GenerateManyRequest | None:
        """The next message. A call is begun in the same or an earlier one than all other orders for it."""
        message, size = pb.GenerateManyRequest(), 0
        while self._begin and size < _MOST_BYTES and len(message.begin) < _MOST_ORDERS:
            call = self._begin.popleft()
            size += call.ByteSize()
            message.begin.append(call)
        if not self._begin:
            while self._cancel and len(message.cancel) < _MOST_ORDERS:
                message.cancel.append(self._cancel.popleft())
            while self._paused and len(message.pause) + len(message.resume) < _MOST_ORDERS:
                number, paused = self._paused.popitem()
                (message.pause if paused else message.resume).append(number)
        return message if message.ByteSize() else None


class CallCarrier:
    """Begins calls on a stream of the connection, which the first of them opens in its caller's name. Until the target
    has answered on it, calls of others are calls of their own: it may refuse that caller, and late."""

    def __init__(self, stub: Any) -> None:
        """`stub` is a `TargetServiceStub` on the connection."""
        self._stub = stub
        self._calls: dict[int, CarriedGenerate] = {}
        self._number = 0
        self._orders = _Orders()
        self._stream: asyncio.Task[None] | None = None
        # Who opened the stream, until the target has answered on it.
        self._opener: Metadata | None = None
        # Whether the target has no such stream.
        self._unknown = False

    def generate(
        self, request: pb.GenerateRequest, *, metadata: Metadata, timeout: float | None = None
    ) -> CarriedGenerate | Any:
        """The call, begun: as the stub's own method."""
        begun = _Begun(metadata, timeout)
        if self._unknown or self._opener not in (None, begun.caller):
            return self.alone(request, begun)
        serialized = request.SerializeToString()
        if len(serialized) > _MOST_BYTES:
            return self.alone(request, begun)
        self._number += 1
        call = CarriedGenerate(self, self._number, request, begun)
        self._calls[self._number] = call
        order = pb.CarriedCall(call=self._number, request=serialized)
        for key, value in begun.metadata:
            order.metadata.add(key=key, value=value if isinstance(value, bytes) else value.encode("ascii"))
        if timeout is not None:
            order.timeout_nanoseconds = max(0, round(timeout * 1e9))
        self._orders.add_call(order)
        if self._stream is None:
            self._opener = begun.caller
            self._stream = asyncio.create_task(self._run(begun.metadata))
        return call

    def alone(self, request: pb.GenerateRequest, begun: _Begun) -> Any:
        """The same call by itself."""
        return self._stub.Generate(request, metadata=begun.metadata, timeout=begun.seconds_left())

    def cancel(self, number: int) -> None:
        """End a call; its further messages are dropped."""
        if self._calls.pop(number, None) is not None:
            self._orders.cancel(number)

    def pause(self, number: int) -> None:
        """Have the target keep a call's events."""
        self._orders.pause(number, True)

    def resume(self, number: int) -> None:
        """Have it send them again."""
        if number in self._calls:
            self._orders.pause(number, False)

    async def close(self) -> None:
        """Cancel all calls, and end the stream."""
        if self._stream is not None:
            await end_tasks(self._stream)

    async def _run(self, metadata: Metadata) -> None:
        stream = self._stub.GenerateMany(metadata=metadata)
        writer = asyncio.create_task(self._write(stream, self._orders))
        error = _error(grpc.StatusCode.UNAVAILABLE, "the stream of calls has ended")
        try:
            await self._read(stream)
        except grpc.aio.AioRpcError as failure:
            error = failure
            self._unknown = failure.code() is grpc.StatusCode.UNIMPLEMENTED
        finally:
            stream.cancel()
            # At once: calls that begin from here on get another stream.
            self._stream = self._opener = None
            calls, self._calls, self._orders = self._calls, {}, _Orders()
            await end_tasks(writer)
            for call in calls.values():
                call.lose(error)

    async def _read(self, stream: Any) -> None:
        calls = self._calls
        while (message := await stream.read()) is not grpc.aio.EOF:
            self._opener = None
            for number, response in zip(message.calls, message.responses, strict=True):
                call = calls.get(number)
                if call is not None:
                    call.put(response)
            for end in message.ends:
                call = calls.pop(end.call, None)
                if call is not None:
                    call.finish(end)

    async def _write(self, stream: Any, orders: _Orders) -> None:
        try:
            while True:
                await orders.changed.wait()
                orders.changed.clear()
                while (message := orders.next_message()) is not None:
                    await stream.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader sees why.
            return


def _error(code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details)


def _entry(pair: pb.CallMetadata) -> tuple[str, str | bytes]:
    return pair.key, pair.value if pair.key.endswith("-bin") else pair.value.decode("latin-1")
