"""Messages from the leading rank to the others, and their frames: structs in msgpack, in the frames of
`outrider.processes.framing`."""

from __future__ import annotations

import msgspec

from outrider.processes.framing import Buffer, framed
from target_service.config import TargetConfig
from target_service.model.rank_link import PassMessage


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: what to load, as which rank, and the file at which ranks meet."""

    config: TargetConfig
    rank: int
    store: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To be answered with one byte once the device has done all that was sent before."""


class BeginServing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Wait for others no longer than for a step from now on."""


class ReadWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read this rank's part of a folder's weights, while passes run. To be answered with a byte."""

    folder: str


# Answers of a rank, one byte each: to `Ping`, and to `ReadWeights`.
ALIVE, WEIGHTS_READ, WEIGHTS_REFUSED = b"\1", b"\2", b"\3"

RankMessage = Join | BeginServing | Ping | ReadWeights | PassMessage
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankMessage)


def pack(message: RankMessage) -> bytes:
    """The frame of a message."""
    return framed(_encoder.encode(message))


def unpack(body: Buffer) -> RankMessage:
    """The message of a frame's body. Raises `msgspec.DecodeError` for any other."""
    message: RankMessage = _decoder.decode(body)
    return message
