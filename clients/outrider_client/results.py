"""A target's responses as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from outrider.sampling import FinishReason, TokenLogprobs, VerificationMode
from outrider.tree import VerifiedTree
from outrider.v1 import target_pb2, tree_pb2
from outrider.wire.same_names import value_of
from outrider.wire.trees import mode_from_pb
from outrider_client.answers import AnswerPart, ContentPart, ToolCall, part_from_pb

_REASONS = {target_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


def reason_from_pb(number: target_pb2.FinishReason.ValueType) -> FinishReason | None:
    """The reason in a message; None while the sequence goes on."""
    return _REASONS.get(number)


def _logprobs_from_pb(pbs: Iterable[target_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple([TokenLogprobs(pb.logprob, tuple((top.token_id, top.logprob) for top in pb.top)) for pb in pbs])


def _token_texts_from_pb(pbs: Mapping[int, target_pb2.TokenText]) -> dict[int, TokenText]:
    return {token_id: TokenText(each.text, each.special) for token_id, each in pbs.items()}


@dataclass(frozen=True, slots=True)
class Started:
    """The request as the target accepted it."""

    sequence_id: int
    prompt_tokens: int
    seed: int
    mode: VerificationMode | None
    speculating: bool
    model: str

    @classmethod
    def from_pb(cls, pb: target_pb2.GenerateStarted) -> Started:
        return cls(pb.sequence_id, pb.prompt_tokens, pb.seed, mode_from_pb(pb.mode), pb.speculating, pb.model)


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of one token by itself, as it is behind other text: bytes, since it may be a part of a character. A
    `special` token has no text in an answer, and is called so."""

    text: bytes
    special: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a text; `token_texts` are their own texts by id, where they were asked for."""

    token_ids: tuple[int, ...]
    token_texts: Mapping[int, TokenText] = field(default_factory=dict)

    @classmethod
    def from_pb(cls, pb: target_pb2.TokenizeResponse) -> Tokenized:
        return cls(tuple(pb.token_ids), _token_texts_from_pb(pb.token_texts))


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt, and its log-probability given the tokens before it: None for the first, which has none
    before it."""

    token_id: int
    logprobs: TokenLogprobs | None

    @classmethod
    def from_pb(cls, pb: target_pb2.PromptLogprobs) -> tuple[PromptToken, ...]:
        """The tokens of a piece of a prompt."""
        count, found = pb.alternatives, list[TokenLogprobs | None]()
        for place, logprob in enumerate(pb.logprobs):
            at = slice(place * count, (place + 1) * count)
            top = zip(pb.top_token_ids[at], pb.top_logprobs[at], strict=True)
            found.append(TokenLogprobs(logprob, tuple(top)))
        first = [None] * (len(pb.token_ids) - len(found))
        return tuple([cls(*pair) for pair in zip(pb.token_ids, first + found, strict=True)])


