"""Calls without a network: bytes go the way that gRPC takes them, from the parsers through every interceptor to the
servicers and back, so that hundreds of thousands of frames a minute can be tried."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import grpc
from chaos.sound_frames import DRAFT, HEALTH, TARGET, Call
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2_grpc
from scripted_engine import SERVED, ScriptedEngine
from scripted_service import ScriptedServicer, model_tokenizer

from draft_service.drafters.base import info_of
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.server import DraftServicer
from draft_service.session import SequenceAdmission as DraftAdmission
from outrider.limits import TenantLimits, TenantTable
from outrider.serving.calls import CallLimits, Calls
from outrider.serving.carried_calls import CarryingInterceptor
from outrider.serving.health import HealthServicer
from outrider.serving.interceptors import AuthInterceptor, ErrorInterceptor
from outrider.serving.tenancy import Authenticator
from outrider.telemetry.tracing import Tracing
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from target_service.api.kv_events import KvEventLog
from target_service.config import TargetConfig
from target_service.core.events import Sequences
from target_service.core.quotas import TenantQuotas

# Writes after which the caller hangs up.
_ENOUGH = 12


class CallContext:
    """What a handler sees of its call; reads parse as gRPC's do."""

    def __init__(self, payloads: Sequence[bytes], parse: Any, serialize: Any) -> None:
        self._payloads, self._parse, self._serialize = list(payloads), parse, serialize
        self.code: int | None = None
        self.reads = self.writes = 0
        self._trailers: tuple[tuple[str, str], ...] = ()
        # Whether it had to be cancelled from outside.
        self.late = False

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if not self._payloads:
            return grpc.aio.EOF
        self.reads += 1
        return self._parse(self._payloads.pop(0))

    async def requests(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not grpc.aio.EOF:
            yield request

    async def write(self, response: Any) -> None:
        assert isinstance(self._serialize(response), bytes)
        self.writes += 1
        if self.writes >= _ENOUGH:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float:
        return 10.0

    def done(self) -> bool:
        return False

    def add_done_callback(self, _callback: Any) -> None:
        """Nobody is called back: the call ends with its handler."""

    def set_trailing_metadata(self, trailers: Sequence[tuple[str, str]]) -> None:
        self._trailers = tuple(trailers)

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trailers

    async def abort(self, code: grpc.StatusCode, _details: str = "", _trailers: Any = ()) -> None:
        self.code = code.value[0]
        raise grpc.aio.AbortError


class Details(NamedTuple):
    """By which a handler is looked up."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class Door:
    """The handlers of some services, behind the interceptors that stand before them in a server."""

    def __init__(self) -> None:
        self._handlers: list[Any] = []
        calls = Calls(CallLimits(1024, message_bytes=4096), by_tenant=False)
        self._carrying = CarryingInterceptor([ErrorInterceptor(), AuthInterceptor(Authenticator(), calls)], most=64)
        # By the status's name, and by call.
        self.statuses: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()

    # As a server has them.
    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """The generic ones hold the same."""

    async def _handler(self, path: str) -> Any:
        async def find(details: Any) -> Any:
            return next(found for each in self._handlers if (found := each.service(details)) is not None)

        return await self._carrying.intercept_service(find, cast(grpc.HandlerCallDetails, Details(path)))

    async def call(self, call: Call, payloads: Sequence[bytes]) -> CallContext:
        """One call with these frames; what it ended with is counted."""
        handler = await self._handler(call.path)
        behaviour = handler.stream_stream or handler.stream_unary
        context = CallContext(payloads, handler.request_deserializer, handler.response_serializer)
        try:
            result = behaviour(context.requests(), context)
            if hasattr(result, "__aiter__"):
                async for response in result:
                    await context.write(response)
            elif (response := await result) is not None:
                await context.write(response)
            context.code = context.code or code_pb2.OK
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            context.late = context.writes < _ENOUGH
            context.code = code_pb2.CANCELLED
        self.statuses[code_pb2.Code.Name(context.code)] += 1
        self.frames[f"{call.service.rpartition('.')[2]}.{call.method}"] += context.reads
        return context


class _Bugs(logging.Handler):
    """Keeps what the services call a bug."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        self._kept.append(text)


@dataclass(frozen=True)
class Doors:
    """By service, with all that the services called a bug, and what must hold nothing once every call has ended."""

    by_service: Mapping[str, Door]
    bugs: list[str]
    engine: ScriptedEngine
    drafter: NgramDrafter


@asynccontextmanager
async def doors() -> AsyncIterator[Doors]:
    """A door to a target over the scripted engine, and one to a draft with a trie; health is behind either."""
    target, draft = Door(), Door()
    engine = ScriptedEngine(tick=0.0005, max_sequences=1000)
    unbounded = TenantLimits(waiting=0, sequences=0, streams=0, requests_per_second=0, burst=0, texts=0)
    quotas = TenantQuotas(TenantTable(unbounded))
    sequences = Sequences(engine, quotas)
    engine.start(sequences.deliver)
    config = TargetConfig(weights_stream_gb=65_536e-9, weights_without_token=True)
    served = replace(SERVED, tokenizer=model_tokenizer())
    servicer = ScriptedServicer(config, served, sequences, Tracing(), KvEventLog(4, 16))
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, target)  # type: ignore[arg-type]
    drafter = NgramDrafter(TrieConfig(max_context=64))
    drafter.start()
    proposing = DraftServicer(drafter, DraftAdmission(1024), info_of(drafter, 0, ""))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(proposing, draft)  # type: ignore[arg-type]
    for door in (target, draft):
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer([TARGET, DRAFT]), door)
    bugs: list[str] = []
    handler = _Bugs(bugs)
    logging.getLogger().addHandler(handler)
    try:
        yield Doors({TARGET: target, DRAFT: draft, HEALTH: draft}, bugs, engine, drafter)
    finally:
        logging.getLogger().removeHandler(handler)
        drafter.stop()
        await asyncio.to_thread(engine.stop, 0)
