"""Every span and attribute of Outrider, by name: the one table that code, docs and tests read.

They follow OpenTelemetry's conventions where there are any: `rpc.*` (release candidate) and `gen_ai.*` (development).
There are none for speculative decoding, so the rest is `outrider.*`. Metrics are in `outrider.telemetry.table`. No
value anywhere holds prompt text or token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET_SERVICE = "outrider-target"
DRAFT_SERVICE = "outrider-draft"
CLIENT = "outrider-client"
# A client like any other: its spans are a client's.
GATEWAY_SERVICE = "outrider-gateway"


@dataclass(frozen=True, slots=True)
class Attribute:
    """One span attribute. `unit` is empty for counts and names."""

    name: str
    type: str
    help: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One kind of span: its name, OpenTelemetry kind, the service that records it, and its possible attributes."""

    name: str
    kind: str
    service: str
    help: str
    attributes: tuple[str, ...] = ()


_ATTRIBUTES = (
    Attribute("rpc.system.name", "string", "always grpc"),
    Attribute("rpc.method", "string", "full name of the method, package.Service/Method"),
    Attribute("rpc.response.status_code", "string", "gRPC status by name, such as OK or CANCELLED"),
    Attribute("error.type", "string", "reason of the error, such as QUOTA_EXCEEDED; the status where there is none"),
    Attribute("server.address", "string", "where the client called"),
    Attribute("gen_ai.operation.name", "string", "chat or text_completion"),
    Attribute("gen_ai.provider.name", "string", "always outrider"),
    Attribute("gen_ai.request.model", "string", "requested model"),
    Attribute("gen_ai.request.max_tokens", "int", "output tokens at most"),
    Attribute("gen_ai.request.temperature", "double", "sampling temperature"),
    Attribute("gen_ai.request.top_k", "int", "top-k in force; absent when off"),
    Attribute("gen_ai.request.top_p", "double", "top-p in force; absent when off"),
    Attribute("gen_ai.response.model", "string", "model that answered"),
    Attribute("gen_ai.response.finish_reasons", "string[]", "why the output ended"),
    Attribute("gen_ai.response.time_to_first_chunk", "double", "from arrival to the first token", "s"),
    Attribute("gen_ai.usage.input_tokens", "int", "prompt tokens"),
    Attribute("gen_ai.usage.output_tokens", "int", "output tokens, the end token included"),
    Attribute("outrider.sequence_id", "int", "sequence, as target and draft both count it"),
    Attribute("outrider.tenant", "string", "tenant of the caller"),
    Attribute("outrider.verification_mode", "string", "greedy, coupled, rejection or typical"),
    Attribute("outrider.outcome", "string", "finish reason, cancelled, aborted, or reason of the error"),
    Attribute("outrider.steps", "int", "verify passes"),
    Attribute("outrider.drafted_steps", "int", "verify passes with at least one drafted row"),
    Attribute("outrider.drafted_tokens", "int", "drafted rows verified"),
    Attribute("outrider.accepted_tokens", "int", "drafted tokens kept"),
    Attribute("outrider.predicted_tokens", "int", "tokens of the request's prediction that were verified"),
    Attribute("outrider.accepted_predicted_tokens", "int", "of them, those that were kept"),
    Attribute("outrider.lossy", "boolean", "true where the output need not be the model's own; absent elsewhere"),
    Attribute("outrider.lossy_tokens", "int", "accepted drafts that the model would not have drawn; of lossy requests"),
    Attribute("outrider.drafted_by_depth", "int[]", "[d]: steps whose tree reached depth d + 1"),
    Attribute("outrider.accepted_by_depth", "int[]", "[d]: steps that kept a node at depth d + 1"),
    Attribute("outrider.mean_accepted_length", "double", "tokens per step, the target's own included"),
    Attribute("outrider.draft_wait", "double", "time spent waiting for the draft", "s"),
    Attribute("outrider.fallback_steps", "int", "steps without the draft that they should have had"),
    Attribute("outrider.preemptions", "int", "times the sequence lost its KV pages and began again"),
    Attribute("outrider.model_version", "int", "version of the target's weights; of a request, those it ended with"),
    Attribute("outrider.step", "int", "number of the step within its sequence"),
    Attribute("outrider.committed_tokens", "int", "tokens committed"),
    Attribute("outrider.drafter", "string", "registered name of the drafter"),
    Attribute("outrider.context_tokens", "int", "tokens the draft was opened with"),
    Attribute("outrider.growths", "int", "growths sent"),
    Attribute("outrider.nodes", "int", "nodes sent"),
    Attribute("outrider.propose_time", "double", "time the growths took to make, batch mates included", "s"),
)
ATTRIBUTES = {attribute.name: attribute for attribute in _ATTRIBUTES}

