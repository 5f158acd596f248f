"""The trace of a request: one SERVER span, its phases as children, and totals as attributes; and its line in the log.

    trace = RequestTrace(tracing, context.invocation_metadata(), GENERATE)
    trace.accepted(sequence_id, request, model)     # and pass trace.traceparent on in SequenceRequest
    trace.step(verdict)                             # per verdict
    trace.finished(finish, totals)                  # or trace.failed(error), or trace.abandoned(time_remaining)

Every method but the constructor is nearly free for a request that is neither traced nor logged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context

from outrider.errors import OutriderError
from outrider.serving import current_tenant
from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import (
    AttributeValue,
    Metadata,
    Tracing,
    begin_rpc,
    end_rpc,
    epoch_offset,
    traceparent_of,
)
from target_service.core.sequence import Finish, SequenceRequest, SequenceTotals, StepVerdict
from target_service.telemetry.request_log import log_request

# Most step spans of a request: thousands would make a trace unreadable, and fill the exporter's queue.
MAX_STEP_SPANS = 512
# Attributes of a request that its phases have too.
_OF_PHASE = {
    telemetry.PREFILL: ("gen_ai.usage.input_tokens",),
    telemetry.DECODE: (
        "gen_ai.usage.output_tokens",
        "outrider.steps",
        "outrider.accepted_tokens",
        "outrider.draft_wait",
    ),
}


class RequestTrace:
    """The span of one request. Used by one task; it ends once, and later calls are ignored."""

    def __init__(
        self, tracing: Tracing, metadata: Metadata | None, name: str = telemetry.GENERATE, *, logs: bool = False
    ) -> None:
        """Begin the span, as a child of the caller's span if the metadata holds one. `logs` has the request logged at
        its end."""
        self._tracer = tracing.tracer
        self._epoch_offset = epoch_offset()
        method = "outrider.v1.TargetService/Verify" if name == telemetry.VERIFY_SEQUENCE else name
        self._span = begin_rpc(tracing, method, metadata, name)
        self._call = method.rpartition("/")[2]
        self._logs = logs
        self._sequence_id = 0
        # Until the request ends.
        self.recording = self._span.is_recording() or logs
        self.traceparent = traceparent_of(self._span)
        self._steps_left = MAX_STEP_SPANS if tracing.steps and self._span.is_recording() else 0
        self._last_step_ns = 0
        self._model_version = 0
        # Sums of the verdicts so far: all that is known of a request that is cancelled.
        self._seen = SequenceTotals()
        self._lossy = False

    @property
    def _in_span(self) -> Context:
        return trace.set_span_in_context(self._span)

    def accepted(
        self, sequence_id: int, request: SequenceRequest, model: str, *, chat: bool = False, requested_model: str = ""
    ) -> None:
        if not self.recording:
            return
        self._sequence_id, self._seen.prompt_tokens = sequence_id, len(request.token_ids)
        sampling = request.sampling
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat" if chat else "text_completion",
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": requested_model or model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "outrider.sequence_id": sequence_id,
            "outrider.tenant": request.tenant,
            "outrider.verification_mode": request.mode.value,
        }
        if request.lossy:
            self._lossy = attributes["outrider.lossy"] = True
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if sampling.top_p < 1.0:
            attributes["gen_ai.request.top_p"] = sampling.top_p
        self._span.set_attributes(attributes)

    def step(self, verdict: StepVerdict) -> None:
        """Record one step, with a child span if steps are traced."""
        if not self.recording:
            return
        seen = self._seen
        if verdict.model_version != self._model_version:
            # The version of the last step counts.
            self._model_version = verdict.model_version
            self._span.set_attribute("outrider.model_version", verdict.model_version)
        if not seen.steps:
            seen.started_ns, seen.first_token_ns = seen.arrived_ns + verdict.queue_ns, time.monotonic_ns()
        seen.steps += verdict.passes
        seen.completion_tokens += len(verdict.token_ids)
        seen.accepted_tokens += verdict.drafted_tokens
        if not self._steps_left:
            return
        self._steps_left -= 1
        # From the end of the last step, or for the time of this one.
        now = time.time_ns()
        span = self._tracer.start_span(
            telemetry.STEP,
            self._in_span,
            start_time=max(self._last_step_ns, now - verdict.compute_ns),
            attributes={
                "outrider.step": verdict.step,
                "outrider.committed_tokens": len(verdict.token_ids),
                "outrider.accepted_tokens": verdict.drafted_tokens,
                "outrider.model_version": verdict.model_version,
            },
        )
        self._last_step_ns = now
        span.end(end_time=now)

    def finished(self, finish: Finish, totals: SequenceTotals) -> None:
        if self.recording:
            self._span.set_attribute("gen_ai.response.finish_reasons", (finish.reason.value,))
        self._end("OK", finish.reason.value, "", totals)

    def failed(self, error: OutriderError) -> None:
        self._end(error.code.name, error.reason, error.reason)

    def broken(self) -> None:
        """The request ended with an unexpected error."""
        self._end("INTERNAL", "INTERNAL", "INTERNAL")

    def abandoned(self, time_remaining: float | None) -> None:
        """The caller went away, or its deadline passed; `time_remaining` is gRPC's, None without a deadline."""
        expired = time_remaining is not None and time_remaining <= 0
        self._end("DEADLINE_EXCEEDED" if expired else "CANCELLED", "cancelled")

    def _end(self, code: str, outcome: str, reason: str = "", totals: SequenceTotals | None = None) -> None:
        if not self.recording:
            return
        self.recording = False
        if self._logs:
            self._log(reason or outcome, totals or self._seen)
        self._span.set_attribute("outrider.outcome", outcome)
        if totals is not None:
            attributes = totals_attributes(totals)
            self._span.set_attributes(attributes)
            if self._lossy:
                self._span.set_attribute("outrider.lossy_tokens", totals.lossy_tokens)
            self._phases(totals, attributes)
        elif self._seen.steps:
            self._span.set_attributes(_progress(self._seen))
            self._phases(self._seen, {})
        end_rpc(self._span, code, reason)

    def _log(self, outcome: str, totals: SequenceTotals) -> None:
        context = self._span.get_span_context()
        trace_id = trace.format_trace_id(context.trace_id) if context.is_valid else ""
        tenant, now = current_tenant(), time.monotonic_ns()
        log_request(self._call, self._sequence_id, tenant, outcome.lower(), totals, now, trace_id)

    def _phases(self, totals: SequenceTotals, attributes: Mapping[str, AttributeValue]) -> None:
        """Spans of queue, prefill and decode, up to the phase in which the request ended."""
        last = totals.finished_ns or time.monotonic_ns()
        stages = (
            (telemetry.QUEUE, totals.arrived_ns, totals.started_ns),
            (telemetry.PREFILL, totals.started_ns, totals.first_token_ns),
            (telemetry.DECODE, totals.first_token_ns, last),
        )
        for name, begin, end in stages:
            if not begin:
                return
            span = self._tracer.start_span(name, self._in_span, start_time=self._epoch_offset + begin)
            if attributes:
                span.set_attributes({key: attributes[key] for key in _OF_PHASE.get(name, ())})
            span.end(end_time=self._epoch_offset + max(begin, end or last))


