"""The frames between target and draft as plain values. `outrider.wire.drafts` converts them from and to protobuf."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import DraftDistribution

DEFAULT_TENANT = "default"
# Bytes of one element, by type name.
ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1}
# Bytes of the vectors of one sequence in one frame.
MAX_FEATURE_BYTES = 1 << 20
# The node id of a sequence's root at a growth's base_step.
ROOT_ID = 0
MAX_OUTSTANDING_CREDIT = 1024
# Token ids and vocabulary sizes are kept in int32 arrays.
MAX_VOCABULARY = 2**31 - 1
# Nodes of one growth, which may be more than a pass verifies: a target that runs ahead chooses among them.
MAX_NODES = 1023
# Parts of one frame, each for one sequence: 2.5 MB with trees of 1,023 nodes, or 65,536 committed tokens.
MAX_SEQUENCES_PER_FRAME = 256
# Sequences that one frame closes.
MAX_CLOSED_PER_FRAME = 4096


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds of one sequence's tree, the root not counted. 0 means the draft's own default."""

    max_nodes: int = 0
    max_depth: int = 0


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """The hidden states of the target that a drafter reads: one vector per token."""

    # Decoder layers whose outputs are read, counted from 0; their number means the state after the last norm, which the
    # target's lm_head reads. Vectors of several layers are concatenated in this order.
    layers: tuple[int, ...]
    width: int  # elements of the vector on the wire
    dtype: str = "bfloat16"  # on the wire: "float32", "bfloat16" or "float8_e4m3"
    projected: bool = False  # the target applies the head's projection to the concatenated vectors and sends the result
    # The drafter cannot draft without them; one that only drafts better with them is used without.
    required: bool = True
    window: int = 0  # tokens before the root that the drafter reads; 0 is all
    projection_fingerprint: str = ""  # SHA-256, in hex, of the projection's weight as bfloat16; empty when unknown


class Vectors(NamedTuple):
    """Vectors of consecutive tokens on the wire: `data` holds `rows` rows of `width` little-endian elements. `scales`
    has one factor per row; empty means factors of 1. A named tuple for the same reason as `SequenceAdvance`."""

    dtype: str
    width: int
    data: bytes
    scales: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.data) // (self.width * ELEMENT_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence as it is first sent to the draft, or sent again after a reconnect."""

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
    model_version: int = 0  # version of the target's weights; 0 where the target reports none


class SequenceAdvance(NamedTuple):
    """What one step committed for one sequence. `step` counts the commits, this one included. `features` are those of
    the last tokens before the new root, which has none yet. A named tuple, because every step makes one for each
    sequence: creating a frozen dataclass takes almost three times as long."""

    sequence_id: int
    step: int
    token_ids: tuple[int, ...]
    features: Vectors | None = None


class SequenceFeatures(NamedTuple):
    """Features of tokens that the draft already has: row i of `vectors` is that of token `position` + i."""

    sequence_id: int
    position: int
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class SequenceGrowth:
    """Nodes added to one sequence's tree; meaning as in draft.proto. Node i has id `first_node_id + i`; `parent_ids[i]`
    is an earlier id, or ROOT_ID for the root at `base_step`. Numbers are in tuples, or in `array.array`s where an
    engine receives many: numpy reads those without a copy."""

    sequence_id: int
    base_step: int
    first_node_id: int
    parent_ids: tuple[int, ...] | array[int]
    token_ids: tuple[int, ...] | array[int]
    scores: tuple[float, ...] | array[float]
    distributions: dict[int, DraftDistribution] = field(default_factory=dict)
    replaces: bool = False
    # See `is_self_contained`; None where it was not computed.
    self_contained: bool | None = field(default=None, compare=False)


def is_self_contained(parent_ids: Iterable[int], first_node_id: int) -> bool:
    """Whether a growth needs no earlier one: all parents are the root or nodes from `first_node_id` on."""
    return min(filter(None, parent_ids), default=first_node_id) >= first_node_id


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """A draft service's description of itself. A vocabulary size of 0 means any."""

    drafter: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    limits: TreeLimits
    max_context: int
    version: str
    features: FeatureRequest | None = None


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """An entry of a list of tries: a shared corpus, or a tenant's own trie, whose name is empty."""

    name: str
    owner: str  # the tenant that made it
    tokens: int  # tokens inserted; a tenant's own trie also counts those of prompts and outputs
    documents: int  # documents inserted; each piece of a long one counts
    nodes: int
    bytes: int  # of memory

    @property
    def shared(self) -> bool:
        """Whether every tenant may draft from it."""
        return bool(self.name)


class DraftLink(Protocol):
    """A target's connection to its draft. Calls return at once and raise nothing for a lost one."""

    def open(self, sequence: OpenSequence) -> None:
        """Start or resume a sequence."""

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        """Send what a step committed: one call per engine step, and one frame unless features make it too large."""

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        """Send features of tokens sent before, for a drafter that requests them. Dropped if the draft is too slow."""

    def close(self, sequence_ids: Sequence[int]) -> None:
        """End sequences."""

    def cut_off(self, reason: str) -> None:
        """Disconnect a draft that sends too much, for this reason; it is connected to again after a pause."""


class StoppableLink(DraftLink, Protocol):
    """A `DraftLink` that holds a thread, a connection or a drafter."""

    def stop(self) -> None:
        """Free everything. Nothing is delivered afterwards. Idempotent."""
