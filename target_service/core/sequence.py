"""The core types of the target service: requests, running sequences, verdicts, totals."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from outrider.errors import OutriderError
from outrider.limits import TenantLimits
from outrider.sampling import FinishReason, SamplingParams, TokenLogprobs, TypicalAcceptance, VerificationMode
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree, VerifiedTree
from outrider.wire.frames import DEFAULT_TENANT
from target_service.core.weights import FIRST_VERSION
from tree_kernels.prefix_tree import PrefixNode

# Most passes that are launched at once.
MAX_PASSES = 4


@dataclass(frozen=True, slots=True)
class TriggeredForm:
    """A form that holds from where the output's text has the trigger, outside of the model's reasoning.

    Attributes:
        form: it begins with the trigger.
        trigger: may be the name of a special token, or begin with one.
        only_first: it counts where the output begins with it, behind spaces, and nowhere else.
        reasoning: what marks the beginning and the end of the model's reasoning; None if the model marks none.
        reasons: whether the output begins inside of reasoning.
    """

    form: StructuredOutput
    trigger: str
    only_first: bool = False
    reasoning: tuple[str, str] | None = None
    reasons: bool = False


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A request to the engine. Checked before it is built, never changed."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: VerificationMode
    seed: int
    # Most output tokens: sampling.max_tokens, or the rest of the context.
    max_tokens: int
    # For TYPICAL.
    typical: TypicalAcceptance = field(default_factory=TypicalAcceptance)
    tenant: str = DEFAULT_TENANT
    # What the tenant may take of the engine; tokens in the KV cache count in whole pages.
    limits: TenantLimits = field(default_factory=TenantLimits)
    speculate: bool = True
    max_draft_nodes: int = 63
    corpus: str = ""
    # The answer that the caller expects; empty without one.
    prediction: tuple[int, ...] = ()
    # The client drafts: each step waits for `Engine.verify`.
    external: bool = False
    # Whether it may begin with pages that others have filled.
    reuses_pages: bool = True
    # Verdicts include the verified trees.
    trees: bool = False
    # Of an answer that may call tools.
    triggered_form: TriggeredForm | None = None
    traceparent: str = ""

    @property
    def has_form(self) -> bool:
        """Whether a grammar masks what may come next: a pass may be launched before the tokens of the last one are
        known, and verified only then."""
        return self.sampling.structured_output is not None

    @property
    def grammar(self) -> StructuredOutput | None:
        """The form whose grammar has to be compiled before it begins; None without one."""
        return self.sampling.structured_output if self.triggered_form is None else self.triggered_form.form

    @property
    def device_rows(self) -> bool:
        """Whether the device may choose its drafted rows: it does so by tokens, which rejection sampling does not
        allow."""
        return not self.external and self.mode is not VerificationMode.REJECTION

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the model's own distribution. At temperature 0 TYPICAL is GREEDY."""
        return self.mode is VerificationMode.TYPICAL and not self.sampling.greedy


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended, and on which stop."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


class DevicePass(NamedTuple):
    """One pass of one sequence, where the device chose its rows.

    Attributes:
        drafted, drafted_from_table: rows beside the root; those that are nodes of the sequence's table.
        accepted, accepted_from_table: how many of them were accepted.
        expected, expected_from_table: how many of them were expected to be accepted.
        prospects: expected tokens of the sequence's best 1, 3, 7 .. rows.
        root_row: row of the sequence's root among all rows of the pass.
        path: accepted rows, relative to the root.
    """

    drafted: int
    drafted_from_table: int
    accepted: int
    accepted_from_table: int
    expected: float
    expected_from_table: float
    prospects: tuple[float, ...]
    root_row: int
    path: tuple[int, ...]


