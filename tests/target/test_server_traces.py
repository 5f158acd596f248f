"""The spans that Generate leaves, over a real socket and a scripted engine."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.telemetry.tracing import Tracing
from outrider.v1 import target_pb2 as pb


async def test_one_span_per_request_with_its_phases(targets: Any) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with targets(tracing=Tracing(provider)) as target:
        request = pb.GenerateRequest(tokens={"token_ids": [10, 20, 30]}, sampling={"max_tokens": 3})
        async for _ in target.stub.Generate(request, metadata=(("traceparent", parent),)):
            pass
        with pytest.raises(grpc.aio.AioRpcError):
            await target.stub.Generate(pb.GenerateRequest()).read()
        target.engine.paused.set()
        call = target.stub.Generate(request)
        await call.read()
        call.cancel()
        await target.idle()
    by_status: dict[Any, Any] = {
        (span.attributes or {}).get("rpc.response.status_code"): span for span in spans.get_finished_spans()
    }
    served = by_status["OK"]
    assert format(served.context.trace_id, "032x") == parent.split("-")[1]
    children = {span.name for span in spans.get_finished_spans() if span.parent == served.context}
    assert children == {"outrider.queue", "outrider.prefill", "outrider.decode"}
    assert target.engine.requests[0].traceparent.split("-")[1] == parent.split("-")[1]
    assert by_status["INVALID_ARGUMENT"].attributes["error.type"] == "INVALID_FIELD"
    assert by_status["CANCELLED"].attributes["outrider.outcome"] == "cancelled"
