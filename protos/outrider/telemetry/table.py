"""Every Prometheus metric of Outrider: `outrider.telemetry.names` is where it is read from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. Counters are exposed with `_total` appended; `vllm` is the name of its counterpart in vLLM."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str = ""

    @property
    def unit(self) -> str:
        """Prometheus names end in it."""
        return "seconds" if self.name.endswith("_seconds") else ""


# Seconds. Speculative decoding lives between 0.1 and 100 ms, where the advised bounds have next to nothing.
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


def _counter(name: str, help: str, *labels: str, vllm: str = "") -> MetricSpec:
    return MetricSpec(name, "counter", help, labels, vllm=vllm)


def _gauge(name: str, help: str, *labels: str, vllm: str = "") -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels, vllm=vllm)


def _histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str, vllm: str = "") -> MetricSpec:
    return MetricSpec(name, "histogram", help, labels, buckets, vllm)


_SPECULATION = (
    _counter(
        "outrider_spec_decode_num_drafts",
        "Trees verified that had at least one drafted row.",
        vllm="vllm:spec_decode_num_drafts",
    ),
    _counter(
        "outrider_spec_decode_num_draft_tokens", "Drafted rows verified.", vllm="vllm:spec_decode_num_draft_tokens"
    ),
    _counter(
        "outrider_spec_decode_num_accepted_tokens", "Drafted tokens kept.", vllm="vllm:spec_decode_num_accepted_tokens"
    ),
    _counter(
        "outrider_spec_decode_num_accepted_tokens_per_depth",
        "Trees of which a node at this depth was kept; the root's children have depth 1. Added when a request ends.",
        "depth",
        vllm="vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    _counter(
        "outrider_spec_decode_num_drafts_per_depth",
        "Trees that reached this depth. Added when a request ends.",
        "depth",
    ),
    _counter(
        "outrider_draft_passes",
        "Passes of sequences that a draft follows, whose rows the device chose: hit where rows of the draft were there "
        "in time, else miss.",
        "outcome",
    ),
    _counter(
        "outrider_draft_rows",
        "Drafted rows that the device chose, by source: the draft, or the sequence's own text alone (lookup).",
        "source",
    ),
    _counter("outrider_draft_rows_accepted", "Of them, those that were accepted.", "source"),
    _counter("outrider_draft_tokens_promised", "Tokens that the chosen rows were expected to bring."),
    _histogram("outrider_draft_round_trip_seconds", "From telling a draft of a commit to its answer.", MICRO_SECONDS),
    _counter("outrider_fallback_steps", "Sequence steps that wanted a draft and went on without one."),
    _counter("outrider_speculation_switches", "Times that load switched drafting on or off.", "to"),
    _gauge("outrider_speculation_active", "1 while drafts are asked for and a draft service is there."),
    _counter("outrider_feature_vectors", "Hidden states of tokens sent to a draft that reads them."),
    _counter("outrider_feature_bytes", "Bytes of hidden states sent to the draft."),
    _gauge("outrider_feature_bytes_kept", "Memory of hidden states kept for a draft that connects late."),
    _gauge("outrider_draft_connected", "1 while a draft service is connected."),
)
_STEPS = (
    _counter("outrider_steps", "Engine steps: forward passes."),
    _counter("outrider_sequence_steps", "Verify passes, counted once per sequence in them."),
    _histogram("outrider_step_seconds", "Duration of a step.", FINE_SECONDS),
    _histogram(
        "outrider_step_phase_seconds",
        "Duration of a step's phases: wait (for the draft), plan, forward, verify, commit; launch is the host's part "
        "of forward on a GPU.",
        MICRO_SECONDS,
        "phase",
    ),
    _histogram(
        "outrider_step_rows", "Rows of a forward pass, prefill included.", ROWS, vllm="vllm:iteration_tokens_total"
    ),
    _counter("outrider_rows", "Rows of forward passes: decode (roots and drafts) or prefill.", "kind"),
    _counter(
        "outrider_device_seconds",
        "By the device's own clock, between two launches of a busy engine: at work, or idle.",
        "state",
    ),
    _counter("outrider_prompt_tokens", "Prompt tokens of ended requests.", vllm="vllm:prompt_tokens"),
    _counter("outrider_generation_tokens", "Tokens committed.", vllm="vllm:generation_tokens"),
    _counter("outrider_preemptions", "Times a sequence lost its KV pages.", vllm="vllm:num_preemptions"),
)
_ENGINE = (
    _gauge("outrider_requests_running", "Sequences that run.", vllm="vllm:num_requests_running"),
    _gauge("outrider_requests_waiting", "Sequences that wait.", vllm="vllm:num_requests_waiting"),
    _gauge("outrider_kv_pages", "Pages of the KV cache, by state: used or free.", "state"),
    _gauge("outrider_kv_usage_ratio", "Share of KV pages in use, 0 to 1.", vllm="vllm:kv_cache_usage_perc"),
    _gauge("outrider_engine_up", "1 until the engine loop fails."),
    _gauge("outrider_engine_heartbeat_age_seconds", "Time since the engine last began a step."),
    _gauge("outrider_target_info", "Always 1; what is served.", "model", "dtype", "version"),
)
_REQUESTS = (
    _counter(
        "outrider_requests",
        "Requests that ended, by outcome: finish reason, cancelled, or reason of the error.",
        "outcome",
        vllm="vllm:request_success",
    ),
    _histogram(
        "outrider_time_to_first_token_seconds",
        "From arrival to the first token.",
        LONG_SECONDS,
        vllm="vllm:time_to_first_token_seconds",
    ),
    _histogram(
        "outrider_time_per_output_token_seconds",
        "Mean time per token of a request, after its first.",
        FINE_SECONDS,
        vllm="vllm:request_time_per_output_token_seconds",
    ),
    _histogram(
        "outrider_request_seconds", "From arrival to the end.", LONG_SECONDS, vllm="vllm:e2e_request_latency_seconds"
    ),
    _histogram(
        "outrider_request_queue_seconds",
        "From arrival to the first prefill.",
        LONG_SECONDS,
        vllm="vllm:request_queue_time_seconds",
    ),
    _histogram(
        "outrider_request_prefill_seconds",
        "From the first prefill to the first token.",
        LONG_SECONDS,
        vllm="vllm:request_prefill_time_seconds",
    ),
    _histogram(
        "outrider_request_decode_seconds",
        "From the first token to the last.",
        LONG_SECONDS,
        vllm="vllm:request_decode_time_seconds",
    ),
    _histogram(
        "outrider_request_draft_wait_seconds",
        "Time a request spent waiting for its draft, over all its steps.",
        FINE_SECONDS,
    ),
    _histogram(
        "outrider_request_accepted_length", "Mean tokens per step of a request, the target's own included.", LENGTHS
    ),
    _histogram(
        "outrider_request_prompt_tokens", "Prompt tokens of a request.", TOKENS, vllm="vllm:request_prompt_tokens"
    ),
    _histogram(
        "outrider_request_generation_tokens",
        "Output tokens of a request.",
        TOKENS,
        vllm="vllm:request_generation_tokens",
    ),
)
RPC = (
    _counter("outrider_rpc_calls", "Calls that ended, by method and gRPC status.", "method", "code"),
    _gauge("outrider_rpc_in_flight", "Calls under way, by method.", "method"),
)
TARGET = (*_SPECULATION, *_STEPS, *_ENGINE, *_REQUESTS)
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
    _counter("outrider_draft_advances", "Sequence advances taken in."),
    _counter("outrider_draft_growths", "Sequence growths sent."),
    _counter("outrider_draft_nodes", "Nodes sent."),
    _histogram(
        "outrider_draft_propose_seconds", "Time to make one growth frame, all its sequences together.", MICRO_SECONDS
    ),
    _histogram(
        "outrider_draft_queue_seconds",
        "Time the oldest sequence of a growth frame waited for its turn or for credit.",
        MICRO_SECONDS,
    ),
    _counter("outrider_draft_corpus_tokens", "Tokens learnt from corpora."),
    _gauge("outrider_draft_figure", "What the drafter says of itself, by name with unit.", "figure"),
    _gauge("outrider_draft_info", "Always 1; what drafts.", "drafter", "version"),
)
METRICS = {spec.name: spec for spec in (*TARGET, *DRAFT, *RPC)}
