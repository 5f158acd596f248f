"""The nouns of the target service: requests, running sequences, verdicts, totals."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from outrider.errors import OutriderError
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import DEFAULT_TENANT
from target_service.core.fairness import Share
from target_service.core.weights import FIRST_VERSION

# Passes that are launched at once at most.
MAX_STRIDE = 4


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """What a caller asks of the engine. Checked before it is built; never changed after."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: VerificationMode
    seed: int
    # Output tokens at most: sampling.max_tokens, or what the context leaves.
    max_tokens: int
    # Of TYPICAL.
    typical: TypicalAcceptance = field(default_factory=TypicalAcceptance)
    tenant: str = DEFAULT_TENANT
    # What the tenant may take of the engine.
    share: Share = field(default_factory=Share)
    speculate: bool = True
    max_draft_nodes: int = 63
    corpus: str = ""
    # The answer that the caller expects; empty without one.
    prediction: tuple[int, ...] = ()
    # The client drafts: each step waits for `Engine.verify`.
    external: bool = False
    # Verdicts say what was verified.
    trees: bool = False
    traceparent: str = ""

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from what the model says by itself. At temperature 0 TYPICAL is GREEDY."""
        return self.mode is VerificationMode.TYPICAL and not self.sampling.greedy


class FinishReason(Enum):
    """Why a sequence ended; the values are those of metrics and spans."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended, and on which stop."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token, before penalties and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DevicePass(NamedTuple):
    """What one pass of one sequence was, where the device chose its rows.

    Attributes:
        drafted: rows beside the root, and how many of them are nodes of the sequence's table.
        accepted: of `drafted`, and how many of them are nodes of the table.
        promised: tokens that `drafted` were expected to bring, and those of the table.
        prospects: tokens that the best 1, 3, 7 .. rows of the sequence would have been expected to bring.
        age: tokens between the table's root and the pass's; -1 where no table held the text.
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
    age: int
    root_row: int
    path: tuple[int, ...]


class VerifiedTree(NamedTuple):
    """What a step verified, for those who show it: a `TokenTree`'s rows, and which of them were accepted."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted_rows: tuple[int, ...]


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What the engine reports of a sequence. A struct, because up to 64 are made in every step and sent to another
    process: a frozen dataclass takes ten times as long to make."""

    sequence_id: int


class Verdict(_Event, frozen=True):
    """The immutable result of one step of one sequence.

    `token_ids` are the accepted rows' tokens, then the target's own next token (*bonus* when the path ended at a
    leaf, *recovered* otherwise), cut where a stop was met. `drafted_tokens` counts those that came from the draft. Of
    passes that were launched at once it holds the tokens of all, under the step of the last.
    """

    step: int
    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafted_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    queue_ns: int = 0
    compute_ns: int = 0
    # Drafted tokens of each pass, where later ones than the first have some.
    drafts_by_step: tuple[int, ...] = ()
    # Of the weights that said the tokens.
    model_version: int = FIRST_VERSION
    # Where the request asks for it, and the host knows it.
    tree: VerifiedTree | None = None

    @property
    def passes(self) -> int:
        """Passes that said its tokens: one for the accepted path and what follows it, and one for each token more."""
        return len(self.drafts_by_step) or max(1, len(self.token_ids) - self.drafted_tokens)


@dataclass(slots=True)
class SequenceTotals:
    """Sums over one sequence's life: plain integers, read once at its end. Times are monotonic nanoseconds."""

    arrived_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    prompt_tokens: int = 0
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
    # Of the request's prediction: tokens that were verified, and those of them that were accepted.
    predicted_tokens: int = 0
    accepted_predicted_tokens: int = 0
    # Accepted tokens that the model would not have drawn at their place.
    lossy_tokens: int = 0
    # The last reason for which its draft gave it up; empty if none did.
    draft_refused: str = ""


