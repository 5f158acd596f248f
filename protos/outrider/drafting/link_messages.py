"""Messages between the user of a draft and the process that holds its link, in frames of `outrider.processes.framing`:
one msgpack struct each, and behind it the hidden states, uncopied. Decoding them cannot run code.

To the link: Open Advance SendFeatures Close CutOff (calls of `DraftLink`).
From the link: the events of `outrider.drafting.events`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from outrider.drafting.events import Connected, Disconnected, Lost, Opened, SequenceFailure
from outrider.drafting.link import LinkOptions
from outrider.processes.framing import Buffer, framed_parts, parts_of
from outrider.processes.messages import ProcessMessage
from outrider.tree import DraftDistribution
from outrider.wire.frames import OpenSequence, SequenceAdvance, SequenceFeatures, SequenceGrowth, Vectors


class Connect(ProcessMessage, frozen=True):
    """The first message: the arguments of `outrider.drafting.link.connect_draft`."""

    address: str
    vocabulary_size: int
    fingerprint: str
    options: LinkOptions


class Open(ProcessMessage, frozen=True):
    sequence: OpenSequence


class Advance(ProcessMessage, frozen=True):
    advances: list[SequenceAdvance]


class SendFeatures(ProcessMessage, frozen=True):
    features: list[SequenceFeatures]


class Close(ProcessMessage, frozen=True):
    sequence_ids: list[int]


class CutOff(ProcessMessage, frozen=True):
    reason: str


class GrowthArrays(msgspec.Struct, frozen=True, array_like=True):
    """A `SequenceGrowth` with its numbers as raw C arrays, which numpy reads uncopied: int64, int32 and float64."""

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
        place = growth.sequence_id, growth.base_step, growth.first_node_id
        parent_ids, token_ids = array("q", growth.parent_ids).tobytes(), array("i", growth.token_ids).tobytes()
        scores = array("d", growth.scores).tobytes()
        return cls(*place, parent_ids, token_ids, scores, growth.distributions, growth.replaces, growth.self_contained)

    def growth(self) -> SequenceGrowth:
        place = self.sequence_id, self.base_step, self.first_node_id
        arrays = array("q", self.parent_ids), array("i", self.token_ids), array("d", self.scores)
        return SequenceGrowth(*place, *arrays, self.distributions, self.replaces, self.self_contained)


class GrownArrays(ProcessMessage, frozen=True):
    """`outrider.drafting.events.Grown` with arrays."""

    growths: list[GrowthArrays]


class Alive(ProcessMessage, frozen=True):
    """A heartbeat. A process that sends nothing at all is stuck."""


ToLink = Connect | Open | Advance | SendFeatures | Close | CutOff
FromLink = GrownArrays | Opened | SequenceFailure | Connected | Disconnected | Lost | Alive


def pack(message: ToLink | FromLink) -> list[bytes]:
    """The frame of a message, as buffers to send one after the other. All but the first are hidden states, megabytes
    that msgpack would copy."""
    states: list[bytes] = []
    match message:
        case Advance():
            states = [one.features.data for one in message.advances if one.features is not None]
            if states:
                # Plain tuples are encoded alike and made in a fraction of the time.
                heads: list[Any] = [(*one[:3], _without_data(one.features)) for one in message.advances]
                message = Advance(heads)
        case SendFeatures():
            states = [one.vectors.data for one in message.features]
            heads = [(*one[:2], _without_data(one.vectors)) for one in message.features]
            message = SendFeatures(heads)
    return framed_parts(_encoder.encode(message), states)


def _without_data(vectors: Vectors | None) -> Any:
    return None if vectors is None else (vectors.dtype, vectors.width, b"", vectors.scales)


def unpack_to_link(body: Buffer) -> ToLink:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    first, *others = _parts_of(body)
    message: ToLink = _to_link.decode(first)
    # Protobuf takes `bytes` only.
    states = map(bytes, others)
    match message:
        case Advance():
            for place, one in enumerate(message.advances):
                if one.features is not None:
                    features = _with_data(one.features, states)
                    message.advances[place] = SequenceAdvance(one.sequence_id, one.step, one.token_ids, features)
        case SendFeatures():
            message = SendFeatures([one._replace(vectors=_with_data(one.vectors, states)) for one in message.features])
    _check_none(states)
    return message


def unpack_from_link(body: Buffer) -> FromLink:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    first, *others = _parts_of(body)
    message: FromLink = _from_link.decode(first)
    _check_none(iter(others))
    return message


def _with_data(vectors: Vectors, states: Iterator[bytes]) -> Vectors:
    """The vectors with the next of `states` as data. Raises `msgspec.ValidationError` if there is none."""
    data = next(states, None)
    if data is None:
        raise msgspec.ValidationError("a frame lacks parts that its message names")
    return Vectors(vectors.dtype, vectors.width, data, vectors.scales)


def _parts_of(body: Buffer) -> list[memoryview]:
    try:
        return parts_of(body)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None


def _check_none(states: Iterator[object]) -> None:
    if next(states, None) is not None:
        raise msgspec.ValidationError("a frame has parts that its message does not name")


_encoder = msgspec.msgpack.Encoder()
_to_link = msgspec.msgpack.Decoder(ToLink)
_from_link = msgspec.msgpack.Decoder(FromLink)
