"""The draft's spans and metrics, over a real stream: one trace with the request, linked to the stream."""

from __future__ import annotations

import asyncio

import pytest
from draft_harness import becomes, draft_over
from opentelemetry.trace import StatusCode
from scripted_drafter import ScriptedDrafter
from spans import PARENT, UNSAMPLED, Recorder, check
from waits import HUNG_SECONDS

from draft_service.telemetry.metrics import DraftMetrics
from draft_service.telemetry.tracing import StreamTrace
from outrider.sampling import SamplingParams, VerificationMode
from outrider.telemetry.names import DRAFT_SEQUENCE, PROPOSE
from outrider.wire.frames import OpenSequence, TreeLimits


def sequence(sequence_id: int, traceparent: str = PARENT) -> OpenSequence:
    return OpenSequence(
        sequence_id=sequence_id,
        token_ids=(901, 902, 903),
        prompt_length=3,
        step=0,
        seed=77777,
        mode=VerificationMode.GREEDY,
        sampling=SamplingParams(),
        limits=TreeLimits(),
        vocabulary_size=1000,
        tenant="acme",
        traceparent=traceparent,
    )


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def stream(recorder: Recorder) -> StreamTrace:
    return StreamTrace(recorder.tracing, None, "scripted")


def test_a_sequence_is_in_its_requests_trace_and_linked_to_the_stream(recorder: Recorder, stream: StreamTrace) -> None:
    stream.opened(sequence(1))
    stream.grown(1, nodes=8, compute_ns=1_000_000)
    stream.advanced(1, tokens=3)
    stream.grown(1, nodes=6, compute_ns=2_000_000)
    stream.closed([1, 2])
    stream.end()
    (span,), (whole,) = recorder.named(DRAFT_SEQUENCE), recorder.named(PROPOSE)
    check(span)
    check(whole)
    assert span.parent is not None
    assert [format(span.context.trace_id, "032x"), format(span.parent.span_id, "016x")] == PARENT.split("-")[1:3]
    assert [link.context for link in span.links] == [whole.context]
    attributes = dict(span.attributes or {})
    assert attributes["outrider.growths"] == 2
    assert attributes["outrider.nodes"] == 14
    assert attributes["outrider.committed_tokens"] == 3
    assert attributes["outrider.context_tokens"] == 3
    assert attributes["outrider.propose_time"] == pytest.approx(0.003)
    assert attributes["outrider.outcome"] == "closed"
    assert not any("90" in str(value) or "77777" in str(value) for value in attributes.values())


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED], ids=["untraced", "unsampled"])
def test_other_requests_leave_no_span(recorder: Recorder, stream: StreamTrace, traceparent: str) -> None:
    stream.opened(sequence(1, traceparent))
    stream.advanced(1, tokens=3)
    stream.closed([1])
    assert recorder.named(DRAFT_SEQUENCE) == []


def test_failures_and_lost_streams_show(recorder: Recorder, stream: StreamTrace) -> None:
    stream.opened(sequence(1))
    stream.opened(sequence(2))
    stream.failed(1, "STEP_SKIPPED")
    stream.end("CANCELLED")
    failed, aborted = recorder.named(DRAFT_SEQUENCE)
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "STEP_SKIPPED"
    assert (aborted.attributes or {})["outrider.outcome"] == "aborted"
    (whole,) = recorder.named(PROPOSE)
    assert (whole.attributes or {})["rpc.response.status_code"] == "CANCELLED"
    for span in recorder.spans:
        check(span)


def values(metrics: DraftMetrics) -> dict[str, float]:
    """Samples by name, label values appended."""
    return {
        "_".join((sample.name.removeprefix("outrider_draft_"), *sample.labels.values())): sample.value
        for family in metrics.families.collect()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def test_a_stream_is_counted_as_it_was() -> None:
    async with draft_over(ScriptedDrafter(nodes=4)) as draft:
        nodes = 0
        async with draft.stream() as stream:
            for sequence_id in (1, 2):
                await stream.open(sequence(sequence_id))
                await stream.opened()
                nodes += len((await stream.growth()).sequences[0].token_ids)
            assert values(draft.metrics)["streams"] == 1
            await becomes(lambda: values(draft.metrics)["sequences"], 2)
            await stream.advance((1, 1, [904, 905]))
            nodes += len((await stream.growth()).sequences[0].token_ids)
            await stream.advance((2, 9, [904]))
            await stream.failure()
        await draft.empty()
        async with asyncio.timeout(HUNG_SECONDS):
            while values(draft.metrics)["streams"]:
                await asyncio.sleep(0.01)
        found = values(draft.metrics)
    assert found["sequences"] == 0
    assert found["sequences_opened_total"] == 2
    assert found["sequences_failed_total_STEP_SKIPPED"] == 1
    assert found["context_tokens_total"] == 6
    assert found["committed_tokens_total"] == 2
    assert found["growths_total"] == 3
    assert found["nodes_total"] == nodes > 0
    assert found["propose_seconds_count"] == found["queue_seconds_count"] == 3


def test_a_drafters_own_figures_are_read_when_scraped() -> None:
    figures = {"trie_nodes": 5.0}
    metrics = DraftMetrics("trie", "1.0", lambda: figures)
    assert values(metrics)["figure_trie_nodes"] == 5
    figures["trie_nodes"] = 6
    assert values(metrics)["figure_trie_nodes"] == 6
    assert values(metrics)["info_trie_1.0"] == 1
