"""A receiver of OTLP spans, just large enough to show one request's trace without a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span. Ids are hex, times are epoch nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]


class TraceSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span it receives. `endpoint` is the URL for exporters, once `start` has run."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]

    async def start(self) -> None:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: ARG002
        for group in request.resource_spans:
            resource = {entry.key: entry.value.string_value for entry in group.resource.attributes}
            for scope in group.scope_spans:
                self._spans.extend(_received(span, resource.get("service.name", "")) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace, in order of their start."""
        return sorted((s for s in self._spans if s.trace_id == trace_id), key=lambda s: (s.start_ns, -s.end_ns))

    async def wait(self, trace_id: str, services: Collection[str], timeout: float) -> list[ReceivedSpan]:
        """The spans of a trace once each service has sent one, or those received within `timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while asyncio.get_running_loop().time() < deadline:
            if {span.service for span in self.spans(trace_id)} >= set(services):
                break
            await asyncio.sleep(0.05)
        return self.spans(trace_id)


def _received(span: Any, service: str) -> ReceivedSpan:
    values = {entry.key: (entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}
    plain = ("string_value", "int_value", "double_value", "bool_value")
    attributes = {key: getattr(value, kind) for key, (value, kind) in values.items() if kind in plain}
    return ReceivedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes,
    )
