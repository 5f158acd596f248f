"""A request's spans: parents, phases, totals, statuses, and nothing of what was said."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.trace import StatusCode
from spans import PARENT, UNSAMPLED, Recorder, check

from outrider.errors import EngineDead, OutriderError, QuotaExceeded
from outrider.sampling import FinishReason, SamplingParams, VerificationMode
from outrider.telemetry.names import DECODE, GENERATE, PREFILL, QUEUE, STEP, VERIFY_SEQUENCE
from target_service.core.sequence import Finish, SequenceRequest, SequenceTotals, StepVerdict
from target_service.telemetry.tracing import MAX_STEP_SPANS, RequestTrace

METADATA = (("traceparent", PARENT), ("authorization", "Bearer a-secret-of-sixteen"))
REQUEST = SequenceRequest(
    token_ids=(101, 102, 103),
    sampling=SamplingParams(temperature=0.5, top_p=0.9, seed=424242, stop=("the end",), stop_token_ids=(909,)),
    mode=VerificationMode.COUPLED,
    seed=424242,
    max_tokens=20,
    tenant="acme",
)


def totals() -> SequenceTotals:
    begin = time.monotonic_ns() - 100_000_000
    return SequenceTotals(
        arrived_ns=begin,
        started_ns=begin + 10_000_000,
        first_token_ns=begin + 30_000_000,
        finished_ns=begin + 90_000_000,
        prompt_tokens=3,
        completion_tokens=12,
        steps=4,
        drafted_steps=3,
        drafted_tokens=30,
        accepted_tokens=8,
        drafted_by_depth=[3, 3, 2],
        accepted_by_depth=[3, 3, 2],
        draft_wait_ns=5_000_000,
    )


def verdict(step: int, **fields: Any) -> StepVerdict:
    return StepVerdict(
        1, step, (1, 2), (701, 702, 703), drafted_tokens=2, queue_ns=1000, compute_ns=2_000_000, **fields
    )


def traced(recorder: Recorder, name: str = GENERATE) -> RequestTrace:
    trace = RequestTrace(recorder.tracing, METADATA, name)
    trace.accepted(7, REQUEST, "tiny")
    return trace


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, (None, None)), (0.5, (True, 3))])
def test_a_request_that_is_not_lossless_is_marked(temperature: float, expected: tuple[bool | None, int | None]) -> None:
    """At temperature 0 typical acceptance is greedy decoding."""
    recorder = Recorder()
    trace = RequestTrace(recorder.tracing, METADATA, GENERATE)
    sampling = SamplingParams(temperature=temperature)
    trace.accepted(7, replace(REQUEST, sampling=sampling, mode=VerificationMode.TYPICAL), "tiny")
    trace.finished(Finish(FinishReason.LENGTH), replace(totals(), lossy_tokens=3 if temperature else 0))
    for span in recorder.spans:
        check(span)
    (found,) = (dict(span.attributes or {}) for span in recorder.named(GENERATE))
    assert found["outrider.verification_mode"] == "typical"
    assert (found.get("outrider.lossy"), found.get("outrider.lossy_tokens")) == expected


def test_a_request_that_finishes() -> None:
    recorder, given = Recorder(), totals()
    traced(recorder).finished(Finish(FinishReason.STOP, stop_string="the end"), given)
    for span in recorder.spans:
        check(span)
    (request,) = recorder.named(GENERATE)
    assert request.parent is not None
    assert request.parent.is_remote
    assert format(request.context.trace_id, "032x") == PARENT.split("-")[1]
    attributes = dict(request.attributes or {})
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["outrider.accepted_by_depth"] == (3, 3, 2)
    assert attributes["outrider.mean_accepted_length"] == 3.0
    assert attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.03)
    lengths = {span.name: span.end_time - span.start_time for span in recorder.spans if span.parent == request.context}
    assert lengths == {QUEUE: 10_000_000, PREFILL: 20_000_000, DECODE: 60_000_000}


def test_phases_join_without_gaps() -> None:
    recorder, before = Recorder(), time.time_ns()
    traced(recorder).finished(Finish(FinishReason.LENGTH), totals())
    (queue,), (prefill,), (decode,) = (recorder.named(name) for name in (QUEUE, PREFILL, DECODE))
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    # A millisecond for clocks that are being set.
    assert before - 1_000_000 <= queue.start_time + 100_000_000 <= time.time_ns() + 1_000_000


@pytest.mark.parametrize(
    ("remaining", "code", "status"),
    [
        (None, "CANCELLED", StatusCode.UNSET),
        (3.0, "CANCELLED", StatusCode.UNSET),
        (0.0, "DEADLINE_EXCEEDED", StatusCode.ERROR),
        (-0.1, "DEADLINE_EXCEEDED", StatusCode.ERROR),
    ],
    ids=["no deadline", "before the deadline", "at the deadline", "after the deadline"],
)
def test_a_request_that_is_abandoned(remaining: float | None, code: str, status: StatusCode) -> None:
    recorder = Recorder()
    trace = traced(recorder)
    for step in range(3):
        trace.step(verdict(step))
    trace.abandoned(remaining)
    (request,) = recorder.named(GENERATE)
    attributes = dict(request.attributes or {})
    assert (attributes["rpc.response.status_code"], attributes["error.type"]) == (code, code)
    assert attributes["outrider.outcome"] == "cancelled"
    assert request.status.status_code is status
    assert attributes["outrider.steps"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 9
    assert [span.name for span in recorder.spans] == [QUEUE, PREFILL, DECODE, GENERATE]
    for span in recorder.spans:
        check(span)


def test_steps_that_were_launched_at_once_count_each() -> None:
    recorder = Recorder()
    trace = traced(recorder)
    for step in (4, 8):
        trace.step(StepVerdict(1, step, (), (701, 702, 703, 704), drafted_tokens=0))
    trace.abandoned(None)
    (request,) = recorder.named(GENERATE)
    attributes = dict(request.attributes or {})
    assert (attributes["outrider.steps"], attributes["gen_ai.usage.output_tokens"]) == (8, 8)


def test_a_request_that_is_abandoned_before_its_first_token() -> None:
    recorder = Recorder()
    traced(recorder).abandoned(None)
    assert [span.name for span in recorder.spans] == [GENERATE]


@pytest.mark.parametrize(
    ("error", "status"),
    [(QuotaExceeded("full"), StatusCode.UNSET), (EngineDead("dead"), StatusCode.ERROR)],
    ids=["the caller's fault", "our fault"],
)
def test_a_request_that_fails(error: OutriderError, status: StatusCode) -> None:
    recorder = Recorder()
    RequestTrace(recorder.tracing, METADATA).failed(error)
    (request,) = recorder.spans
    check(request)
    assert request.attributes["error.type"] == error.reason
    assert request.attributes["rpc.response.status_code"] == error.code.name
    assert request.status.status_code is status


def test_only_the_first_end_counts() -> None:
    recorder = Recorder()
    trace = traced(recorder)
    trace.finished(Finish(FinishReason.LENGTH), totals())
    trace.abandoned(None)
    trace.broken()
    assert len(recorder.named(GENERATE)) == 1


@pytest.mark.parametrize(("steps", "spans"), [(False, 0), (True, MAX_STEP_SPANS)], ids=["off", "on"])
def test_step_spans_are_bounded_and_only_on_request(steps: bool, spans: int) -> None:
    recorder = Recorder(steps=steps)
    trace = traced(recorder)
    for step in range(MAX_STEP_SPANS + 5):
        trace.step(verdict(step))
    trace.finished(Finish(FinishReason.LENGTH), totals())
    found = recorder.named(STEP)
    assert len(found) == spans
    assert all(span.parent == recorder.named(GENERATE)[0].context for span in found)
    for span in found:
        check(span)


def test_spans_say_which_weights_were_in_force() -> None:
    recorder = Recorder(steps=True)
    trace = traced(recorder)
    for step, version in enumerate((1, 1, 2)):
        trace.step(verdict(step, model_version=version))
    trace.finished(Finish(FinishReason.LENGTH), totals())
    (request,) = recorder.named(GENERATE)
    assert request.attributes is not None and request.attributes["outrider.model_version"] == 2
    steps = [(span.attributes or {})["outrider.model_version"] for span in recorder.named(STEP)]
    assert steps == [1, 1, 2]


def test_an_unsampled_request_records_nothing_and_passes_that_on() -> None:
    recorder = Recorder(steps=True)
    trace = RequestTrace(recorder.tracing, (("traceparent", UNSAMPLED),))
    trace.accepted(1, REQUEST, "tiny")
    trace.step(verdict(0))
    trace.finished(Finish(FinishReason.LENGTH), totals())
    assert recorder.spans == ()
    assert trace.traceparent.startswith(UNSAMPLED[:36])
    assert trace.traceparent.endswith("-00")


def test_what_the_draft_is_told_makes_it_a_child() -> None:
    recorder = Recorder()
    trace = traced(recorder, VERIFY_SEQUENCE)
    trace.abandoned(None)
    (span,) = recorder.named(VERIFY_SEQUENCE)
    check(span)
    assert trace.traceparent.split("-")[1:3] == [
        format(span.context.trace_id, "032x"),
        format(span.context.span_id, "016x"),
    ]
    assert span.attributes["rpc.method"] == "outrider.v1.TargetService/Verify"


def secrets() -> list[Any]:
    return [101, 102, 103, 701, 702, 703, 909, 424242, "the end", "a-secret"]


def test_spans_hold_nothing_that_was_said() -> None:
    recorder = Recorder(steps=True)
    trace = traced(recorder)
    trace.step(verdict(0))
    trace.finished(Finish(FinishReason.STOP, stop_token_id=909, stop_string="the end"), totals())
    said = [str(secret) for secret in secrets()]
    for span in recorder.spans:
        values = [str(value) for value in (span.attributes or {}).values()] + [str(span.status.description)]
        assert not any(secret in value for secret in said for value in values)
