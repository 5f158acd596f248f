"""What travels between target and draft, as plain values. `outrider.wire.trees` turns them into protobuf and back."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import DraftDistribution

DEFAULT_TENANT = "default"
# Of one element, by the name of its type.
ELEMENT_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float8_e4m3": 1})
# Of the vectors of one sequence in one frame.
MAX_FEATURE_BYTES = 1 << 20
# A growth names a sequence's root, whatever it is at base_step, by this id.
ROOT_ID = 0
MAX_OUTSTANDING_CREDIT = 1024
# Token ids stand in arrays of int32 wherever they are kept, and so does their number.
MAX_VOCABULARY = 2**31 - 1
# Parts of one frame, each about one sequence: with trees of 255 nodes such a frame has 0.6 MB, and with as many tokens
# as a step can commit it has 65,536 of them.
MAX_SEQUENCES_PER_FRAME = 256
# Sequences that one frame closes.
MAX_CLOSED_PER_FRAME = 4096


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds of the live tree of one sequence, the root not counted. Zero means the draft's own default."""

    max_nodes: int = 0
    max_depth: int = 0


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """The hidden states that a drafter reads of the target: one vector for each token.

    Attributes:
        layers: decoder layers whose outputs are wanted, counted from 0. The number of layers stands for the state
            after the last norm, which is what the target's lm_head reads. Vectors of several layers are joined in
            this order.
        width: of the vector that travels.
        dtype: on the wire: "float32", "bfloat16" or "float8_e4m3".
        projected: the target applies the head's projection to the joined vectors, and sends what comes out.
        required: the drafter drafts nothing without them; one that merely drafts better is asked for drafts anyway.
        window: tokens before the root that the drafter looks back at; 0 is all.
        projection_fingerprint: SHA-256, in hex, of the projection's weight as bfloat16; empty when unknown.
    """

    layers: tuple[int, ...]
    width: int
    dtype: str = "bfloat16"
    projected: bool = False
    required: bool = True
    window: int = 0
    projection_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of consecutive tokens as they travel: `data` holds `count` rows of `width` little-endian elements.

    `scales` has one factor for each row, or is empty, which is a factor of 1.
    """

    dtype: str
    width: int
    data: bytes
    scales: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        return len(self.data) // (self.width * ELEMENT_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence as it is sent to the draft first, or again after a reconnect."""

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    step: int
    seed: int
    mode: VerificationMode
    sampling: SamplingParams
    limits: TreeLimits
    vocabulary_size: int
    tenant: str = DEFAULT_TENANT
    corpus: str = ""
    traceparent: str = ""
    # Of the weights that will say what comes next; 0 from a target that does not say.
    model_version: int = 0


@dataclass(frozen=True, slots=True)
class SequenceAdvance:
    """What one step committed for one sequence. `step` counts the commits, this one included.

    `features` belong to the last tokens that can have one, of which the last is the one before the new root.
    """

    sequence_id: int
    step: int
    token_ids: tuple[int, ...]
    features: Vectors | None = None


@dataclass(frozen=True, slots=True)
class SequenceFeatures:
    """Features of tokens that the draft has: `vectors` row i belongs to token `position` + i of the sequence."""

    sequence_id: int
    position: int
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class SequenceGrowth:
    """Nodes added to one sequence's tree; meaning as in draft.proto.

    Node i has id `first_node_id + i`; `parent_ids[i]` is an earlier id, or ROOT_ID for the root at `base_step`. They
    are tuples, or `array.array`s where an engine receives many: numpy reads those without a copy.
    """

    sequence_id: int
    base_step: int
    first_node_id: int
    parent_ids: tuple[int, ...] | array[int]
    token_ids: tuple[int, ...] | array[int]
    scores: tuple[float, ...] | array[float]
    distributions: dict[int, DraftDistribution] = field(default_factory=dict)
    replaces: bool = False
    # Whether no node hangs below one of an earlier growth; None where it was not computed yet.
    self_contained: bool | None = field(default=None, compare=False)


def is_self_contained(parent_ids: Iterable[int], first_node_id: int) -> bool:
    """Whether a growth hangs below no earlier one: all parents are the root or nodes from `first_node_id` on."""
    return min(filter(None, parent_ids), default=first_node_id) >= first_node_id


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """The draft gave up on one sequence; the target goes on without drafts for it."""

    sequence_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What a draft service says of itself. A vocabulary size of 0 means any."""

    drafter: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    limits: TreeLimits
    max_context: int
    version: str
    features: FeatureRequest | None = None


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """A trie of a draft service as it is listed: a shared corpus, or a tenant's own trie, whose name is empty.

    Attributes:
        owner: the tenant that made it.
        tokens: tokens learnt; in a tenant's own trie those of prompts and outputs too.
        documents: documents learnt, where each piece of a long one counts.
        nodes, bytes: its size, and the memory it takes.
    """

    name: str
    owner: str
    tokens: int
    documents: int
    nodes: int
    bytes: int

    @property
    def shared(self) -> bool:
        """Whether every tenant may name it."""
        return bool(self.name)


class DraftEvents(Protocol):
    """Where a draft link delivers what it receives. Called from the link's own thread; must not block."""

    def on_growth(self, growths: Sequence[SequenceGrowth]) -> None:
        """Nodes arrived."""

    def on_failure(self, failure: SequenceFailure) -> None:
        """The draft closed one sequence."""

    def on_connected(self, info: DraftInfo) -> None:
        """The draft is there and has our vocabulary. The receiver opens its live sequences (again)."""

    def on_disconnected(self, reason: str) -> None:
        """The draft is gone, and so is its state of every sequence."""

    def on_lost(self, sequence_ids: Sequence[int]) -> None:
        """Of several drafts the one that followed these sequences is gone. The receiver opens them again, and others
        take them over."""


class DraftLink(Protocol):
    """A target's way to its draft, remote or in process. Calls return at once and never raise for a lost draft."""

    def open(self, sequence: OpenSequence) -> None:
        """Start or resume a sequence."""

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        """Tell what a step committed: one call per engine step, and one frame unless features make it too large."""

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        """Bring features of known tokens, for a drafter that asked. Dropped where the draft does not keep up."""

    def close(self, sequence_ids: Sequence[int]) -> None:
        """End sequences."""

    def cut_off(self, reason: str) -> None:
        """Part from a draft that cannot be borne: it is gone then, for this reason, and for a while."""
