"""Messages between the user of a draft and the process that holds its link, in frames of `outrider.processes.framing`:
one msgpack struct each, and behind it the hidden states, uncopied. Decoding them cannot run code.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from outrider.drafting.link import LinkOptions
from outrider.processes.framing import Buffer, framed_parts, parts_of
from outrider.tree import DraftDistribution
from outrider.wire.frames import (
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceFailure,
    SequenceFeatures,
    SequenceGrowth,
    Vectors,
)


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the messages below."""


# To the link.


class Connect(_Message, frozen=True):
    """The first message: the arguments of `outrider.drafting.link.connect_draft`."""

    address: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    options: LinkOptions


class Open(_Message, frozen=True):
    """See `DraftLink.open`."""

    sequence: OpenSequence


class Advance(_Message, frozen=True):
    """See `DraftLink.advance`."""

    advances: list[SequenceAdvance]


class SendFeatures(_Message, frozen=True):
    """See `DraftLink.send_features`."""

    features: list[SequenceFeatures]


class Close(_Message, frozen=True):
    """See `DraftLink.close`."""

    sequence_ids: list[int]


class CutOff(_Message, frozen=True):
    """See `DraftLink.cut_off`."""

    reason: str


# From the link: calls of `DraftEvents`.


class Connected(_Message, frozen=True):
    """See `DraftEvents.on_connected`."""

    info: DraftInfo


class Disconnected(_Message, frozen=True):
    """See `DraftEvents.on_disconnected`."""

    reason: str


class GrowthArrays(msgspec.Struct, frozen=True, array_like=True):
    """A `SequenceGrowth` with its numbers as raw C arrays, which numpy reads without a copy.

    Attributes:
        parent_ids: int64.
        token_ids: int32.
        scores: float64.
    """

    sequence_id: int
    base_step: int
    first_node_id: int
    parent_ids: bytes
    token_ids: bytes
    scores: bytes
    distributions: dict[int, DraftDistribution]
    replaces: bool
    self_contained: bool | None

    @classmethod
    def of(cls, growth: SequenceGrowth) -> GrowthArrays:
        """The growth with its numbers as raw arrays."""
        return cls(
            growth.sequence_id,
            growth.base_step,
            growth.first_node_id,
            array("q", growth.parent_ids).tobytes(),
            array("i", growth.token_ids).tobytes(),
            array("d", growth.scores).tobytes(),
            growth.distributions,
            growth.replaces,
            growth.self_contained,
        )

    def growth(self) -> SequenceGrowth:
        """The growth with its numbers in `array.array`s."""
        return SequenceGrowth(
            self.sequence_id,
            self.base_step,
            self.first_node_id,
            array("q", self.parent_ids),
            array("i", self.token_ids),
            array("d", self.scores),
            self.distributions,
            self.replaces,
            self.self_contained,
        )


class Grown(_Message, frozen=True):
    """See `DraftEvents.on_growth`."""

    growths: list[GrowthArrays]


class Failed(_Message, frozen=True):
    """See `DraftEvents.on_failure`."""

    failure: SequenceFailure


class Lost(_Message, frozen=True):
    """See `DraftEvents.on_lost`."""

    sequence_ids: list[int]


class Alive(_Message, frozen=True):
    """A heartbeat. A process that sends nothing at all is stuck."""


ToLink = Connect | Open | Advance | SendFeatures | Close | CutOff
FromLink = Connected | Disconnected | Grown | Failed | Lost | Alive


# What travels in place of `Advance` and `SendFeatures`: msgpack would copy megabytes of hidden states. Making a struct
# takes a tenth of a frozen dataclass's time.


class _VectorsHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`Vectors` without their data, which is a part of the frame."""

    dtype: str
    width: int
    scales: tuple[float, ...]

    @classmethod
    def of(cls, vectors: Vectors) -> _VectorsHead:
        return cls(vectors.dtype, vectors.width, vectors.scales)

    def vectors(self, states: Iterator[memoryview]) -> Vectors:
        """The vectors whose data is the next of `states`. Raises `msgspec.ValidationError` if there is none."""
        data = next(states, None)
        if data is None:
            raise msgspec.ValidationError("a frame lacks parts that its message names")
        # Protobuf takes `bytes` only.
        return Vectors(self.dtype, self.width, bytes(data), self.scales)


class _AdvanceHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `SequenceAdvance` without the data of its features."""

    sequence_id: int
    step: int
    token_ids: tuple[int, ...]
    features: _VectorsHead | None

    @classmethod
    def of(cls, advance: SequenceAdvance) -> _AdvanceHead:
        head = _VectorsHead.of(advance.features) if advance.features is not None else None
        return cls(advance.sequence_id, advance.step, advance.token_ids, head)

    def advance(self, states: Iterator[memoryview]) -> SequenceAdvance:
        """The advance; `states` begin with the data of its features, if it has any."""
        features = self.features.vectors(states) if self.features is not None else None
        return SequenceAdvance(self.sequence_id, self.step, self.token_ids, features)


class _FeaturesHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `SequenceFeatures` without its data."""

    sequence_id: int
    position: int
    vectors: _VectorsHead

    @classmethod
    def of(cls, features: SequenceFeatures) -> _FeaturesHead:
        return cls(features.sequence_id, features.position, _VectorsHead.of(features.vectors))

    def features(self, states: Iterator[memoryview]) -> SequenceFeatures:
        """The features, whose data is the next of `states`."""
        return SequenceFeatures(self.sequence_id, self.position, self.vectors.vectors(states))


class _AdvanceHeads(_Message, frozen=True):
    heads: list[_AdvanceHead]


class _FeaturesHeads(_Message, frozen=True):
    heads: list[_FeaturesHead]


def pack(message: ToLink | FromLink) -> list[bytes]:
    """The frame of a message, as buffers to send one after the other. All but the first are hidden states."""
    states: list[bytes] = []
    head: msgspec.Struct = message
    match message:
        case Advance():
            head = _AdvanceHeads([_AdvanceHead.of(one) for one in message.advances])
            states = [one.features.data for one in message.advances if one.features is not None]
        case SendFeatures():
            head = _FeaturesHeads([_FeaturesHead.of(one) for one in message.features])
            states = [one.vectors.data for one in message.features]
    return framed_parts(_encoder.encode(head), states)


def unpack_to_link(body: Buffer) -> ToLink:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    first, *others = _parts_of(body)
    decoded: Connect | Open | _AdvanceHeads | _FeaturesHeads | Close | CutOff = _to_link.decode(first)
    states = iter(others)
    match decoded:
        case _AdvanceHeads():
            message: ToLink = Advance([head.advance(states) for head in decoded.heads])
        case _FeaturesHeads():
            message = SendFeatures([head.features(states) for head in decoded.heads])
        case _:
            message = decoded
    _check_none(states)
    return message


def unpack_from_link(body: Buffer) -> FromLink:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    first, *others = _parts_of(body)
    message: FromLink = _from_link.decode(first)
    _check_none(iter(others))
    return message


def _parts_of(body: Buffer) -> list[memoryview]:
    try:
        return parts_of(body)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None


def _check_none(states: Iterator[memoryview]) -> None:
    if next(states, None) is not None:
        raise msgspec.ValidationError("a frame has parts that its message does not name")


_encoder = msgspec.msgpack.Encoder()
_to_link = msgspec.msgpack.Decoder(Connect | Open | _AdvanceHeads | _FeaturesHeads | Close | CutOff)
_from_link = msgspec.msgpack.Decoder(FromLink)
