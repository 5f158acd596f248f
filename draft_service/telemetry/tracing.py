"""Spans of the draft service: one per `Propose` stream, and one per sequence in the trace of its request.

A stream lives for hours and carries thousands of requests, so the spans of sequences link to its span and are not its
children.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.trace import Link, Span, Status, StatusCode

from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import Metadata, Tracing, begin_rpc, context_from_traceparent, end_rpc
from outrider.wire.frames import OpenSequence


@dataclass(slots=True)
class _TracedSequence:
    """A traced sequence and its totals."""

    span: Span
    committed_tokens: int = 0
    growths: int = 0
    nodes: int = 0
    propose_ns: int = 0


class StreamTrace:
    """The spans of one `Propose` stream. A sequence that is not traced costs a dictionary lookup."""

    def __init__(self, tracing: Tracing, metadata: Metadata | None, drafter: str) -> None:
        self._tracer = tracing.tracer
        self._drafter = drafter
        self._span = begin_rpc(tracing, telemetry.PROPOSE, metadata)
        stream = self._span.get_span_context()
        self._links = [Link(stream)] if stream.is_valid else []
        self._followed: dict[int, _TracedSequence] = {}

    def opened(self, sequence: OpenSequence) -> None:
        """A sequence was opened: begin its span, if its request is traced."""
        if not sequence.traceparent:
            return
        span = self._tracer.start_span(
            telemetry.DRAFT_SEQUENCE,
            context_from_traceparent(sequence.traceparent),
            attributes={
                "outrider.sequence_id": sequence.sequence_id,
                "outrider.tenant": sequence.tenant,
                "outrider.drafter": self._drafter,
                "outrider.verification_mode": sequence.mode.value,
                "outrider.context_tokens": len(sequence.token_ids),
                "outrider.model_version": sequence.model_version,
            },
            links=self._links,
        )
        if span.is_recording():
            self._followed[sequence.sequence_id] = _TracedSequence(span)

    @property
    def follows(self) -> bool:
        """Whether any open sequence is traced."""
        return bool(self._followed)

    def advanced(self, sequence_id: int, tokens: int) -> None:
        followed = self._followed.get(sequence_id)
        if followed is not None:
            followed.committed_tokens += tokens

    def grown(self, sequence_id: int, nodes: int, compute_ns: int) -> None:
        """One growth was sent; `compute_ns` is the time of its whole batch."""
        followed = self._followed.get(sequence_id)
        if followed is not None:
            followed.growths += 1
            followed.nodes += nodes
            followed.propose_ns += compute_ns

    def closed(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._end(sequence_id, "closed")

    def failed(self, sequence_id: int, reason: str) -> None:
        self._end(sequence_id, reason, error=True)

    def end(self, code: str = "OK", reason: str = "") -> None:
        """The stream ended, with this gRPC status by name; sequences still open are aborted with it."""
        for sequence_id in list(self._followed):
            self._end(sequence_id, "aborted")
        end_rpc(self._span, code, reason)

    def _end(self, sequence_id: int, outcome: str, *, error: bool = False) -> None:
        followed = self._followed.pop(sequence_id, None)
        if followed is None:
            return
        followed.span.set_attributes(
            {
                "outrider.committed_tokens": followed.committed_tokens,
                "outrider.growths": followed.growths,
                "outrider.nodes": followed.nodes,
                "outrider.propose_time": followed.propose_ns / 1e9,
                "outrider.outcome": outcome,
            }
        )
        if error:
            followed.span.set_attribute("error.type", outcome)
            followed.span.set_status(Status(StatusCode.ERROR, outcome))
        followed.span.end()
