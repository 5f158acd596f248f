"""Tracing of one process: set-up, and W3C trace context in gRPC metadata and frames.

Spans are written when a request ends, with totals as attributes: a span per step would cost as much as the step's own
bookkeeping. The spans are in `target_service.telemetry.tracing` and `draft_service.telemetry.tracing`. OpenTelemetry's
global provider is not used, so that two services in one process have their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracerProvider, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import outrider

Metadata = Iterable[tuple[str, str | bytes]]
AttributeValue = str | bool | int | float | tuple[str, ...] | tuple[int, ...]

_PROPAGATOR = TraceContextTextMapPropagator()
_FIELDS = ("traceparent", "tracestate")
# Chosen: half of OpenTelemetry's default.
EXPORT_TIMEOUT_SECONDS = 5.0


class Tracing:
    """The tracer of one process. Without a provider it records nothing but still propagates trace context."""

    def __init__(self, provider: TracerProvider | None = None, *, steps: bool = False) -> None:
        """`steps` adds a child span per step to traced requests."""
        self._provider = provider or NoOpTracerProvider()
        self.tracer: Tracer = self._provider.get_tracer("outrider")
        self.steps = steps

    def shutdown(self) -> None:
        """Export buffered spans, for a few seconds at most. Call once, when the service has stopped."""
        stop = getattr(self._provider, "shutdown", None)
        if stop is not None:
            stop()


def set_up_tracing(service: str, endpoint: str, *, ratio: float = 1.0, steps: bool = False) -> Tracing:
    """Tracing that exports to `endpoint` over OTLP gRPC, with TLS for `https://`, or that records nothing when the
    endpoint is empty. Requests with a sampled parent are traced, those with an unsampled one are not, and `ratio` of
    the rest are. `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES` and the other standard variables keep their
    meaning."""
    if not endpoint:
        return Tracing(steps=steps)
    # Imported here: a service without an endpoint needs neither SDK nor exporter.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    attributes = {"service.name": service, "service.namespace": "outrider", "service.version": outrider.__version__}
    provider = SdkTracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create(attributes), shutdown_on_exit=False
    )
    insecure = not endpoint.startswith("https://")
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return Tracing(provider, steps=steps)


def context_from_metadata(metadata: Metadata | None) -> Context:
    """The caller's trace context; empty if it is malformed."""
    carrier = {key: value for key, value in metadata or () if key in _FIELDS and isinstance(value, str)}
    # Most have none.
    return _PROPAGATOR.extract(carrier, Context()) if carrier else Context()


def context_from_traceparent(traceparent: str) -> Context:
    """The trace context of a `traceparent` field; empty if that is empty or malformed."""
    if not traceparent:
        return Context()
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def metadata_of(span: Span) -> tuple[tuple[str, str], ...]:
    """`traceparent`, and `tracestate` if any, for a call's metadata. Empty for a span without a trace."""
    if not span.get_span_context().is_valid:
        return ()
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return tuple(carrier.items())


def traceparent_of(span: Span) -> str:
    """The W3C `traceparent` for children of `span`; empty for a span without a trace."""
    return dict(metadata_of(span)).get("traceparent", "")


def sampled_trace_id(traceparent: str) -> str:
    """The trace id of an exemplar, 32 hex digits; empty if the trace is not recorded."""
    span = trace.get_current_span(context_from_traceparent(traceparent)).get_span_context()
    return trace.format_trace_id(span.trace_id) if span.is_valid and span.trace_flags.sampled else ""


def begin_rpc(tracing: Tracing, method: str, metadata: Metadata | None, name: str = "") -> Span:
    """Begin a server's span of a call, as a child of the caller's span if the metadata holds one. Its name is that of
    the method unless it has another `name`."""
    return tracing.tracer.start_span(
        name or method,
        context_from_metadata(metadata),
        kind=SpanKind.SERVER,
        attributes={"rpc.system.name": "grpc", "rpc.method": method},
    )


def end_rpc(span: Span, code: str, reason: str = "", *, server: bool = True) -> None:
    """End the span of a call with its gRPC status by name, such as "OK" or "CANCELLED". By the conventions a server's
    span is an error only if the server is at fault, and not when a caller cancels or sends an invalid request;
    `error.type` has the reason in every case."""
    span.set_attribute("rpc.response.status_code", code)
    if code != "OK":
        span.set_attribute("error.type", reason or code)
        # Statuses that are a server's fault, by the RPC conventions; for a client every status but OK is an error.
        faults = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
        if not server or code in faults:
            span.set_status(Status(StatusCode.ERROR, reason or code))
    span.end()


def epoch_offset() -> int:
    """What added to monotonic nanoseconds makes epoch nanoseconds, by one reading of both clocks."""
    return time.time_ns() - time.monotonic_ns()
