"""The target's Prometheus metrics: an engine observer, and gauges read from the engine at every scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest

from outrider.errors import LogitsNotFinite
from outrider.telemetry.registry import MetricSet, Reading, VllmNames
from outrider.telemetry.table import MAX_DEPTH, PHASES, TARGET
from outrider.telemetry.tracing import sampled_trace_id
from target_service.core.events import ServingEngine
from target_service.core.sequence import SequenceRequest, SequenceTotals, StepStats

# Seconds of a nanosecond: steps are timed in nanoseconds, metrics are in seconds as Prometheus has them.
_NS = 1e-9
_DRAFTED, _ACCEPTED = "outrider_spec_decode_num_drafts_per_depth", "outrider_spec_decode_num_accepted_tokens_per_depth"
_SOURCES = ("draft", "lookup")


class PrometheusObserver:
    """Counts what the engine reports. A call of `on_step` takes 1.3 to 2 µs (`benchmarks/engine/telemetry.py`)."""

    def __init__(self, model: str, dtype: str, version: str) -> None:
        self.metrics = MetricSet(TARGET)
        # The same metrics by vLLM's names.
        self.vllm_names = VllmNames(self.metrics, model)
        self.metrics.gauges(lambda: [("outrider_target_info", (model, dtype, version), 1.0)])
        count, histogram = self.metrics.counter, self.metrics.histogram
        self._drafts = count("outrider_spec_decode_num_drafts")
        self._draft_tokens = count("outrider_spec_decode_num_draft_tokens")
        self._accepted_tokens = count("outrider_spec_decode_num_accepted_tokens")
        self._hits, self._misses = (count("outrider_draft_passes", outcome) for outcome in ("hit", "miss"))
        self._draft_rows, self._lookup_rows = (count("outrider_draft_rows", source) for source in _SOURCES)
        accepted = partial(count, "outrider_draft_rows_accepted")
        self._draft_accepted, self._lookup_accepted = map(accepted, _SOURCES)
        self._expected = count("outrider_draft_tokens_promised")
        self._round_trip = histogram("outrider_draft_round_trip_seconds")
        self._busy, self._idle = (count("outrider_device_seconds", state) for state in ("busy", "idle"))
        self._fallback_steps = count("outrider_fallback_steps")
        self._feature_vectors = count("outrider_feature_vectors")
        self._feature_bytes = count("outrider_feature_bytes")
        self._steps = count("outrider_steps")
        self._common_page_steps = count("outrider_common_page_steps")
        self._sequence_steps = count("outrider_sequence_steps")
        self._generation_tokens = count("outrider_generation_tokens")
        self._decode_rows = count("outrider_rows", "decode")
        self._prefill_rows = count("outrider_rows", "prefill")
        self._step_seconds = histogram("outrider_step_seconds")
        self._step_rows = histogram("outrider_step_rows")
        phases = map(partial(histogram, "outrider_step_phase_seconds"), PHASES)
        self._wait, self._plan, self._launch, self._forward, self._verify, self._commit = phases
        self._predicted = {one: count("outrider_prediction_tokens", one) for one in ("accepted", "rejected")}
        self._lossy_requests, self._lossy_tokens = count("outrider_lossy_requests"), count("outrider_lossy_tokens")
        # Series that exist from the start, so that their first increase counts in a rate. Deeper paths are rare (a pass
        # of a trie or head commits two to four tokens); their series are added when they occur.
        for outcome in ("end_of_sequence", "stop", "length", "cancelled", LogitsNotFinite.reason):
            count("outrider_requests", outcome)
        for place in range(16):
            self._add_depth(place, 0, 0)
        self._switches = [count("outrider_speculation_switches", to) for to in ("off", "on")]

    def watch(self, engine: ServingEngine, *, drafted: bool = True) -> None:
        """Read the engine's gauges at every scrape, in the scraping thread. Unless `drafted`, there is no gauge of the
        draft's connection, which would show one as missing."""

        def read() -> Iterator[Reading]:
            now = engine.snapshot()
            yield "outrider_requests_running", (), now.running
            yield "outrider_requests_waiting", (), now.waiting
            yield "outrider_kv_pages", ("used",), now.pages_used
            yield "outrider_kv_pages", ("cached",), now.pages_cached
            yield "outrider_kv_pages", ("free",), now.pages_total - now.pages_used - now.pages_cached
            yield "outrider_kv_usage_ratio", (), now.pages_used / max(1, now.pages_total)
            yield "outrider_speculation_active", (), float(now.speculating)
            if drafted:
                yield "outrider_draft_connected", (), float(now.draft_connected)
            yield "outrider_feature_bytes_kept", (), now.kept_feature_bytes
            yield "outrider_model_version", (), now.model_version
            yield "outrider_weights_pause_seconds", (), now.exchange_ns * _NS
            yield "outrider_engine_up", (), float(engine.failure is None)
            yield "outrider_engine_heartbeat_age_seconds", (), (time.monotonic_ns() - engine.last_beat_ns) * _NS

        self.metrics.gauges(read)

    def on_step(self, stats: StepStats) -> None:
        self._drafts.value += stats.drafted_sequences
        self._draft_tokens.value += stats.drafted_tokens
        self._accepted_tokens.value += stats.accepted_tokens
        self._fallback_steps.value += stats.fallback_sequences
        self._busy.value += stats.busy_ns * _NS
        self._idle.value += stats.idle_ns * _NS
        if stats.round_trip_ns:
            self._round_trip.observe(stats.round_trip_ns * _NS)
        self._hits.value += stats.hits
        self._misses.value += stats.misses
        if stats.chosen_rows:
            self._draft_rows.value += stats.table_rows
            self._lookup_rows.value += stats.chosen_rows - stats.table_rows
            self._draft_accepted.value += stats.table_accepted
            self._lookup_accepted.value += stats.chosen_accepted - stats.table_accepted
            self._expected.value += stats.expected_tokens
        self._feature_vectors.value += stats.feature_vectors
        self._feature_bytes.value += stats.feature_bytes
        self._steps.value += stats.passes
        self._common_page_steps.value += stats.common_page_passes
        self._sequence_steps.value += stats.committed_sequences
        self._generation_tokens.value += stats.committed_tokens
        self._decode_rows.value += stats.decode_rows * stats.passes
        self._prefill_rows.value += stats.prefill_rows * stats.passes
        # Of several passes that were launched at once, the mean.
        each = _NS / stats.passes
        self._step_seconds.observe(stats.total_ns * each)
        self._step_rows.observe(stats.decode_rows + stats.prefill_rows)
        self._wait.observe(stats.draft_wait_ns * each)
        self._plan.observe(stats.plan_ns * each)
        self._launch.observe(stats.launch_ns * each)
        self._forward.observe(stats.forward_ns * each)
        self._verify.observe(stats.verify_ns * each)
        self._commit.observe(stats.commit_ns * each)

    def on_finished(self, _sequence_id: int, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        metrics, trace_id = self.metrics, sampled_trace_id(request.traceparent)
        metrics.counter("outrider_requests", outcome).add()
        metrics.counter("outrider_prompt_tokens").add(totals.prompt_tokens)
        metrics.counter("outrider_prefix_cache_queries").add(totals.queried_tokens)
        metrics.counter("outrider_prefix_cache_hits").add(totals.cached_tokens)
        metrics.counter("outrider_preemptions").add(totals.preemptions)
        self._predicted["accepted"].add(totals.accepted_predicted_tokens)
        self._predicted["rejected"].add(totals.predicted_tokens - totals.accepted_predicted_tokens)
        self._lossy_requests.add(int(request.lossy))
        self._lossy_tokens.add(totals.lossy_tokens)
        for place, (drafted, accepted) in enumerate(
            zip_longest(totals.drafted_by_depth, totals.accepted_by_depth, fillvalue=0)
        ):
            self._add_depth(place, drafted, accepted)

        def observe(name: str, value: float) -> None:
            metrics.histogram(name).observe(value, trace_id)

        finished_ns = totals.finished_ns or time.monotonic_ns()
        observe("outrider_request_seconds", (finished_ns - totals.arrived_ns) * _NS)
        observe("outrider_request_queue_seconds", ((totals.started_ns or finished_ns) - totals.arrived_ns) * _NS)
        observe("outrider_request_draft_wait_seconds", totals.draft_wait_ns * _NS)
        observe("outrider_request_prompt_tokens", totals.prompt_tokens)
        observe("outrider_request_generation_tokens", totals.completion_tokens)
        if totals.first_token_ns:
            observe("outrider_time_to_first_token_seconds", (totals.first_token_ns - totals.arrived_ns) * _NS)
            observe("outrider_request_prefill_seconds", (totals.first_token_ns - totals.started_ns) * _NS)
            observe("outrider_request_decode_seconds", (finished_ns - totals.first_token_ns) * _NS)
        if totals.completion_tokens > 1:
            decode = (finished_ns - totals.first_token_ns) * _NS
            observe("outrider_time_per_output_token_seconds", decode / (totals.completion_tokens - 1))
        if totals.steps:
            observe("outrider_request_accepted_length", totals.completion_tokens / totals.steps)

    def on_speculation(self, active: bool) -> None:
        self._switches[active].add()

    def _add_depth(self, place: int, drafted: int, accepted: int) -> None:
        """Count a depth; those past `MAX_DEPTH` count there, so that the number of series is bounded."""
        depth = str(min(place + 1, MAX_DEPTH))
        self.metrics.counter(_DRAFTED, depth).add(drafted)
        self.metrics.counter(_ACCEPTED, depth).add(accepted)