_RPC = ("rpc.system.name", "rpc.method", "rpc.response.status_code", "error.type")
# Of a request that a service answers.
_SERVED = (
    *_RPC,
    *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.request.max_tokens"),
    *("gen_ai.request.temperature", "gen_ai.request.top_k", "gen_ai.request.top_p", "gen_ai.response.model"),
    *("outrider.sequence_id", "outrider.tenant", "outrider.verification_mode", "outrider.lossy"),
    *("gen_ai.response.finish_reasons", "gen_ai.response.time_to_first_chunk", "gen_ai.usage.input_tokens"),
    *("gen_ai.usage.output_tokens", "outrider.outcome", "outrider.steps", "outrider.drafted_steps"),
    *("outrider.drafted_tokens", "outrider.accepted_tokens", "outrider.predicted_tokens"),
    *("outrider.accepted_predicted_tokens", "outrider.lossy_tokens", "outrider.drafted_by_depth"),
    *("outrider.accepted_by_depth", "outrider.mean_accepted_length", "outrider.draft_wait", "outrider.fallback_steps"),
    *("outrider.preemptions", "outrider.model_version"),
)

GENERATE = "outrider.v1.TargetService/Generate"
OPENENGINE_GENERATE = "openengine.v1.Inference/Generate"
VERIFY_SEQUENCE = "outrider.verify.sequence"
QUEUE = "outrider.queue"
PREFILL = "outrider.prefill"
DECODE = "outrider.decode"
STEP = "outrider.step"
PROPOSE = "outrider.v1.DraftService/Propose"
DRAFT_SEQUENCE = "outrider.draft.sequence"

SPANS = (
    SpanSpec(
        GENERATE,
        "CLIENT",
        CLIENT,
        "One generation, as the client saw it.",
        (
            *_RPC,
            *("server.address", "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"),
            *("gen_ai.response.time_to_first_chunk", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
            *("outrider.sequence_id", "outrider.steps", "outrider.accepted_tokens"),
        ),
    ),
    SpanSpec(GENERATE, "SERVER", TARGET_SERVICE, "One generation, from arrival to its last event.", _SERVED),
    SpanSpec(OPENENGINE_GENERATE, "SERVER", TARGET_SERVICE, "One output of a request of OpenEngine's.", _SERVED),
    SpanSpec(
        VERIFY_SEQUENCE,
        "SERVER",
        TARGET_SERVICE,
        "One sequence of a Verify stream, in the trace of the stream's caller.",
        _SERVED,
    ),
    SpanSpec(QUEUE, "INTERNAL", TARGET_SERVICE, "From arrival to the first prefill."),
    SpanSpec(PREFILL, "INTERNAL", TARGET_SERVICE, "From there to the first token.", ("gen_ai.usage.input_tokens",)),
    SpanSpec(
        DECODE,
        "INTERNAL",
        TARGET_SERVICE,
        "From there to the last token.",
        ("gen_ai.usage.output_tokens", "outrider.steps", "outrider.accepted_tokens", "outrider.draft_wait"),
    ),
    SpanSpec(
        STEP,
        "INTERNAL",
        TARGET_SERVICE,
        "One verify pass of the sequence; only with --trace-steps, for at most the first 512 steps.",
        ("outrider.step", "outrider.committed_tokens", "outrider.accepted_tokens", "outrider.model_version"),
    ),
    SpanSpec(PROPOSE, "SERVER", DRAFT_SERVICE, "One stream of one target worker, which lives for hours.", _RPC),
    SpanSpec(
        DRAFT_SEQUENCE,
        "INTERNAL",
        DRAFT_SERVICE,
        "One sequence while the draft follows it: child of the request's span, linked to the stream's.",
        (
            *("error.type", "outrider.sequence_id", "outrider.tenant", "outrider.drafter"),
            *("outrider.verification_mode", "outrider.context_tokens", "outrider.model_version"),
            *("outrider.committed_tokens", "outrider.growths", "outrider.nodes", "outrider.propose_time"),
            "outrider.outcome",
        ),
    ),
)
