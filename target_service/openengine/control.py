"""The control plane: discovery, health, aborts, draining, and KV events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from outrider.errors import (
    Draining,
    InvalidField,
    Loading,
    OutriderError,
    PermissionDenied,
    QuotaExceeded,
    UnknownModel,
)
from outrider.model_names import answers_to
from outrider.openengine import openengine_pb2 as pb
from outrider.serving import current_caller, current_tenant
from outrider.serving.health import HealthServicer
from outrider.v1 import target_pb2
from target_service.api.event_queue import EventQueue
from target_service.api.server import UNREAD_STEPS, TargetServicer
from target_service.core.events import DRAIN_POLL_SECONDS
from target_service.core.sequence import SequenceFailed, SequenceFinished
from target_service.openengine.errors import engine_error
from target_service.openengine.info import CONNECTOR, load_info, model_info, server_info
from target_service.openengine.kv_events import batch_of, medium_of, source_at
from target_service.openengine.open_requests import OpenRequests
from target_service.openengine.requests import check_rank


@dataclass(frozen=True, eq=False)
class ControlledTarget:
    """What the calls are about. `address` is where the server listens."""

    target: TargetServicer
    requests: OpenRequests
    health: HealthServicer
    address: str


class ControlServicer:
    """Answers from the start: until `serve` health is STARTING, and all other calls are refused."""

    def __init__(self) -> None:
        self._instance = secrets.token_hex(8)
        self._served: ControlledTarget | None = None

    def serve(self, served: ControlledTarget) -> None:
        """The target is loaded."""
        self._served = served

    def _loaded(self) -> ControlledTarget:
        if self._served is None:
            raise Loading("the model is being loaded")
        return self._served

    async def GetServerInfo(self, _request: pb.GetServerInfoRequest, _context: Any) -> pb.ServerInfo:
        """The server, its capacity and its contract."""
        target = self._loaded().target
        return server_info(target.config, target.served, target.sequences.engine.snapshot(), self._instance)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, _context: Any) -> pb.ModelInfo:
        """The model and what may be asked of it."""
        target = self._loaded().target
        if not request.model:
            raise InvalidField("model", "is required")
        _check_model(target, request.model)
        return model_info(target.config, target.served)

    async def GetLoad(self, request: pb.GetLoadRequest, _context: Any) -> pb.LoadInfo:
        """The present load."""
        now = self._loaded().target.sequences.engine.snapshot()
        return load_info(now, self._instance, by_rank=request.include_per_rank)

    async def GetKvConnectorInfo(self, _request: pb.GetKvConnectorInfoRequest, _context: Any) -> pb.KvConnectorInfo:
        """That there is no connector."""
        return CONNECTOR

    async def Health(self, request: pb.HealthRequest, _context: Any) -> pb.HealthResponse:
        """Whether the target takes requests, and with a probe whether it answers one."""
        served = self._served
        if served is None:
            return _health(pb.HealthCheck(name="model", state=pb.HEALTH_STATE_STARTING, message="is being loaded"))
        if request.model:
            _check_model(served.target, request.model)
        state = pb.HEALTH_STATE_READY if served.health.serving else pb.HEALTH_STATE_NOT_READY
        checks = [pb.HealthCheck(name="scheduler", state=pb.HEALTH_STATE_DRAINING if served.health.closed else state)]
        if request.role not in (pb.ENGINE_ROLE_UNSPECIFIED, pb.ENGINE_ROLE_AGGREGATED):
            checks.append(pb.HealthCheck(name="role", state=pb.HEALTH_STATE_NOT_READY, message="is AGGREGATED"))
        if request.include_inference_probe and checks[0].state == pb.HEALTH_STATE_READY:
            checks.append(await _probe(served.target))
        return _health(*checks)

    async def Abort(self, request: pb.AbortRequest, _context: Any) -> pb.AbortResponse:
        """End one request of the caller's tenant, or all: of an operator's token those of all tenants."""
        requests, caller, kind = self._loaded().requests, current_caller.get(), request.WhichOneof("target")
        if kind == "all_requests":
            count = requests.abort_all(None if caller.operator else caller.tenant)
        elif kind == "request_id":
            count = int(requests.abort(caller.tenant, request.request_id))
        elif kind == "kv_session":
            raise InvalidField("kv_session", "is not supported: there are no sessions")
        else:
            raise InvalidField("target", "one of request_id and all_requests must be set")
        status = pb.ABORT_STATUS_ABORTED if count else pb.ABORT_STATUS_ALREADY_FINISHED
        return pb.AbortResponse(status=status, message=f"{count} aborted")

    async def Drain(self, request: pb.DrainRequest, context: Any) -> None:
        """Take no new requests from anybody, and tell when the running ones have ended. Nothing takes it back."""
        served = self._loaded()
        _check_operator(served.target, "a drain is for all tenants")
        if not request.stop_accepting_new_requests:
            raise InvalidField("stop_accepting_new_requests", "must be true: without it a drain has no end")
        sequences, loop = served.target.sequences, asyncio.get_running_loop()
        with sequences.quotas.counted(current_tenant(), "streams"):
            served.health.close()
            sequences.engine.drain()
            ends_at = loop.time() + request.deadline_ms / 1e3 if request.HasField("deadline_ms") else float("inf")
            state, told = pb.DRAIN_STATE_STARTED, -1
            # Those that have ended here may still be in the engine.
            while left := max(len(sequences), sequences.engine.snapshot().sequences):
                if left != told:
                    await context.write(_drained(state, left))
                    state, told = pb.DRAIN_STATE_IN_PROGRESS, left
                if loop.time() >= ends_at:
                    late = Draining("the deadline has passed, and requests still run")
                    if not request.abort_after_deadline:
                        await context.write(pb.DrainResponse(error=engine_error(late), in_flight_requests=left))
                        return
                    sequences.fail_all(late)
                    ends_at = float("inf")
                await asyncio.sleep(min(DRAIN_POLL_SECONDS, max(0.0, ends_at - loop.time())))
            if state == pb.DRAIN_STATE_STARTED:
                await context.write(_drained(state, 0))
            await context.write(_drained(pb.DRAIN_STATE_COMPLETE, 0))

    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest, _context: Any
    ) -> pb.GetKvEventSourcesResponse:
        """Where KV events are; nowhere if none are kept."""
        served = self._loaded()
        _check_ranks(request.data_parallel_ranks)
        kept = served.target.config.kv_events
        if served.target.kv_events is None:
            return pb.GetKvEventSourcesResponse()
        return pb.GetKvEventSourcesResponse(sources=[source_at(served.address, kept)])

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Any) -> None:
        """The events of `TargetService.SubscribeKvEvents`, for the same callers."""
        target, accepted = self._loaded().target, False
        _check_ranks(request.data_parallel_ranks)
        medium = medium_of(target.served.device)
        first, snapshot = request.start_sequence_number, request.include_snapshot
        try:
            async with aclosing(target.followed_kv_events(first, snapshot=snapshot)) as batches:
                async for batch in batches:
                    accepted = True
                    await context.write(pb.SubscribeKvEventsResponse(batch=batch_of(batch, medium)))
        except OutriderError as error:
            if not accepted:
                raise
            # From the next event on one may follow again, and not from one that is gone.
            late = QuotaExceeded(error.message).after(None if first else 0.0)
            await context.write(pb.SubscribeKvEventsResponse(error=engine_error(late)))


def _check_model(target: TargetServicer, model: str) -> None:
    if not answers_to(target.served.names, model):
        raise UnknownModel("another model is served", served=", ".join(target.served.names))


def _check_operator(target: TargetServicer, why: str) -> None:
    if target.config.auth_tokens and not current_caller.get().operator:
        raise PermissionDenied(f"the token is no operator's, and {why}")


def _check_ranks(ranks: Sequence[int]) -> None:
    for place, rank in enumerate(ranks):
        check_rank(rank, f"data_parallel_ranks[{place}]")


def _health(*checks: pb.HealthCheck) -> pb.HealthResponse:
    """The state that the first check is in which is not READY."""
    states = [check.state for check in checks if check.state != pb.HEALTH_STATE_READY]
    return pb.HealthResponse(state=states[0] if states else pb.HEALTH_STATE_READY, checks=checks)


async def _probe(target: TargetServicer) -> pb.HealthCheck:
    """One token of the model, asked for as the caller's own request."""
    request = target_pb2.GenerateRequest()
    request.tokens.token_ids.append(next(iter(target.served.end_token_ids), 0))
    request.sampling.max_tokens = 1
    check, queue = pb.HealthCheck(name="inference_probe"), EventQueue(UNREAD_STEPS, target.sequences.cancel)
    try:
        wanted, _ = await target.admission.generation(request, current_tenant(), "")
        sequence_id = target.sequences.submit(wanted, queue.put)
        try:
            async with asyncio.timeout(target.config.heartbeat_seconds):
                while not isinstance(end := (await queue.next_events())[-1], SequenceFinished):
                    if isinstance(end, SequenceFailed):
                        raise end.error
        finally:
            target.sequences.cancel(sequence_id)
    except QuotaExceeded as error:
        # Too busy for one more says nothing of the engine.
        check.state, check.message = pb.HEALTH_STATE_DEGRADED, error.message
    except OutriderError as error:
        check.state, check.message = pb.HEALTH_STATE_NOT_READY, error.message
    except TimeoutError:
        check.state, check.message = pb.HEALTH_STATE_NOT_READY, "no token came in time"
    else:
        check.state = pb.HEALTH_STATE_READY
    return check


def _drained(state: pb.DrainState.ValueType, left: int) -> pb.DrainResponse:
    return pb.DrainResponse(state=state, in_flight_requests=left, open_kv_sessions=0)
