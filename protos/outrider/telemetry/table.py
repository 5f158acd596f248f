"""Every Prometheus metric of Outrider: the one table that code, docs, dashboard and tests read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. Counters are exposed with `_total` appended."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """Empty for counts."""
        return "seconds" if self.name.endswith("_seconds") else ""

    @property
    def vllm(self) -> str:
        """The name of its counterpart in vLLM, if any."""
        return _VLLM.get(self.name, "")


def _counter(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels)


def _histogram(name: str, buckets: tuple[float, ...], help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "histogram", help, labels, buckets)


# Seconds. Speculative decoding takes 0.1 to 100 ms, where Prometheus' default bounds are too coarse.
FINE_SECONDS = (
    *(0.0001, 0.00015, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005),
    *(0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
LONG_SECONDS = (*FINE_SECONDS, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
# Seconds, for what takes microseconds.
MICRO_SECONDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, *FINE_SECONDS[:-6])
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
LENGTHS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)
# Depths counted one by one; deeper nodes count under the last.
MAX_DEPTH = 64

_VLLM: Mapping[str, str] = {
    "outrider_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "outrider_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "outrider_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "outrider_spec_decode_num_accepted_tokens_per_depth": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "outrider_step_rows": "vllm:iteration_tokens_total",
    "outrider_prompt_tokens": "vllm:prompt_tokens",
    "outrider_prefix_cache_queries": "vllm:prefix_cache_queries",
    "outrider_prefix_cache_hits": "vllm:prefix_cache_hits",
    "outrider_generation_tokens": "vllm:generation_tokens",
    "outrider_preemptions": "vllm:num_preemptions",
    "outrider_requests_running": "vllm:num_requests_running",
    "outrider_requests_waiting": "vllm:num_requests_waiting",
    "outrider_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "outrider_requests": "vllm:request_success",
    "outrider_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "outrider_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "outrider_request_seconds": "vllm:e2e_request_latency_seconds",
    "outrider_request_queue_seconds": "vllm:request_queue_time_seconds",
    "outrider_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "outrider_request_decode_seconds": "vllm:request_decode_time_seconds",
    "outrider_request_prompt_tokens": "vllm:request_prompt_tokens",
    "outrider_request_generation_tokens": "vllm:request_generation_tokens",
}
TARGET = (
    # Speculation.
    _counter("outrider_spec_decode_num_drafts", "Trees verified that had at least one drafted row."),
    _counter("outrider_spec_decode_num_draft_tokens", "Drafted rows verified."),
    _counter("outrider_spec_decode_num_accepted_tokens", "Drafted tokens kept."),
    _counter(
        "outrider_spec_decode_num_accepted_tokens_per_depth",
        "Trees of which a node at this depth was kept; the root's children have depth 1. Added when a request ends.",
        "depth",
    ),
    _counter(
        "outrider_spec_decode_num_drafts_per_depth",
        "Trees that reached this depth. Added when a request ends.",
        "depth",
    ),
    _counter(
        "outrider_draft_passes",
        "Passes of sequences that a draft follows, whose rows the device chose: hit where rows of the draft "
        "were there in time, else miss.",
        "outcome",
    ),
    _counter(
        "outrider_draft_rows",
        "Drafted rows that the device chose, by source: the draft, or the device itself (lookup, recycled tokens).",
        "source",
    ),
    _counter("outrider_draft_rows_accepted", "Of them, those that were accepted.", "source"),
    _counter("outrider_draft_tokens_promised", "Tokens that the chosen rows were expected to bring."),
    _histogram(
        "outrider_draft_round_trip_seconds", MICRO_SECONDS, "From sending a commit to a draft until its answer."
    ),
    _counter(
        "outrider_prediction_tokens",
        "Tokens of requests' predictions that were verified, by outcome: accepted or rejected. Added when a "
        "request ends.",
        "outcome",
    ),
    _counter(
        "outrider_lossy_requests",
        "Requests whose output need not be the model's own (typical acceptance above temperature 0), when they end.",
    ),
    _counter(
        "outrider_lossy_tokens",
        "Accepted drafts of such requests that the model would not have drawn. Added when they end.",
    ),
    _counter("outrider_fallback_steps", "Sequence steps without the draft that they should have had."),
    _counter("outrider_speculation_switches", "Times that load switched drafting on or off.", "to"),
    _gauge("outrider_speculation_active", "1 while drafting is on and a draft service is connected."),
    _counter("outrider_feature_vectors", "Hidden states of tokens sent to a draft that reads them."),
    _counter("outrider_feature_bytes", "Bytes of hidden states sent to the draft."),
    _gauge("outrider_feature_bytes_kept", "Memory of hidden states kept for a draft that connects late."),
    _gauge("outrider_draft_connected", "1 while a draft is connected; absent where none is to be."),
    # Steps.
    _counter("outrider_steps", "Engine steps: forward passes."),
    _counter("outrider_sequence_steps", "Verify passes, counted once per sequence in them."),
    _histogram("outrider_step_seconds", FINE_SECONDS, "Duration of a step."),
    _histogram(
        "outrider_step_phase_seconds",
        MICRO_SECONDS,
        "Duration of a step's phases: wait (for the draft), plan, forward, verify, commit; launch is the "
        "host's part of forward on a GPU.",
        "phase",
    ),
    _histogram("outrider_step_rows", ROWS, "Rows of a forward pass, prefill included."),
    _counter("outrider_rows", "Rows of forward passes: decode (roots and drafts) or prefill.", "kind"),
    _counter(
        "outrider_device_seconds",
        "By the device's own clock, between two launches of a busy engine: at work, or idle.",
        "state",
    ),
    _counter("outrider_prompt_tokens", "Prompt tokens of ended requests."),
    _counter("outrider_prefix_cache_queries", "Prompt tokens of ended requests that were looked for in the cache."),
    _counter("outrider_prefix_cache_hits", "Prompt tokens of ended requests whose keys and values were in the cache."),
    _counter("outrider_generation_tokens", "Tokens committed."),
    _counter("outrider_preemptions", "Times a sequence lost its KV pages."),
    # The engine.
    _gauge("outrider_requests_running", "Sequences that run."),
    _gauge("outrider_requests_waiting", "Sequences that wait."),
    _gauge("outrider_kv_pages", "Pages of the KV cache, by state: used, free, or cached (free once needed).", "state"),
    _gauge("outrider_kv_usage_ratio", "Share of KV pages in use, 0 to 1."),
    _gauge("outrider_model_version", "Of the weights in force: 1 at start, one more with each update of them."),
    _gauge(
        "outrider_weights_pause_seconds", "How long the last update of the weights held up steps; 0 before the first."
    ),
    _gauge("outrider_engine_up", "1 until the engine loop fails."),
    _gauge("outrider_engine_heartbeat_age_seconds", "Time since the engine last began a step."),
    _gauge("outrider_target_info", "Always 1; what is served.", "model", "dtype", "version"),
    # Requests.
    _counter(
        "outrider_requests",
        "Requests that ended, by outcome: finish reason, cancelled, or reason of the error.",
        "outcome",
    ),
    _histogram("outrider_time_to_first_token_seconds", LONG_SECONDS, "From arrival to the first token."),
    _histogram(
        "outrider_time_per_output_token_seconds", FINE_SECONDS, "Mean time per token of a request, after its first."
    ),
    _histogram("outrider_request_seconds", LONG_SECONDS, "From arrival to the end."),
    _histogram("outrider_request_queue_seconds", LONG_SECONDS, "From arrival to the first prefill."),
    _histogram("outrider_request_prefill_seconds", LONG_SECONDS, "From the first prefill to the first token."),
    _histogram("outrider_request_decode_seconds", LONG_SECONDS, "From the first token to the last."),
    _histogram(
        "outrider_request_draft_wait_seconds",
        FINE_SECONDS,
        "Time a request spent waiting for its draft, over all its steps.",
    ),
    _histogram(
        "outrider_request_accepted_length", LENGTHS, "Mean tokens per step of a request, the target's own included."
    ),
    _histogram("outrider_request_prompt_tokens", TOKENS, "Prompt tokens of a request."),
    _histogram("outrider_request_generation_tokens", TOKENS, "Output tokens of a request."),
)
RPC = (
    _counter("outrider_rpc_calls", "Calls that ended, by method and gRPC status.", "method", "code"),
    _gauge("outrider_rpc_in_flight", "Calls under way, by method.", "method"),
)
GATEWAY = (
    _counter(
        "outrider_gateway_requests",
        "HTTP requests for answers that ended, by endpoint and status; 499 where the client went away first.",
        "endpoint",
        "status",
    ),
    _histogram(
        "outrider_gateway_request_seconds",
        LONG_SECONDS,
        "From the request's arrival to the end of its answer.",
        "endpoint",
    ),
    _histogram(
        "outrider_gateway_time_to_first_token_seconds",
        LONG_SECONDS,
        "From the request's arrival to the first token of its answer, streamed or not.",
    ),
    _counter("outrider_gateway_tokens", "Tokens of answers that were completed."),
    _counter(
        "outrider_gateway_retries", "Answers that were started again on another target, before their first token."
    ),
    _gauge("outrider_gateway_running", "Answers being written, by target.", "target"),
    _gauge("outrider_gateway_target_healthy", "1 while requests may go to the target.", "target"),
)
DRAFT = (
    _gauge("outrider_draft_streams", "Propose streams open: connected target workers."),
    _gauge("outrider_draft_sequences", "Sequences open."),
    _counter("outrider_draft_sequences_opened", "Sequences opened."),
    _counter(
        "outrider_draft_sequences_closed", "Sequences ended: closed by the target, or aborted with their stream.", "how"
    ),
    _counter("outrider_draft_sequences_failed", "Sequences that failed, by reason.", "reason"),
    _counter("outrider_draft_context_tokens", "Tokens that sequences were opened with."),
    _counter("outrider_draft_committed_tokens", "Tokens that targets committed."),
    _counter("outrider_draft_advances", "Sequence advances handled."),
    _counter("outrider_draft_growths", "Sequence growths sent."),
    _counter("outrider_draft_nodes", "Nodes sent."),
    _histogram(
        "outrider_draft_propose_seconds", MICRO_SECONDS, "Time to make one growth frame, all its sequences together."
    ),
    _histogram(
        "outrider_draft_queue_seconds",
        MICRO_SECONDS,
        "Time the oldest sequence of a growth frame waited for its turn or for credit.",
    ),
    _counter("outrider_draft_corpus_tokens", "Tokens inserted from corpora."),
    _gauge("outrider_draft_figure", "Figures of the drafter, by name with unit.", "figure"),
    _gauge("outrider_draft_info", "Always 1; what drafts.", "drafter", "version"),
)
METRICS = {spec.name: spec for spec in (*TARGET, *DRAFT, *RPC, *GATEWAY)}
