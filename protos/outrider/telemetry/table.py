"""Every Prometheus metric of Outrider: the one table that code, docs, dashboard and tests read."""

from __future__ import annotations

import re
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


# Seconds. Speculative decoding takes 0.1 to 100 ms, where Prometheus' default bounds are too coarse.
FINE_SECONDS = (
    *(0.0001, 0.00015, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005),
    *(0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
# Bounds of histograms, by the word that a line of the tables below has in place of its type.
_BUCKETS: Mapping[str, tuple[float, ...]] = {
    "fine": FINE_SECONDS,
    "long": (*FINE_SECONDS, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
    # For what takes microseconds.
    "micro": (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, *FINE_SECONDS[:-6]),
    "tokens": tuple(2**power for power in range(18)),
    "rows": (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048),
    "lengths": (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0),
}
# Depths counted one by one; deeper nodes count under the last.
MAX_DEPTH = 64
# Of a step, in its order: forward is the model, of which launch is the host's part; the others are host work.
PHASES = ("wait", "plan", "launch", "forward", "verify", "commit")

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
_ROW = re.compile(r"(\w+) (\w+)(?:\(([\w, ]+)\))?: (.+)")


def _metrics(table: str) -> tuple[MetricSpec, ...]:
    """The metrics of a table: lines `TYPE NAME(LABELS): HELP`, which go on where the next one is indented; the word of
    its bounds is the type of a histogram. Raises `ValueError` for another line."""
    specs = []
    for line in table.strip().replace("\n    ", " ").split("\n"):
        if line.startswith("#"):
            continue
        match = _ROW.fullmatch(line)
        if match is None or (match[1] not in _BUCKETS and match[1] not in ("counter", "gauge")):
            raise ValueError(f"no metric: {line}")
        kind, name, labels, help = match.groups("")
        buckets = _BUCKETS.get(kind, ())
        words = tuple(labels.split(", ")) if labels else ()
        specs.append(MetricSpec(name, "histogram" if buckets else kind, help, words, buckets))
    return tuple(specs)


TARGET = _metrics("""
# Speculation.
counter outrider_spec_decode_num_drafts: Trees verified that had at least one drafted row.
counter outrider_spec_decode_num_draft_tokens: Drafted rows verified.
counter outrider_spec_decode_num_accepted_tokens: Drafted tokens kept.
counter outrider_spec_decode_num_accepted_tokens_per_depth(depth): Trees of which a node at this depth was kept; the
    root's children have depth 1. Added when a request ends.
counter outrider_spec_decode_num_drafts_per_depth(depth): Trees that reached this depth. Added when a request ends.
counter outrider_draft_passes(outcome): Passes of sequences that a draft follows, whose rows the device chose: hit
    where rows of the draft were there in time, else miss.
counter outrider_draft_rows(source): Drafted rows that the device chose, by source: the draft, or the device itself
    (lookup, recycled tokens).
counter outrider_draft_rows_accepted(source): Of them, those that were accepted.
counter outrider_draft_tokens_promised: Tokens that the chosen rows were expected to bring.
micro outrider_draft_round_trip_seconds: From sending a commit to a draft until its answer.
counter outrider_prediction_tokens(outcome): Tokens of requests' predictions that were verified, by outcome: accepted
    or rejected. Added when a request ends.
counter outrider_lossy_requests: Requests whose output need not be the model's own (typical acceptance above
    temperature 0), when they end.
counter outrider_lossy_tokens: Accepted drafts of such requests that the model would not have drawn. Added when they
    end.
counter outrider_fallback_steps: Sequence steps without the draft that they should have had.
counter outrider_speculation_switches(to): Times that load switched drafting on or off.
gauge outrider_speculation_active: 1 while drafting is on and a draft service is connected.
counter outrider_feature_vectors: Hidden states of tokens sent to a draft that reads them.
counter outrider_feature_bytes: Bytes of hidden states sent to the draft.
gauge outrider_feature_bytes_kept: Memory of hidden states kept for a draft that connects late.
gauge outrider_draft_connected: 1 while a draft is connected; absent where none is to be.
# Steps.
counter outrider_steps: Engine steps: forward passes.
counter outrider_common_page_steps: Those that read the first pages of several sequences once for all of them.
counter outrider_sequence_steps: Verify passes, counted once per sequence in them.
fine outrider_step_seconds: Duration of a step.
micro outrider_step_phase_seconds(phase): Duration of a step's phases: wait (for the draft), plan, forward, verify,
    commit; launch is the host's part of forward on a GPU.
rows outrider_step_rows: Rows of a forward pass, prefill included.
counter outrider_rows(kind): Rows of forward passes: decode (roots and drafts) or prefill.
counter outrider_device_seconds(state): By the device's own clock, between two launches of a busy engine: at work, or
    idle.
counter outrider_prompt_tokens: Prompt tokens of ended requests.
counter outrider_prefix_cache_queries: Prompt tokens of ended requests that were looked for in the cache.
counter outrider_prefix_cache_hits: Prompt tokens of ended requests whose keys and values were in the cache.
counter outrider_generation_tokens: Tokens committed.
counter outrider_preemptions: Times a sequence lost its KV pages.
# The engine.
gauge outrider_requests_running: Sequences that run.
gauge outrider_requests_waiting: Sequences that wait.
gauge outrider_kv_pages(state): Pages of the KV cache, by state: used, free, or cached (free once needed).
gauge outrider_kv_usage_ratio: Share of KV pages in use, 0 to 1.
gauge outrider_model_version: Of the weights in force: 1 at start, one more with each update of them.
gauge outrider_weights_pause_seconds: How long the last update of the weights held up steps; 0 before the first.
gauge outrider_engine_up: 1 until the engine loop fails.
gauge outrider_engine_heartbeat_age_seconds: Time since the engine last began a step.
gauge outrider_target_info(model, dtype, version): Always 1; what is served.
# Requests.
counter outrider_requests(outcome): Requests that ended, by outcome: finish reason, cancelled, or reason of the error.
long outrider_time_to_first_token_seconds: From arrival to the first token.
fine outrider_time_per_output_token_seconds: Mean time per token of a request, after its first.
long outrider_request_seconds: From arrival to the end.
long outrider_request_queue_seconds: From arrival to the first prefill.
long outrider_request_prefill_seconds: From the first prefill to the first token.
long outrider_request_decode_seconds: From the first token to the last.
fine outrider_request_draft_wait_seconds: Time a request spent waiting for its draft, over all its steps.
lengths outrider_request_accepted_length: Mean tokens per step of a request, the target's own included.
tokens outrider_request_prompt_tokens: Prompt tokens of a request.
tokens outrider_request_generation_tokens: Output tokens of a request.
""")
RPC = _metrics("""
counter outrider_rpc_calls(method, code): Calls that ended, by method and gRPC status.
gauge outrider_rpc_in_flight(method): Calls under way, by method.
""")
GATEWAY = _metrics("""
counter outrider_gateway_requests(endpoint, status): HTTP requests for answers that ended, by endpoint and status; 499
    where the client went away first.
long outrider_gateway_request_seconds(endpoint): From the request's arrival to the end of its answer.
long outrider_gateway_time_to_first_token_seconds: From the request's arrival to the first token of its answer,
    streamed or not.
counter outrider_gateway_tokens: Tokens of answers that were completed.
counter outrider_gateway_retries: Answers that were started again on another target, before their first token.
gauge outrider_gateway_running(target): Answers being written, by target.
gauge outrider_gateway_target_healthy(target): 1 while requests may go to the target.
""")
DRAFT = _metrics("""
gauge outrider_draft_streams: Propose streams open: connected target workers.
gauge outrider_draft_sequences: Sequences open.
counter outrider_draft_sequences_opened: Sequences opened.
counter outrider_draft_sequences_closed(how): Sequences ended: closed by the target, or aborted with their stream.
counter outrider_draft_sequences_failed(reason): Sequences that failed, by reason.
counter outrider_draft_context_tokens: Tokens that sequences were opened with.
counter outrider_draft_committed_tokens: Tokens that targets committed.
counter outrider_draft_advances: Sequence advances handled.
counter outrider_draft_growths: Sequence growths sent.
counter outrider_draft_nodes: Nodes sent.
micro outrider_draft_propose_seconds: Time to make one growth frame, all its sequences together.
micro outrider_draft_queue_seconds: Time the oldest sequence of a growth frame waited for its turn or for credit.
counter outrider_draft_corpus_tokens: Tokens inserted from corpora.
gauge outrider_draft_figure(figure): Figures of the drafter, by name with unit.
gauge outrider_draft_info(drafter, version): Always 1; what drafts.
""")
METRICS = {spec.name: spec for spec in (*TARGET, *DRAFT, *RPC, *GATEWAY)}
