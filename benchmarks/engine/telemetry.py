"""What telemetry costs per step and per request, beside the same by prometheus_client and OpenTelemetry.

python -m benchmarks.engine.telemetry [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import prometheus_client
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.shared.report import parser_of, show, write_json
from draft_service.telemetry.metrics import DraftMetrics
from outrider.machine import describe_commit
from outrider.sampling import FinishReason, SamplingParams, VerificationMode
from outrider.telemetry.registry import Counter, Histogram, VllmNames
from outrider.telemetry.table import FINE_SECONDS
from outrider.telemetry.tracing import Tracing
from target_service.core.sequence import Finish, SequenceRequest, SequenceTotals, StepStats, StepVerdict
from target_service.telemetry.metrics import PrometheusObserver
from target_service.telemetry.tracing import RequestTrace

SAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
STEP = StepStats(
    sequences=4,
    committed_sequences=4,
    drafted_sequences=4,
    decode_rows=64,
    prefill_rows=0,
    drafted_tokens=60,
    accepted_tokens=9,
    committed_tokens=13,
    fallback_sequences=0,
    draft_wait_ns=150_000,
    plan_ns=40_000,
    launch_ns=0,
    forward_ns=3_000_000,
    verify_ns=90_000,
    commit_ns=60_000,
    total_ns=3_340_000,
    hits=4,
    chosen_rows=60,
    chosen_accepted=9,
    table_rows=48,
    table_accepted=7,
    expected_tokens=9.5,
    round_trip_ns=2_100_000,
    busy_ns=3_000_000,
    idle_ns=20_000,
)
VERDICT = StepVerdict(1, 3, (1, 2, 3), (5, 6, 7, 8), drafted_tokens=3, compute_ns=3_000_000)
# Number of values that `PrometheusObserver.on_step` writes.
VALUES_PER_STEP = 29


def request(traceparent: str) -> SequenceRequest:
    return SequenceRequest((1, 2, 3), SamplingParams(), VerificationMode.GREEDY, 1, 200, traceparent=traceparent)


def totals() -> SequenceTotals:
    now = time.monotonic_ns()
    return SequenceTotals(
        arrived_ns=now - 10**9,
        started_ns=now - 9 * 10**8,
        first_token_ns=now - 8 * 10**8,
        finished_ns=now,
        prompt_tokens=3,
        completion_tokens=200,
        steps=70,
        drafted_steps=68,
        drafted_by_depth=[68] * 12,
        accepted_by_depth=[40] * 12,
    )


def exporting() -> Tracing:
    """Tracing as in a service, with an exporter that keeps spans in memory."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter(), max_queue_size=1 << 20))
    return Tracing(provider, steps=True)


def lifetime(tracing: Tracing, metadata: tuple[tuple[str, str], ...]) -> Callable[[], None]:
    """One request's span from its begin to its end, without steps."""
    accepted, finished = request(""), totals()

    def run() -> None:
        trace = RequestTrace(tracing, metadata)
        trace.accepted(1, accepted, "tiny")
        trace.finished(Finish(FinishReason.LENGTH), finished)

    return run


def steps(tracing: Tracing) -> Callable[[], None]:
    """One step of a request; with tracing on, a new request whenever the bound on step spans is reached."""
    count, trace = 0, RequestTrace(tracing, (("traceparent", SAMPLED),))

    def run() -> None:
        nonlocal count, trace
        count += 1
        if count % 500 == 0:
            trace = RequestTrace(tracing, (("traceparent", SAMPLED),))
        trace.step(VERDICT)

    return run


def cases() -> Mapping[str, Callable[[], Any]]:
    """The calls that are timed, by name."""
    target = PrometheusObserver("tiny", "float32", "0")
    draft = DraftMetrics("trie", "0", dict)
    counter, histogram = Counter(), Histogram(FINE_SECONDS)
    registry = prometheus_client.CollectorRegistry()
    their_counter = prometheus_client.Counter("c", "c", ["l"], registry=registry).labels("x")
    their_histogram = prometheus_client.Histogram("h", "h", ["l"], buckets=FINE_SECONDS, registry=registry).labels("x")
    untraced, traced, given = request(""), request(SAMPLED), totals()
    scraped = prometheus_client.CollectorRegistry()
    scraped.register(target.metrics)
    vllm = prometheus_client.CollectorRegistry()
    vllm.register(VllmNames(target.metrics, "tiny"))
    off, on = Tracing(), exporting()
    return {
        "counter": counter.add,
        "counter, prometheus_client": their_counter.inc,
        "histogram": lambda: histogram.observe(0.003),
        "histogram, prometheus_client": lambda: their_histogram.observe(0.003),
        f"target step ({VALUES_PER_STEP} values)": lambda: target.on_step(STEP),
        "target request end": lambda: target.on_finished(1, untraced, given, "length"),
        "target request end, traced": lambda: target.on_finished(1, traced, given, "length"),
        "draft growth frame": lambda: draft.on_growth(4, 60, 20_000, 40_000),
        "span of a request, tracing off": lifetime(off, ()),
        "span of a request, unsampled parent": lifetime(on, (("traceparent", SAMPLED[:-1] + "0"),)),
        "span of a request with its phases": lifetime(on, (("traceparent", SAMPLED),)),
        "step of a request, tracing off": steps(off),
        "step of a request, traced": steps(Tracing(on._provider)),
        "step of a request, traced with step spans": steps(on),
        "scrape": lambda: prometheus_client.generate_latest(scraped),
        "scrape of vLLM's names": lambda: prometheus_client.generate_latest(vllm),
    }


def microseconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """Time per call, once per repeat; as many calls as take 50 ms."""
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.05:
        run()
        calls += 1
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return times


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        # Other work on the machine makes medians less certain.
        "load": [round(load, 1) for load in os.getloadavg()],
        "commit": describe_commit(),
        **{name: version(name) for name in ("prometheus-client", "opentelemetry-sdk")},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    results = {}
    show(f"{'microseconds per call':44s} {'median':>9s} {'min':>9s} {'max':>9s}")
    for name, run in cases().items():
        times = microseconds(run, arguments.repeats)
        spread = {"median": statistics.median(times), "min": min(times), "max": max(times)}
        results[name] = {**{figure: round(value, 3) for figure, value in spread.items()}, "n": len(times)}
        show(f"{name:44s} " + " ".join(f"{value:9.2f}" for value in spread.values()))
    write_json(arguments.json, {"environment": environment(), "microseconds": results})


if __name__ == "__main__":
    main()