# Without slots: one is made for each step of a stream, and values put into its dictionary at once cost a fifth.
@dataclass(frozen=True)
class Chunk:
    """The tokens of one step, or of several consecutive ones.

    `drafted_tokens` of `token_ids` were drafted (`drafted` has which); the rest are the model's own. `step` is the
    last step. `drafts_by_step` has the drafted tokens of each step, where steps after the first have some. `text` is
    the text completed by these tokens; it may lag behind them by part of a character or of a stop string. `parts` are
    the same and, where `Client.generate` asked for `answer_parts` and the target can tell them apart, the reasoning and
    the tool calls that `text` is without. `queue_ns` and `compute_ns` are measured by the target. `tree` is what the
    last step verified, where `Speculation.trees` is set and the target has it. `token_texts` are those of all token ids
    in the chunk, where `Speculation.token_texts` is set and the target has a tokenizer. `prompt` are the next
    tokens of the prompt, where `SamplingParams.prompt_logprobs` is set: all of them before the first of `token_ids`.
    """

    token_ids: tuple[int, ...]
    text: str
    drafted_tokens: int
    step: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    queue_ns: int = 0
    compute_ns: int = 0
    drafts_by_step: tuple[int, ...] = ()
    # Version of the weights that generated the tokens; 0 from a target that does not report it.
    model_version: int = 0
    tree: VerifiedTree | None = None
    token_texts: Mapping[int, TokenText] = field(default_factory=dict)
    parts: tuple[AnswerPart, ...] = ()
    prompt: tuple[PromptToken, ...] = ()

    @property
    def drafted(self) -> tuple[bool, ...]:
        """Whether each token was drafted."""
        marks: list[bool] = []
        for count in self.drafts_by_step or (self.drafted_tokens,):
            marks += [True] * count + [False]
        return (*marks, *[False] * len(self.token_ids))[: len(self.token_ids)]

    @classmethod
    def from_pb(cls, pb: target_pb2.GenerateChunk, timings: tree_pb2.Timings) -> Chunk:
        text = pb.text
        if pb.parts:
            parts = tuple(map(part_from_pb, pb.parts))
            text = "".join([part.text for part in parts if isinstance(part, ContentPart)])
        else:
            parts = (ContentPart(text),) if text else ()
        values: dict[str, Any] = {
            "token_ids": tuple(pb.token_ids[:]),
            "text": text,
            "parts": parts,
            "drafted_tokens": pb.drafted_tokens,
            "step": pb.step,
            "queue_ns": timings.queue_nanoseconds,
            "compute_ns": timings.compute_nanoseconds,
            "model_version": pb.model_version,
            "token_texts": _token_texts_from_pb(pb.token_texts) if pb.token_texts else MappingProxyType({}),
        }
        # Of what few chunks have, the defaults are the class's.
        if pb.logprobs:
            values["logprobs"] = _logprobs_from_pb(pb.logprobs)
        if pb.drafts_by_step:
            values["drafts_by_step"] = tuple(pb.drafts_by_step)
        if pb.HasField("tree"):
            tree = pb.tree.tree
            values["tree"] = VerifiedTree(tuple(tree.token_ids), tuple(tree.parents), tuple(pb.tree.accepted_rows))
        if pb.HasField("prompt_logprobs"):
            values["prompt"] = PromptToken.from_pb(pb.prompt_logprobs)
        chunk = object.__new__(cls)
        chunk.__dict__.update(values)
        return chunk


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """What drafting did for one request; field meanings as in target.proto."""

    steps: int
    drafted_steps: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    draft_wait_ns: int
    fallback_steps: int

    @classmethod
    def from_pb(cls, pb: target_pb2.SpeculationTotals) -> SpeculationTotals:
        return value_of(cls, pb, draft_wait_ns=pb.draft_wait_nanoseconds)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The phases of one request, measured by the target in seconds."""

    queue: float
    prefill: float
    decode: float

    @classmethod
    def from_pb(cls, pb: target_pb2.RequestTimes) -> RequestTimes:
        return cls(pb.queue_nanoseconds / 1e9, pb.prefill_nanoseconds / 1e9, pb.decode_nanoseconds / 1e9)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. `text`, `reasoning` and `tool_calls` are the parts of its chunks, added up.
    `time_to_first_token` and `duration` are seconds on the client's clock."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    stop_string: str | None
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationTotals
    times: RequestTimes
    time_to_first_token: float
    duration: float
    trace_id: str = ""
    # Tokens of the request's prediction that were verified and accepted, and verified and rejected.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    # Of the prompt's tokens, those that earlier requests had left in the target's cache.
    cached_tokens: int = 0
    # Whether the output may differ from the model's own, and accepted drafts that the model would not have sampled.
    lossy: bool = False
    lossy_tokens: int = 0
    # Why the draft service did not draft for the request, or not to its end: a reason such as "UNKNOWN_CORPUS".
    draft_refused: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole request, prefill and network included."""
        return self.completion_tokens / self.duration if self.duration else 0.0

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first; None for outputs of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.duration - self.time_to_first_token) / (self.completion_tokens - 1)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step, the target's own token counted: 1 is plain decoding."""
        return self.completion_tokens / self.speculation.steps if self.speculation.steps else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one step of a sequence that the client drafts for. `token_ids[-1]` is the next root."""

    sequence_id: int
    step: int
    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    next_step: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    # Version of the weights that generated the tokens; 0 from a target that does not report it.
    model_version: int = 0

    @classmethod
    def from_pb(cls, pb: target_pb2.Verdict) -> Verdict:
        return cls(
            pb.sequence_id,
            pb.step,
            tuple(pb.accepted_rows),
            tuple(pb.token_ids),
            pb.next_step,
            reason_from_pb(pb.finish_reason),
            _logprobs_from_pb(pb.logprobs),
            pb.model_version,
        )


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target serves, and its limits; field meanings as in target.proto."""

    model: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    max_context: int
    max_rows: int
    dtype: str
    page_size: int
    kv_tokens: int
    modes: tuple[VerificationMode, ...]
    drafter: str
    end_token_ids: tuple[int, ...]
    version: str
    torch_version: str = ""
    triton_version: str = ""
    device: str = ""
    device_name: str = ""
    captured_step_sizes: int = 0
    capturable_step_sizes: int = 0
    draft: str = ""
    draft_connected: bool = False
    speculating: bool = False
    # Empty from targets that do not report it.
    speculation_reason: str = ""
    # Version of the current weights; 0 from a target that does not report it.
    model_version: int = 0
    # Bytes of one token in the KV cache, all layers; 0 from a target that does not report it.
    kv_token_bytes: int = 0
    # Names that requests may give as their model; empty from targets that do not report them.
    served_names: tuple[str, ...] = ()
    # The tenant that the caller is; empty from a target that does not report it.
    tenant: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give as their model, the model's own first."""
        return self.served_names or (self.model,)

    @classmethod
    def from_pb(cls, pb: target_pb2.GetTargetInfoResponse) -> TargetInfo:
        modes = tuple(mode for number in pb.modes if (mode := mode_from_pb(number)) is not None)
        return value_of(cls, pb, modes=modes)
