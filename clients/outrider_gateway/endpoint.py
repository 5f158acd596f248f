"""What every endpoint with a body has in common: admission, the body, refusals, the log and the metrics."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from outrider.log_limit import LogLimit
from outrider_gateway.admission import GatewayAdmission, HeldBytes, Holder
from outrider_gateway.caller import HttpCaller, caller_from
from outrider_gateway.config import GatewayConfig
from outrider_gateway.failures import GatewayFailed, Refused
from outrider_gateway.http import ClientGone, ResponseWriter, json_object, read_body
from outrider_gateway.http_versions import AT_ONCE, BODY
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.request_log import RequestLine
from outrider_gateway.served_models import ServedModels
from outrider_gateway.targets import Targets

logger = logging.getLogger(__name__)
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request under way. `arrived` is when it came, on `perf_counter`."""

    scope: Scope
    receive: Receive
    writer: ResponseWriter
    caller: HttpCaller
    holder: Holder
    held: HeldBytes
    arrived: float
    line: RequestLine


@dataclass
class Endpoint(ABC):
    """An ASGI application for requests with a body of JSON."""

    _name: str
    _config: GatewayConfig
    _admission: GatewayAdmission
    _targets: Targets
    _models: ServedModels
    _metrics: GatewayMetrics
    # The body of an error, in the endpoint's form; OpenAI's where it is None.
    error_body: Callable[[Refused], Mapping[str, Any]] | None = field(default=None, kw_only=True)
    _failures: LogLimit = field(default_factory=LogLimit, kw_only=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = perf_counter()
        line = RequestLine(self._name, uuid.uuid4().hex)
        writer = self._writer(scope, send, line.request_id)
        # What is counted for a request that the server's end cuts off.
        # As nginx counts a client that left; it is never sent.
        status = 499
        try:
            caller = caller_from(scope["headers"])
            line.tenant = caller.tenant
            async with self._admission.admitted(caller, scope) as holder:
                with self._admission.body(holder) as held:
                    await self._serve(HttpCall(scope, receive, writer, caller, holder, held, arrived, line))
            status = 200
        except ClientGone:
            pass
        except Refused as refused:
            status = await writer.refuse(refused)
        except Exception:
            # The last resort: the answer must not quote the request.
            if (others := self._failures.due()) is not None:
                logger.exception("a request failed (and %d others)", others)
            status = await writer.refuse(GatewayFailed())
        finally:
            seconds = perf_counter() - arrived
            self._metrics.ended(self._name, status, seconds)
            if self._config.log_requests:
                line.write(status, seconds)

    @abstractmethod
    async def _serve(self, call: HttpCall) -> None:
        """Answer a request whose caller is known. Raises `Refused`."""

    def _writer(self, scope: Scope, send: Send, request_id: str) -> ResponseWriter:
        writer = ResponseWriter(send, request_id, (scope.get("extensions") or {}).get(AT_ONCE, {}).get(BODY))
        if self.error_body is not None:
            writer.error_body = self.error_body
        return writer

    async def _read(self, call: HttpCall, translate: Callable[[Mapping[str, Any]], Read]) -> tuple[Read, int]:
        """What `translate` makes of the body, and the body's size."""
        config = self._config
        raw = await read_body(call.scope, call.receive, config.max_body_bytes, config.body_seconds, call.held.grow_to)
        read = await self._admission.read(call.holder, raw, lambda: translate(json_object(raw)))
        return read, len(raw)
