"""Messages between the user of a draft and the process that holds its link: one msgpack struct each, in frames of
`outrider.processes.framing`. Decoding them cannot run code."""

from __future__ import annotations

from array import array

import msgspec

from outrider.drafting.link import LinkOptions
from outrider.processes.framing import framed
from outrider.tree import DraftDistribution
from outrider.wire.frames import (
    DraftInfo,
    OpenSequence,
    SequenceAdvance,
    SequenceFailure,
    SequenceFeatures,
    SequenceGrowth,
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


def pack(message: ToLink | FromLink) -> bytes:
    """The frame of a message."""
    return framed(_encoder.encode(message))


def unpack_to_link(body: bytes | bytearray) -> ToLink:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    message: ToLink = _to_link.decode(body)
    return message


def unpack_from_link(body: bytes | bytearray) -> FromLink:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    message: FromLink = _from_link.decode(body)
    return message


_encoder = msgspec.msgpack.Encoder()
_to_link = msgspec.msgpack.Decoder(ToLink)
_from_link = msgspec.msgpack.Decoder(FromLink)