def totals_attributes(totals: SequenceTotals) -> dict[str, AttributeValue]:
    """The attributes of a finished request."""
    attributes = _progress(totals) | {
        "gen_ai.usage.input_tokens": totals.prompt_tokens,
        "outrider.drafted_steps": totals.drafted_steps,
        "outrider.drafted_tokens": totals.drafted_tokens,
        "outrider.predicted_tokens": totals.predicted_tokens,
        "outrider.accepted_predicted_tokens": totals.accepted_predicted_tokens,
        "outrider.drafted_by_depth": tuple(totals.drafted_by_depth),
        "outrider.accepted_by_depth": tuple(totals.accepted_by_depth),
        "outrider.draft_wait": totals.draft_wait_ns / 1e9,
        "outrider.fallback_steps": totals.fallback_steps,
        "outrider.preemptions": totals.preemptions,
    }
    if totals.steps:
        attributes["outrider.mean_accepted_length"] = totals.completion_tokens / totals.steps
    return attributes


def _progress(totals: SequenceTotals) -> dict[str, AttributeValue]:
    """What is known of a request that is cancelled too."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.output_tokens": totals.completion_tokens,
        "outrider.steps": totals.steps,
        "outrider.accepted_tokens": totals.accepted_tokens,
    }
    if totals.first_token_ns:
        attributes["gen_ai.response.time_to_first_chunk"] = (totals.first_token_ns - totals.arrived_ns) / 1e9
    return attributes
