"""Every Prometheus metric of Outrider: the one table that code, docs, dashboard and tests read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. Counters are exposed with `_total` appended; `vllm` is the name of its counterpart in vLLM."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    vllm: str = ""


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

_SPECULATION = (
    MetricSpec(
        "outrider_spec_decode_num_drafts",
        "counter",
        "Trees verified that had at least one drafted row.",
        vllm="vllm:spec_decode_num_drafts",
    ),
    MetricSpec(
        "outrider_spec_decode_num_draft_tokens",
        "counter",
        "Drafted rows verified.",
        vllm="vllm:spec_decode_num_draft_tokens",
    ),
    MetricSpec(
        "outrider_spec_decode_num_accepted_tokens",
        "counter",
        "Drafted tokens kept.",
        vllm="vllm:spec_decode_num_accepted_tokens",
    ),
    MetricSpec(
        "outrider_spec_decode_num_accepted_tokens_per_depth",
        "counter",
        "Trees of which a node at this depth was kept; the root's children have depth 1. Added when a request ends.",
        ("depth",),
        vllm="vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    MetricSpec(
        "outrider_spec_decode_num_drafts_per_depth",
        "counter",
        "Trees that reached this depth. Added when a request ends.",
        ("depth",),
    ),
    MetricSpec(
        "outrider_draft_passes",
        "counter",
        "Passes of sequences that a draft follows, whose rows the device chose: hit where rows of the draft were there "
        "in time, else miss.",
        ("outcome",),
    ),
    MetricSpec(
        "outrider_draft_rows",
        "counter",
        "Drafted rows that the device chose, by source: the draft, or the sequence's own text alone (lookup).",
        ("source",),
    ),
    MetricSpec("outrider_draft_rows_accepted", "counter", "Of them, those that were accepted.", ("source",)),
    MetricSpec("outrider_draft_tokens_promised", "counter", "Tokens that the chosen rows were expected to bring."),
    MetricSpec(
        "outrider_draft_round_trip_seconds",
        "histogram",
        "From sending a commit to a draft until its answer.",
        unit="seconds",
        buckets=MICRO_SECONDS,
    ),
    MetricSpec(
        "outrider_prediction_tokens",
        "counter",
        "Tokens of requests' predictions that were verified, by outcome: accepted or rejected. Added when a request "
        "ends.",
        ("outcome",),
    ),
    MetricSpec(
        "outrider_lossy_requests",
        "counter",
        "Requests whose output need not be the model's own (typical acceptance above temperature 0), when they end.",
    ),
    MetricSpec(
        "outrider_lossy_tokens",
        "counter",
        "Accepted drafts of such requests that the model would not have drawn. Added when they end.",
    ),
    MetricSpec("outrider_fallback_steps", "counter", "Sequence steps without the draft that they should have had."),
    MetricSpec("outrider_speculation_switches", "counter", "Times that load switched drafting on or off.", ("to",)),
    MetricSpec("outrider_speculation_active", "gauge", "1 while drafting is on and a draft service is connected."),
    MetricSpec("outrider_feature_vectors", "counter", "Hidden states of tokens sent to a draft that reads them."),
    MetricSpec("outrider_feature_bytes", "counter", "Bytes of hidden states sent to the draft."),
    MetricSpec("outrider_feature_bytes_kept", "gauge", "Memory of hidden states kept for a draft that connects late."),
    MetricSpec("outrider_draft_connected", "gauge", "1 while a draft is connected; absent where none is to be."),
)
_STEPS = (
    MetricSpec("outrider_steps", "counter", "Engine steps: forward passes."),
    MetricSpec("outrider_sequence_steps", "counter", "Verify passes, counted once per sequence in them."),
    MetricSpec("outrider_step_seconds", "histogram", "Duration of a step.", unit="seconds", buckets=FINE_SECONDS),
    MetricSpec(
        "outrider_step_phase_seconds",
        "histogram",
        "Duration of a step's phases: wait (for the draft), plan, forward, verify, commit; launch is the host's part "
        "of forward on a GPU.",
        ("phase",),
        unit="seconds",
        buckets=MICRO_SECONDS,
    ),
    MetricSpec(
        "outrider_step_rows",
        "histogram",
        "Rows of a forward pass, prefill included.",
        buckets=ROWS,
        vllm="vllm:iteration_tokens_total",
    ),
    MetricSpec("outrider_rows", "counter", "Rows of forward passes: decode (roots and drafts) or prefill.", ("kind",)),
    MetricSpec(
        "outrider_device_seconds",
        "counter",
        "By the device's own clock, between two launches of a busy engine: at work, or idle.",
        ("state",),
        unit="seconds",
    ),
    MetricSpec("outrider_prompt_tokens", "counter", "Prompt tokens of ended requests.", vllm="vllm:prompt_tokens"),
    MetricSpec("outrider_generation_tokens", "counter", "Tokens committed.", vllm="vllm:generation_tokens"),
    MetricSpec("outrider_preemptions", "counter", "Times a sequence lost its KV pages.", vllm="vllm:num_preemptions"),
)
_ENGINE = (
    MetricSpec("outrider_requests_running", "gauge", "Sequences that run.", vllm="vllm:num_requests_running"),
    MetricSpec("outrider_requests_waiting", "gauge", "Sequences that wait.", vllm="vllm:num_requests_waiting"),
    MetricSpec("outrider_kv_pages", "gauge", "Pages of the KV cache, by state: used or free.", ("state",)),
    MetricSpec(
        "outrider_kv_usage_ratio", "gauge", "Share of KV pages in use, 0 to 1.", vllm="vllm:kv_cache_usage_perc"
    ),
    MetricSpec(
        "outrider_model_version", "gauge", "Of the weights in force: 1 at start, one more with each update of them."
    ),
    MetricSpec(
        "outrider_weights_pause_seconds",
        "gauge",
        "How long the last update of the weights held up steps; 0 before the first.",
        unit="seconds",
    ),
    MetricSpec("outrider_engine_up", "gauge", "1 until the engine loop fails."),
    MetricSpec(
        "outrider_engine_heartbeat_age_seconds", "gauge", "Time since the engine last began a step.", unit="seconds"
    ),
    MetricSpec("outrider_target_info", "gauge", "Always 1; what is served.", ("model", "dtype", "version")),
)
_REQUESTS = (
    MetricSpec(
        "outrider_requests",
        "counter",
        "Requests that ended, by outcome: finish reason, cancelled, or reason of the error.",
        ("outcome",),
        vllm="vllm:request_success",
    ),
    MetricSpec(
        "outrider_time_to_first_token_seconds",
        "histogram",
        "From arrival to the first token.",
        unit="seconds",
        buckets=LONG_SECONDS,
        vllm="vllm:time_to_first_token_seconds",
    ),
    MetricSpec(
        "outrider_time_per_output_token_seconds",
        "histogram",
        "Mean time per token of a request, after its first.",
        unit="seconds",
        buckets=FINE_SECONDS,
        vllm="vllm:request_time_per_output_token_seconds",
    ),
    MetricSpec(
        "outrider_request_seconds",
        "histogram",
        "From arrival to the end.",
        unit="seconds",
        buckets=LONG_SECONDS,
        vllm="vllm:e2e_request_latency_seconds",
    ),
    MetricSpec(
        "outrider_request_queue_seconds",
        "histogram",
        "From arrival to the first prefill.",
        unit="seconds",
        buckets=LONG_SECONDS,
        vllm="vllm:request_queue_time_seconds",
    ),
    MetricSpec(
        "outrider_request_prefill_seconds",
        "histogram",
        "From the first prefill to the first token.",
        unit="seconds",
        buckets=LONG_SECONDS,
        vllm="vllm:request_prefill_time_seconds",
    ),
    MetricSpec(
        "outrider_request_decode_seconds",
        "histogram",
        "From the first token to the last.",
        unit="seconds",
        buckets=LONG_SECONDS,
        vllm="vllm:request_decode_time_seconds",
    ),
    MetricSpec(
        "outrider_request_draft_wait_seconds",
        "histogram",
        "Time a request spent waiting for its draft, over all its steps.",
        unit="seconds",
        buckets=FINE_SECONDS,
    ),
    MetricSpec(
        "outrider_request_accepted_length",
        "histogram",
        "Mean tokens per step of a request, the target's own included.",
        buckets=LENGTHS,
    ),
    MetricSpec(
        "outrider_request_prompt_tokens",
        "histogram",
        "Prompt tokens of a request.",
        buckets=TOKENS,
        vllm="vllm:request_prompt_tokens",
    ),
    MetricSpec(
        "outrider_request_generation_tokens",
        "histogram",
        "Output tokens of a request.",
        buckets=TOKENS,
        vllm="vllm:request_generation_tokens",
    ),
)
RPC = (
    MetricSpec("outrider_rpc_calls", "counter", "Calls that ended, by method and gRPC status.", ("method", "code")),
    MetricSpec("outrider_rpc_in_flight", "gauge", "Calls under way, by method.", ("method",)),
)
GATEWAY = (
    MetricSpec(
        "outrider_gateway_requests",
        "counter",
        "HTTP requests for answers that ended, by endpoint and status; 499 where the client went away first.",
        ("endpoint", "status"),
    ),
    MetricSpec(
        "outrider_gateway_request_seconds",
        "histogram",
        "From the request's arrival to the end of its answer.",
        ("endpoint",),
        unit="seconds",
        buckets=LONG_SECONDS,
    ),
    MetricSpec(
        "outrider_gateway_time_to_first_token_seconds",
        "histogram",
        "From the request's arrival to the first token of its answer, streamed or not.",
        unit="seconds",
        buckets=LONG_SECONDS,
    ),
    MetricSpec("outrider_gateway_tokens", "counter", "Tokens of answers that were completed."),
    MetricSpec(
        "outrider_gateway_retries",
        "counter",
        "Answers that were started again on another target, before their first token.",
    ),
    MetricSpec("outrider_gateway_running", "gauge", "Answers being written, by target.", ("target",)),
    MetricSpec("outrider_gateway_target_healthy", "gauge", "1 while requests may go to the target.", ("target",)),
)
TARGET = (*_SPECULATION, *_STEPS, *_ENGINE, *_REQUESTS)
DRAFT = (
    MetricSpec("outrider_draft_streams", "gauge", "Propose streams open: connected target workers."),
    MetricSpec("outrider_draft_sequences", "gauge", "Sequences open."),
    MetricSpec("outrider_draft_sequences_opened", "counter", "Sequences opened."),
    MetricSpec(
        "outrider_draft_sequences_closed",
        "counter",
        "Sequences ended: closed by the target, or aborted with their stream.",
        ("how",),
    ),
    MetricSpec("outrider_draft_sequences_failed", "counter", "Sequences that failed, by reason.", ("reason",)),
    MetricSpec("outrider_draft_context_tokens", "counter", "Tokens that sequences were opened with."),
    MetricSpec("outrider_draft_committed_tokens", "counter", "Tokens that targets committed."),
    MetricSpec("outrider_draft_advances", "counter", "Sequence advances handled."),
    MetricSpec("outrider_draft_growths", "counter", "Sequence growths sent."),
    MetricSpec("outrider_draft_nodes", "counter", "Nodes sent."),
    MetricSpec(
        "outrider_draft_propose_seconds",
        "histogram",
        "Time to make one growth frame, all its sequences together.",
        unit="seconds",
        buckets=MICRO_SECONDS,
    ),
    MetricSpec(
        "outrider_draft_queue_seconds",
        "histogram",
        "Time the oldest sequence of a growth frame waited for its turn or for credit.",
        unit="seconds",
        buckets=MICRO_SECONDS,
    ),
    MetricSpec("outrider_draft_corpus_tokens", "counter", "Tokens learnt from corpora."),
    MetricSpec(
        "outrider_draft_figure",
        "gauge",
        "Figures of the drafter, by name with unit.",
        ("figure",),
    ),
    MetricSpec("outrider_draft_info", "gauge", "Always 1; what drafts.", ("drafter", "version")),
)
METRICS = {spec.name: spec for spec in (*TARGET, *DRAFT, *RPC, *GATEWAY)}
