"""The target's metrics against what the engine really did, and against its own totals."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import (
    DEVICE_SEQUENCES,
    ScriptedDraft,
    engine_config,
    knowing_tree,
    make_runner,
    plain_each,
    request,
)
from feature_link import FeatureLink
from spans import PARENT

from outrider.sampling import SamplingParams, VerificationMode
from outrider.telemetry.table import MAX_DEPTH
from outrider.tree import TokenTree
from outrider.wire.frames import FeatureRequest
from target_service.core.sequence import SequenceFinished, SequenceTotals, StepStats, StepVerdict
from target_service.engine.engine import EngineSnapshot
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.telemetry.metrics import PrometheusObserver

# A step of which nothing is known.
STEP = StepStats(*[0] * 16)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(observer: PrometheusObserver) -> Samples:
    return {
        (sample.name.removeprefix("outrider_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in observer.metrics.collect()
        for sample in family.samples
    }


def chain(tokens: Sequence[int], coins: random.Random) -> TokenTree:
    """A chain of guesses, some of which hit."""
    length = coins.randint(1, 4)
    guesses = [tokens[-1], *(coins.choice(tokens) for _ in range(length))]
    return TokenTree(tuple(guesses), tuple(max(0, row - 1) for row in range(length + 1)), (1.0,) * (length + 1))


@pytest.fixture
def observer() -> PrometheusObserver:
    return PrometheusObserver("tiny", "float32", "0.0")


def test_a_run_is_counted_as_it_was(tiny_model: Any, observer: PrometheusObserver) -> None:
    loop = EngineLoop(make_runner(tiny_model), engine_config(prefill_chunk=8), observer=observer)
    loop.drafting.attach(ScriptedDraft(loop.drafting, chain))
    loop.drafting.listen()
    coins = random.Random(1)
    for sequence_id, length in enumerate((5, 19, 30), start=1):
        wanted = request([coins.randrange(3, 200) for _ in range(length)], 24, traceparent=PARENT)
        loop.add(loop.make(sequence_id, wanted))
    loop.add(loop.make(4, request([7] * 9, 64)))
    totals: list[SequenceTotals] = []
    verdicts = steps = 0
    while len(totals) < 3:
        for event in loop.step() or ():
            verdicts += isinstance(event, StepVerdict)
            if isinstance(event, SequenceFinished):
                totals.append(event.totals)
        steps += 1
    cancelled = loop.end(4, "cancelled")
    assert cancelled is not None
    totals.append(cancelled.sequence.totals)

    found = samples(observer)
    assert found["steps_total", ()] == steps
    assert found["sequence_steps_total", ()] == verdicts == sum(total.steps for total in totals)
    assert found["generation_tokens_total", ()] == sum(total.completion_tokens for total in totals)
    assert found["prompt_tokens_total", ()] == 5 + 19 + 30 + 9
    assert found["spec_decode_num_drafts_total", ()] == sum(total.drafted_steps for total in totals)
    assert found["spec_decode_num_draft_tokens_total", ()] == sum(total.drafted_tokens for total in totals)
    assert found["spec_decode_num_accepted_tokens_total", ()] == sum(total.accepted_tokens for total in totals)
    accepted = [
        value for (name, _), value in found.items() if name == "spec_decode_num_accepted_tokens_per_depth_total"
    ]
    assert sum(accepted) == sum(total.accepted_tokens for total in totals) > 0
    assert found["requests_total", (("outcome", "length"),)] == 3
    assert found["requests_total", (("outcome", "cancelled"),)] == 1
    assert found["step_seconds_count", ()] == steps
    for phase in ("wait", "plan", "forward", "verify", "commit"):
        assert found["step_phase_seconds_count", (("phase", phase),)] == steps
    phases = sum(value for (name, _), value in found.items() if name == "step_phase_seconds_sum")
    assert phases == pytest.approx(found["step_seconds_sum", ()], rel=0.05)
    assert found["time_to_first_token_seconds_count", ()] == 4


def test_features_are_counted(tiny_model: Any, observer: PrometheusObserver) -> None:
    loop = EngineLoop(make_runner(tiny_model), engine_config(prefill_chunk=8), observer=observer)
    link = FeatureLink(loop.drafting, chain, wanted=FeatureRequest((0, 2), 96))
    loop.drafting.attach(link)
    for sequence_id in (1, 2):
        loop.add(loop.make(sequence_id, request([7 + sequence_id] * 19, 12)))
    while loop.live:
        loop.step()
    found = samples(observer)
    arrived = sum(map(len, link.got.values()))
    assert found["feature_vectors_total", ()] == arrived > 2 * 19
    assert found["feature_bytes_total", ()] == 2 * 96 * arrived


def test_rows_that_the_device_chose_are_counted(tiny_model: Any, observer: PrometheusObserver) -> None:
    wanted = [request([7, 8, 9, 7 + place] * 5, 24) for place in range(2)]
    whole = [(*one.token_ids, *said) for one, said in zip(wanted, plain_each(tiny_model, wanted), strict=True)]
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES)
    steps = DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=256)
    loop = EngineLoop(runner, engine_config(), steps=steps, observer=observer)
    loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree(whole, runner.vocabulary_size, 12, right=0.8)))
    loop.drafting.listen()
    for number, one in enumerate(wanted):
        loop.add(loop.make(number, one))
    totals: list[SequenceTotals] = []
    while loop.live:
        totals += [event.totals for event in loop.step() or () if isinstance(event, SequenceFinished)]
    found = samples(observer)
    rows, kept = (
        {source: found[f"draft_rows{name}_total", (("source", source),)] for source in ("draft", "lookup")}
        for name in ("", "_accepted")
    )
    assert rows["draft"] > 0 and rows["lookup"] > 0
    assert all(kept[source] <= rows[source] for source in rows)
    # What lies past a sequence's end was accepted, and not said.
    assert sum(kept.values()) >= sum(total.accepted_tokens for total in totals) > 0
    assert 0 < found["draft_tokens_promised_total", ()] < sum(rows.values())
    passes = {outcome: found["draft_passes_total", (("outcome", outcome),)] for outcome in ("hit", "miss")}
    assert 0 < sum(passes.values()) <= found["sequence_steps_total", ()]
    # No device of its own clock.
    assert found["device_seconds_total", (("state", "busy"),)] == 0


def test_a_pass_that_found_nothing_is_a_miss(observer: PrometheusObserver) -> None:
    """Also where no sequence of the pass got any row."""
    observer.on_step(replace(STEP, hits=0, misses=3, chosen_rows=0))
    observer.on_step(replace(STEP, hits=1, misses=2, chosen_rows=5, busy_ns=3 * 10**9, idle_ns=10**9, round_trip_ns=9))
    found = samples(observer)
    assert found["draft_passes_total", (("outcome", "hit"),)] == 1
    assert found["draft_passes_total", (("outcome", "miss"),)] == 5
    assert found["device_seconds_total", (("state", "busy"),)] == 3
    assert found["device_seconds_total", (("state", "idle"),)] == 1
    assert found["draft_round_trip_seconds_count", ()] == 1


def test_passes_that_read_common_pages_once_are_counted(observer: PrometheusObserver) -> None:
    for passes, common in ((4, 4), (2, 0), (1, 1)):
        observer.on_step(replace(STEP, passes=passes, common_page_passes=common))
    found = samples(observer)
    assert found["common_page_steps_total", ()] == 5
    assert found["steps_total", ()] == 7


def test_outcomes_and_depths_that_come_unexpected(observer: PrometheusObserver) -> None:
    deep = SequenceTotals(drafted_by_depth=[1] * (MAX_DEPTH + 3), accepted_by_depth=[1] * (MAX_DEPTH + 1))
    observer.on_finished(1, request([1], 4), deep, "QUOTA_EXCEEDED")
    found = samples(observer)
    assert found["requests_total", (("outcome", "QUOTA_EXCEEDED"),)] == 1
    assert found["spec_decode_num_drafts_per_depth_total", (("depth", str(MAX_DEPTH)),)] == 4
    assert found["spec_decode_num_accepted_tokens_per_depth_total", (("depth", str(MAX_DEPTH)),)] == 2
    assert found["time_to_first_token_seconds_count", ()] == 0


def test_requests_that_are_not_lossless_are_counted_at_the_end(observer: PrometheusObserver) -> None:
    mode = VerificationMode.TYPICAL
    lossy = request([1], sampling=SamplingParams(temperature=0.7), mode=mode)
    for one, tokens in ((lossy, 5), (request([1], mode=mode), 0), (request([1]), 0)):
        observer.on_finished(1, one, SequenceTotals(lossy_tokens=tokens), "stop")
    found = samples(observer)
    assert found["lossy_requests_total", ()] == 1
    assert found["lossy_tokens_total", ()] == 5


def test_tokens_of_predictions_are_counted_at_the_end(observer: PrometheusObserver) -> None:
    for totals in (SequenceTotals(), SequenceTotals(predicted_tokens=9, accepted_predicted_tokens=7)):
        observer.on_finished(1, request([1], 4), totals, "stop")
    found = samples(observer)
    assert found["prediction_tokens_total", (("outcome", "accepted"),)] == 7
    assert found["prediction_tokens_total", (("outcome", "rejected"),)] == 2


def test_exemplars_carry_the_trace_and_nothing_else(observer: PrometheusObserver) -> None:
    now = time.monotonic_ns()
    totals = SequenceTotals(arrived_ns=now - 10**8, started_ns=now - 10**8, first_token_ns=now - 10**7, finished_ns=now)
    wanted = request([11, 12], 4, traceparent=PARENT, sampling=SamplingParams(stop=("secret",)))
    observer.on_finished(1, wanted, totals, "stop")
    exemplars = [
        sample.exemplar for family in observer.metrics.collect() for sample in family.samples if sample.exemplar
    ]
    assert exemplars
    assert all(exemplar.labels == {"trace_id": PARENT.split("-")[1]} for exemplar in exemplars)


def test_gauges_are_read_from_the_engine(observer: PrometheusObserver, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = EngineSnapshot(
        running=3,
        waiting=2,
        sequences=5,
        pages_used=25,
        pages_total=100,
        speculating=True,
        draft_connected=False,
        kept_feature_bytes=77,
    )
    monkeypatch.setattr(time, "monotonic_ns", lambda: 9_000_000_000)
    beat = 7_000_000_000
    engine: Any = SimpleNamespace(snapshot=lambda: snapshot, last_beat_ns=beat, failure=None)
    observer.watch(engine)
    found = samples(observer)
    assert found["requests_running", ()] == 3
    assert found["requests_waiting", ()] == 2
    assert found["kv_pages", (("state", "free"),)] == 75
    assert found["kv_usage_ratio", ()] == 0.25
    assert found["feature_bytes_kept", ()] == 77
    assert found["speculation_active", ()] == 1
    assert found["draft_connected", ()] == 0
    assert found["engine_up", ()] == 1
    assert found["engine_heartbeat_age_seconds", ()] == pytest.approx(2.0)
    assert found["target_info", (("dtype", "float32"), ("model", "tiny"), ("version", "0.0"))] == 1
    engine.failure = RuntimeError()
    assert samples(observer)["engine_up", ()] == 0


def test_switches_by_load_are_counted(observer: PrometheusObserver) -> None:
    for active in (False, True, False):
        observer.on_speculation(active)
    found = samples(observer)
    assert found["speculation_switches_total", (("to", "off"),)] == 2
    assert found["speculation_switches_total", (("to", "on"),)] == 1


def test_no_draft_is_missed_where_none_is_to_be() -> None:
    observer = PrometheusObserver("m", "float32", "0")
    snapshot = EngineSnapshot(0, 0, 0, 0, 8, speculating=False, draft_connected=False)
    idle: Any = SimpleNamespace(snapshot=lambda: snapshot, last_beat_ns=0, failure=None)
    observer.watch(idle, drafted=False)
    assert "outrider_draft_connected" not in {metric.name for metric in observer.metrics.collect() if metric.samples}