class _SequenceEventBase(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """An event of a sequence. A struct, because up to 64 are made in every step and sent to another process: creating a
    frozen dataclass takes ten times as long."""

    sequence_id: int


class StepVerdict(_SequenceEventBase, frozen=True):
    """The immutable result of one step of one sequence.

    `token_ids` are the accepted rows' tokens, then the target's own next token (*bonus* when the path ended at a
    leaf, *recovered* otherwise), cut at a stop. `drafted_tokens` counts those that came from the draft. For passes that
    were launched at once it holds the tokens of all, with the step of the last.
    """

    step: int
    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafted_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    queue_ns: int = 0
    compute_ns: int = 0
    # Drafted tokens of each pass, if any but the first has some.
    drafts_by_step: tuple[int, ...] = ()
    # Version of the weights that the step ran with.
    model_version: int = FIRST_VERSION
    # If requested, and known to the host.
    tree: VerifiedTree | None = None

    @property
    def passes(self) -> int:
        """Passes that made its tokens: one for the accepted path and the next token, and one for each further token."""
        return len(self.drafts_by_step) or max(1, len(self.token_ids) - self.drafted_tokens)


class PromptLogprobs(_SequenceEventBase, frozen=True):
    """Log-probabilities of the next tokens of a sequence's prompt, in arrays: as objects each would take 2 KB.

    Attributes:
        first: place in the prompt of the first of them. The prompt's first token has no log-probability.
        count: how many tokens.
        logprobs: float32 [count], or [count - 1] where `first` is 0.
        top_ids, top_logprobs: int32 and float32 [those of `logprobs`, alternatives], the most probable first.
        alternatives: to each token.
    """

    first: int
    count: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    alternatives: int


@dataclass(slots=True)
class SequenceTotals:
    """Sums over one sequence's life: plain integers, read once at its end. Times are monotonic nanoseconds."""

    arrived_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    prompt_tokens: int = 0
    # Of the prompt, those that were looked for in the tree of prefixes, and those whose keys were there.
    queried_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # [d]: steps whose tree reached, or that accepted a node at, depth d + 1.
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    draft_wait_ns: int = 0
    fallback_steps: int = 0
    preemptions: int = 0
    # Tokens of the request's prediction that were verified, and those that were accepted.
    predicted_tokens: int = 0
    accepted_predicted_tokens: int = 0
    # Accepted tokens that the model would not have sampled.
    lossy_tokens: int = 0
    # Why its draft last stopped drafting for it; empty if it did not.
    draft_refused: str = ""


class SequenceFinished(_SequenceEventBase, frozen=True):
    """The last event of a sequence that ended by itself. Its last `StepVerdict` came just before."""

    finish: Finish
    totals: SequenceTotals


class SequenceFailed(_SequenceEventBase, frozen=True):
    """The last event of a sequence that failed. `draft_refused` is that of its totals."""

    error: OutriderError
    draft_refused: str = ""


# The last event of a sequence, and every event.
SequenceEnd = SequenceFinished | SequenceFailed
SequenceEvent = StepVerdict | PromptLogprobs | SequenceEnd


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures of one engine step, for metrics. Durations in nanoseconds."""

    sequences: int
    # Sequences that committed tokens, counted once per pass that made one, and those with drafted rows.
    committed_sequences: int
    drafted_sequences: int
    decode_rows: int
    prefill_rows: int
    drafted_tokens: int
    accepted_tokens: int
    committed_tokens: int
    fallback_sequences: int
    draft_wait_ns: int
    plan_ns: int
    # The host's part of the forward pass, which `forward_ns` includes.
    launch_ns: int
    forward_ns: int
    verify_ns: int
    commit_ns: int
    total_ns: int
    feature_vectors: int = 0
    feature_bytes: int = 0
    # Passes of followed sequences whose rows the device chose: with rows of the draft, and without.
    hits: int = 0
    misses: int = 0
    # Drafted rows that the device chose, and those accepted; of both, those of the draft (even if lookup found the
    # same); and the expected tokens of all.
    chosen_rows: int = 0
    chosen_accepted: int = 0
    table_rows: int = 0
    table_accepted: int = 0
    expected_tokens: float = 0.0
    # Time from the last commit sent to the draft to its answer; 0 without one.
    round_trip_ns: int = 0
    # By the device's clock: time of the launch before this one, and idle time between the two.
    busy_ns: int = 0
    idle_ns: int = 0
    # Passes launched at once, each counted as a step: times are those of all, rows those of one.
    passes: int = 1
    # Of these, those that read pages once which sequences have in common.
    common_page_passes: int = 0


class SequenceState(Enum):
    """State of a sequence: WAITING -> PREFILL -> RUNNING -> (gone); a preempted sequence goes back to WAITING. EVICTED
    is a sequence that was preempted while it waited for its client's tree; with a tree it is WAITING again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    EVICTED = "evicted"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: prompt plus committed tokens, and the KV pages that hold them.

    Invariants: `0 <= kv_length < len(token_ids)`; the root is the last token, whose KV is not computed;
    `len(token_ids) == prompt_length + totals.completion_tokens`; pages hold at least `kv_length` tokens. The KV of a
    step under way counts as computed, also that of tokens which it samples itself: `kv_length` may then be equal to
    `len(token_ids)`, or larger by the passes that follow the first of a launch.
    """

    sequence_id: int
    request: SequenceRequest
    token_ids: list[int]
    totals: SequenceTotals
    state: SequenceState = SequenceState.WAITING
    step: int = 0
    kv_length: int = 0
    # Of type "i", to copy it into a step's integers at once.
    pages: array[int] = field(default_factory=lambda: array("i"))
    # The first of them that layers with a window still keep.
    window_start: int = 0
    # How many of the first pages are in the tree of prefixes, and the node of the last of them.
    prefix_pages: int = 0
    prefix: PrefixNode | None = None
    # The last page of those that its group has in common, see `engine.common_pages`; -1 where it is in none.
    common_page: int = -1
    # Of its recurrent states, as long as it holds pages; 0 where there are none.
    state_slot: int = 0
    # The tree to verify next, when the client drafts.
    external_tree: TokenTree | None = None
    # While a step is prepared before the one under way has ended: this sequence's place in that one, which samples the
    # pending token. None when every token is known.
    pending: int | None = None
    # Tokens that the step under way will sample, and drafted ones that it may accept besides.
    pending_tokens: int = 0
    pending_drafts: int = 0
    # Rows of prompts that all steps had read when it came.
    read_before: int = 0
    # Tokens of the prompt whose log-probabilities were computed, where the request asks for them.
    scored_tokens: int = 0
    # Whether it takes no part in the step that is prepared then: its own tokens have to be on the host first.
    sits_out: bool = False
    # Whether it takes part in no step, since the mask of its next one is still computed.
    awaits_mask: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.scored_tokens < self.prompt_length

    def scores(self, start: int, count: int) -> range:
        """Places in the prompt of the tokens that a chunk of `count` tokens from `start` on scores: each row scores the
        token behind it, and none the first."""
        if not self.unscored:
            return range(0)
        return range(self.scored_tokens, min(start + count + 1, self.prompt_length))

    @property
    def begun(self) -> bool:
        """Whether a step has read, or is about to read, tokens of it."""
        return self.state is not SequenceState.WAITING or self.totals.preemptions > 0

    @property
    def root(self) -> int:
        return self.token_ids[-1]

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def length(self) -> int:
        """Tokens of prompt and output, including pending ones."""
        return len(self.token_ids) + self.pending_tokens

    @property
    def remaining(self) -> int:
        """Output tokens that may follow the known and pending ones."""
        return self.request.max_tokens - self.totals.completion_tokens - self.pending_tokens

    def feed(self, start: int, count: int) -> list[int]:
        """Tokens `start` .. `start + count` as a step reads them; a pending one is -1 - `pending`."""
        tokens = self.token_ids[start : start + count]
        if self.pending is not None and len(tokens) < count:
            tokens.append(-1 - self.pending)
        return tokens
