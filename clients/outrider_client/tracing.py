"""The client's part of a request's trace: one CLIENT span, and its W3C context in the call's metadata."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import Tracing, end_rpc, metadata_of
from outrider_client.results import Result, Started


class RequestSpan:
    """The span of one generation; a child of the caller's current span, if there is one. Without tracing it costs next
    to nothing, and still propagates the caller's context."""

    def __init__(self, tracing: Tracing, address: str, *, chat: bool, model: str) -> None:
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": telemetry.GENERATE,
            "server.address": address,
            "gen_ai.operation.name": "chat" if chat else "text_completion",
            "gen_ai.provider.name": "outrider",
        }
        if model:
            attributes["gen_ai.request.model"] = model
        self._span = tracing.tracer.start_span(telemetry.GENERATE, kind=SpanKind.CLIENT, attributes=attributes)
        # `traceparent`, and `tracestate` if any, for the call.
        self.metadata = metadata_of(self._span)
        self._ended = False

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty when the request is not traced."""
        context = self._span.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else ""

    def started(self, started: Started) -> None:
        self._span.set_attribute("outrider.sequence_id", started.sequence_id)
        self._span.set_attribute("gen_ai.usage.input_tokens", started.prompt_tokens)

    def finished(self, result: Result) -> None:
        """Set the totals as attributes, and end the span."""
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.usage.output_tokens": result.completion_tokens,
                    "gen_ai.response.time_to_first_chunk": result.time_to_first_token,
                    "outrider.steps": result.speculation.steps,
                    "outrider.accepted_tokens": result.speculation.accepted_tokens,
                }
            )
        self.end("OK")

    def end(self, code: str, reason: str = "") -> None:
        """End the span with a gRPC status by name. Only the first call counts."""
        if not self._ended:
            self._ended = True
            end_rpc(self._span, code, reason, server=False)
