"""Trace context in and out, sampling, export to a real receiver, and statuses."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import StatusCode
from spans import PARENT, UNSAMPLED, Recorder
from waits import HUNG_SECONDS

from outrider.telemetry.tracing import (
    EXPORT_TIMEOUT_SECONDS,
    Tracing,
    context_from_metadata,
    context_from_traceparent,
    end_rpc,
    epoch_offset,
    metadata_of,
    sampled_trace_id,
    set_up_tracing,
    traceparent_of,
)
from outrider_client.demo.trace_sink import TraceSink

MALFORMED = (
    "",
    "nonsense",
    "00-" + "0" * 32 + "-" + "b" * 16 + "-01",
    "ff" + PARENT[2:],
    PARENT[:-1],
    "00-" + "g" * 51,
)


def test_context_goes_through_metadata() -> None:
    recorder = Recorder()
    outer = recorder.tracing.tracer.start_span("outer", context_from_metadata([("traceparent", PARENT)]))
    inner = recorder.tracing.tracer.start_span("inner", context_from_metadata(metadata_of(outer)))
    inner.end()
    outer.end()
    inner_span, outer_span = recorder.spans
    assert inner_span.parent.span_id == outer_span.context.span_id
    assert format(outer_span.context.trace_id, "032x") == PARENT.split("-")[1]


def test_tracestate_goes_along() -> None:
    context = context_from_metadata([("traceparent", PARENT), ("tracestate", "vendor=1")])
    assert ("tracestate", "vendor=1") in metadata_of(trace.get_current_span(context))


@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_parent_is_no_parent(value: str) -> None:
    for context in (context_from_traceparent(value), context_from_metadata([("traceparent", value)])):
        assert not trace.get_current_span(context).get_span_context().is_valid
    assert sampled_trace_id(value) == ""


def test_binary_metadata_is_no_parent() -> None:
    assert context_from_metadata([("traceparent", PARENT.encode())]) == Context()
    assert context_from_metadata(None) == Context()


@pytest.mark.parametrize(("parent", "trace_id"), [(PARENT, "a" * 32), (UNSAMPLED, "")], ids=["sampled", "unsampled"])
def test_exemplars_name_only_recorded_traces(parent: str, trace_id: str) -> None:
    assert sampled_trace_id(parent) == trace_id


def test_a_process_that_does_not_trace_passes_context_on() -> None:
    span = Tracing().tracer.start_span("quiet", context_from_traceparent(PARENT))
    assert not span.is_recording()
    assert traceparent_of(span) == PARENT
    assert traceparent_of(Tracing().tracer.start_span("root", Context())) == ""


@pytest.mark.parametrize(
    ("code", "server", "status", "error"),
    [
        ("OK", True, StatusCode.UNSET, None),
        ("CANCELLED", True, StatusCode.UNSET, "CANCELLED"),
        ("INVALID_ARGUMENT", True, StatusCode.UNSET, "INVALID_ARGUMENT"),
        ("DEADLINE_EXCEEDED", True, StatusCode.ERROR, "DEADLINE_EXCEEDED"),
        ("INTERNAL", True, StatusCode.ERROR, "INTERNAL"),
        ("CANCELLED", False, StatusCode.ERROR, "CANCELLED"),
    ],
)
def test_statuses_follow_the_rpc_conventions(code: str, server: bool, status: StatusCode, error: str | None) -> None:
    recorder = Recorder()
    end_rpc(recorder.tracing.tracer.start_span("call"), code, server=server)
    (span,) = recorder.spans
    assert span.status.status_code is status
    assert span.attributes["rpc.response.status_code"] == code
    assert span.attributes.get("error.type") == error


def test_both_clocks_agree() -> None:
    before = time.time_ns()
    now = epoch_offset() + time.monotonic_ns()
    # A millisecond for clocks that are being set.
    assert before - 1_000_000 <= now <= time.time_ns() + 1_000_000


@pytest.mark.parametrize(
    ("ratio", "parent", "sampled"),
    [(1.0, "", True), (0.0, "", False), (0.0, PARENT, True), (1.0, UNSAMPLED, False)],
    ids=["all", "none", "sampled parent", "unsampled parent"],
)
def test_the_parent_decides_and_else_the_ratio(ratio: float, parent: str, sampled: bool) -> None:
    tracing = set_up_tracing("test", "http://127.0.0.1:9", ratio=ratio)
    span = tracing.tracer.start_span("call", context_from_traceparent(parent))
    assert span.is_recording() is sampled
    # Not ended: nothing is exported, and shutting down has nothing to wait for.
    tracing.shutdown()


async def test_spans_reach_a_receiver_under_the_service_name() -> None:
    sink = TraceSink()
    await sink.start()
    tracing = set_up_tracing("outrider-test", sink.endpoint)
    span = tracing.tracer.start_span("call", context_from_traceparent(PARENT))
    span.end()
    await asyncio.to_thread(tracing.shutdown)
    received = await sink.wait("a" * 32, ["outrider-test"], timeout=HUNG_SECONDS)
    assert [(entry.name, entry.parent_id) for entry in received] == [("call", "b" * 16)]
    await sink.stop()


def test_no_endpoint_exports_nothing() -> None:
    tracing = set_up_tracing("test", "")
    assert not tracing.tracer.start_span("call", Context()).is_recording()
    tracing.shutdown()


def test_a_dead_collector_holds_up_the_end_for_seconds_at_most(caplog: pytest.LogCaptureFixture) -> None:
    tracing = set_up_tracing("test", "http://127.0.0.1:9")
    tracing.tracer.start_span("call", Context()).end()
    # The spans left are tried for so long, once.
    assert EXPORT_TIMEOUT_SECONDS <= 5.0
    tracing.shutdown()
    assert "traceparent" not in caplog.text