class SequenceFinished(_Event, frozen=True):
    """The last event of a sequence that ended by itself. Its last `Verdict` came just before."""

    finish: Finish
    totals: SequenceTotals


class SequenceFailed(_Event, frozen=True):
    """The last event of a sequence that could not go on. `draft_refused` is that of its totals."""

    error: OutriderError
    draft_refused: str = ""


SequenceEvent = Verdict | SequenceFinished | SequenceFailed


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did, for metrics. Durations in nanoseconds."""

    sequences: int
    # Sequences that committed tokens, once for each pass that said one, and those whose tree had a drafted row.
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
    # Hidden states sent to the draft, and the bytes that they took.
    feature_vectors: int = 0
    feature_bytes: int = 0
    # Of sequences whose rows the device chose while a draft followed them: passes with rows of the draft, and without.
    hits: int = 0
    misses: int = 0
    # Drafted rows that the device chose, and those that were accepted; of both, those that are the draft's (also where
    # the own text says the same); and the tokens that all of them promised.
    chosen_rows: int = 0
    chosen_accepted: int = 0
    table_rows: int = 0
    table_accepted: int = 0
    expected_tokens: float = 0.0
    # The last answer of the draft, from when it was told; 0 without one.
    round_trip_ns: int = 0
    # By the device's clock, of the launch before: at work, and idle until this one.
    busy_ns: int = 0
    idle_ns: int = 0
    # Passes launched at once, each of which is a step to whoever counts: times are those of all, rows those of one.
    passes: int = 1


class SequenceState(Enum):
    """Where a sequence is. WAITING -> PREFILL -> RUNNING -> (gone); a preempted sequence goes back to WAITING.

    EVICTED is one whose client had sent no tree when its pages were needed; it waits again once there is a tree.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    EVICTED = "evicted"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way: prompt plus committed tokens, and the KV pages that hold them.

    Invariants: `0 <= kv_length < len(token_ids)`; the root is the last token, whose KV is not computed;
    `len(token_ids) == prompt_length + totals.completion_tokens`; pages hold at least `kv_length` tokens. While a step
    is under way, the KV that it computes counts as computed, also that of tokens which it will say itself: `kv_length`
    may be equal, and with a stride of passes as much larger as passes follow the first.
    """

    sequence_id: int
    request: SequenceRequest
    token_ids: list[int]
    totals: SequenceTotals
    state: SequenceState = SequenceState.WAITING
    step: int = 0
    kv_length: int = 0
    # Of type "i", which copies into a step's integers at once.
    pages: array[int] = field(default_factory=lambda: array("i"))
    # The tree to verify next, when the client drafts.
    external_tree: TokenTree | None = None
    # While a step is prepared before the one under way has ended: the place of this sequence in that one, which will
    # say the next token. None when every token is known.
    pending: int | None = None
    # How many tokens that step will say, and how many drafted ones it may accept besides.
    pending_tokens: int = 0
    pending_drafts: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def begun(self) -> bool:
        """Whether a step has read of its prompt, or is about to."""
        return self.state is not SequenceState.WAITING or self.totals.preemptions > 0

    @property
    def root(self) -> int:
        return self.token_ids[-1]

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def length(self) -> int:
        """Tokens of prompt and output, awaited ones included."""
        return len(self.token_ids) + self.pending_tokens

    @property
    def full(self) -> bool:
        """Whether nothing may follow the tokens that are known or awaited."""
        return self.length - self.prompt_length >= self.request.max_tokens

    def feed(self, start: int, count: int) -> list[int]:
        """Tokens `start` .. `start + count` as a step reads them: the last awaited one as -1 - `pending`."""
        tokens = self.token_ids[start : start + count]
        if self.pending is not None and len(tokens) < count:
            tokens.append(-1 - self.pending)
        return tokens

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold. For tests and debug builds."""
        assert 0 <= self.kv_length < len(self.token_ids) + MAX_STRIDE
        assert len(self.token_ids) == self.prompt_length + self.totals.completion_tokens
