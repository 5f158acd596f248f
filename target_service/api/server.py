"""TargetService: protobuf in, engine requests out, and back. No arithmetic happens here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

import outrider
from outrider.errors import NotSupported, OutriderError, PermissionDenied
from outrider.runtime import end_tasks
from outrider.serving import current_caller, current_tenant
from outrider.serving.carried_calls import CarriedContext, carry_calls
from outrider.telemetry.names import VERIFY_SEQUENCE
from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider.wire.same_names import shared_fields
from outrider.wire.trees import mode_to_pb
from target_service.api import replies
from target_service.api.admission import Admission, ServedModel
from target_service.api.answer_reader import AnswerReader, AnswerReplies
from target_service.api.event_queue import EventQueue
from target_service.api.kv_events import KvEventLog
from target_service.api.verify_session import VerifyStream
from target_service.api.weights import WeightUpdates
from target_service.config import TargetConfig
from target_service.core.events import Sequences
from target_service.speculation_state import SpeculationState, speculation_state
from target_service.telemetry.tracing import RequestTrace

SERVICE_NAME: str = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

# Steps that a reader of Generate may lag, beyond the megabytes that gRPC buffers for it.
UNREAD_STEPS = 1024

GenerateContext = grpc.aio.ServicerContext[target_pb2.GenerateRequest, target_pb2.GenerateResponse]
EventsContext = grpc.aio.ServicerContext[target_pb2.SubscribeKvEventsRequest, target_pb2.SubscribeKvEventsResponse]
VerifyContext = grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse]


@dataclass(eq=False)
class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Translates between callers and the engine.

    Handlers write to their context instead of being generators: gRPC leaves a generator to the garbage collector
    when its call is cancelled in mid-write, and a cancelled call must free its pages at once.
    """

    config: TargetConfig
    served: ServedModel
    sequences: Sequences
    tracing: Tracing
    kv_events: KvEventLog | None = None

    def __post_init__(self) -> None:
        self.admission = Admission(self.served, self.sequences.quotas)
        self._weights = WeightUpdates(self.sequences.engine, self.config)

    def speculation(self) -> SpeculationState:
        """The present state of drafting."""
        engine = self.sequences.engine
        return speculation_state(self.config, engine.snapshot(), engine.draft_info, lookup=self.served.lookup)

    async def Generate(  # type: ignore[override]
        self, request: target_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        logs, tenant = self.config.log_requests, current_tenant()
        trace = RequestTrace(self.tracing, context.invocation_metadata(), logs=logs)
        with ending(trace, context), self.sequences.quotas.counted(tenant, "streams"):
            admitted, parser = await self.admission.generation(request, tenant, trace.traceparent)
            queue = EventQueue(UNREAD_STEPS, self.sequences.cancel)
            sequence_id = self.sequences.submit(admitted, queue.put)
            try:
                # What the engine's process is sent leaves at the end of the loop's turn: before an answer is prepared.
                await asyncio.sleep(0)
                model, chat = self.served.name, request.HasField("chat")
                trace.accepted(sequence_id, admitted, model, chat=chat, requested_model=request.model)
                await context.write(replies.started(sequence_id, admitted, model))
                text = None
                if (tokenizer := self.served.tokenizer) is not None:
                    text = AnswerReader(tokenizer, admitted, parser, show_special=request.show_special_tokens)
                names = tokenizer if request.speculation.token_texts else None
                await _stream(
                    AnswerReplies(admitted, text, names, trace, context.set_trailing_metadata), queue, context
                )
            finally:
                self.sequences.cancel(sequence_id)

    async def GenerateMany(  # type: ignore[override]
        self,
        _request_iterator: AsyncIterator[target_pb2.GenerateManyRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await carry_calls(context)

    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: VerifyContext
    ) -> None:
        tenant = current_tenant()
        with self.sequences.quotas.counted(tenant, "streams"):
            session = VerifyStream(
                self.config,
                self.sequences,
                self.admission,
                tenant,
                lambda: RequestTrace(
                    self.tracing, context.invocation_metadata(), VERIFY_SEQUENCE, logs=self.config.log_requests
                ),
            )
            reader = asyncio.create_task(session.read(request_iterator))
            reaper = asyncio.create_task(session.reap())
            try:
                while (response := await session.next()) is not None:
                    await context.write(response)
                await reader
            finally:
                session.abort()
                await end_tasks(reader, reaper)

    async def Tokenize(self, request: target_pb2.TokenizeRequest, _context: Any) -> target_pb2.TokenizeResponse:
        token_ids = await self.admission.tokens(request, current_tenant())
        return replies.tokenized(token_ids, self.served.tokenizer if request.token_texts else None)

    async def Detokenize(self, request: target_pb2.DetokenizeRequest, _context: Any) -> target_pb2.DetokenizeResponse:
        return target_pb2.DetokenizeResponse(text=await self.admission.text(request, current_tenant()))

    async def GetTargetInfo(
        self, _request: target_pb2.GetTargetInfoRequest, _context: Any
    ) -> target_pb2.GetTargetInfoResponse:
        served, speculation, reply = self.served, self.speculation(), target_pb2.GetTargetInfoResponse
        return reply(
            **shared_fields(reply, served),
            **shared_fields(reply, speculation),
            model=served.name,
            served_names=served.names,
            modes=map(mode_to_pb, served.modes),
            version=outrider.__version__,
            speculation_reason=speculation.reason,
            model_version=self.sequences.engine.snapshot().model_version,
            tenant=current_tenant(),
        )

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[target_pb2.UpdateWeightsRequest], _context: Any
    ) -> target_pb2.UpdateWeightsResponse:
        return replies.updated(await self._weights.update(current_caller.get(), request_iterator))

    async def SubscribeKvEvents(  # type: ignore[override]
        self, request: target_pb2.SubscribeKvEventsRequest, context: EventsContext
    ) -> None:
        async with aclosing(self.followed_kv_events(request.from_sequence, snapshot=request.snapshot)) as batches:
            async for batch in batches:
                await context.write(batch)

    async def followed_kv_events(
        self, from_sequence: int, *, snapshot: bool
    ) -> AsyncGenerator[target_pb2.SubscribeKvEventsResponse, None]:
        """Batches of KV events for the caller, as `KvEventLog.follow` has them. Raises `NotSupported`,
        `PermissionDenied`, and what that does."""
        if self.kv_events is None:
            raise NotSupported("this server keeps no KV events: see kv_events")
        if self.config.auth_tokens and not current_caller.get().operator:
            raise PermissionDenied("the token is no operator's, and KV events hold tokens of all tenants")
        with self.sequences.quotas.counted(current_tenant(), "streams"):
            async for batch in self.kv_events.follow(from_sequence, snapshot=snapshot):
                yield batch


async def _stream(answer: AnswerReplies, queue: EventQueue, context: GenerateContext) -> None:
    """Write the events of one sequence, to its end. Raises the error of one that fails."""
    if isinstance(context, CarriedContext):
        queue.on_arrival = context.has_more
        await context.send_from(lambda: (answer.serialised(queue.queued()), answer.ended))
    while not answer.ended:
        for response in answer.serialised(await queue.next_events()):
            # gRPC sends bytes as they are.
            await context.write(response)  # type: ignore[arg-type]
    if answer.error is not None:
        raise answer.error


@contextmanager
def ending(trace: RequestTrace, context: GenerateContext) -> Iterator[None]:
    """End the request's span with the outcome of the request. A span ends once: `broken` is for unexpected errors."""
    try:
        yield
    except OutriderError as error:
        trace.failed(error)
        raise
    except asyncio.CancelledError:
        trace.abandoned(context.time_remaining())
        raise
    finally:
        trace.broken()
