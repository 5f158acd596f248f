"""Messages from the leading rank to the others, and their frames."""

from __future__ import annotations

from outrider.processes.messages import MessageCodec, ProcessMessage
from target_service.config import TargetConfig
from target_service.model.rank_link import PassMessage


class Join(ProcessMessage, frozen=True):
    """The first message: what to load, as which rank, and the file at which ranks meet."""

    config: TargetConfig
    rank: int
    store: str


class Ping(ProcessMessage, frozen=True):
    """To be answered with one byte once the device has done all that was sent before."""


class BeginServing(ProcessMessage, frozen=True):
    """Wait for others no longer than for a step from now on."""


class ReadWeights(ProcessMessage, frozen=True):
    """Read this rank's part of a folder's weights, while passes run. To be answered with a byte."""

    folder: str


# Answers of a rank, one byte each: to `Ping`, and to `ReadWeights`.
ALIVE, WEIGHTS_READ, WEIGHTS_REFUSED = b"\1", b"\2", b"\3"

RankMessage = Join | BeginServing | Ping | ReadWeights | PassMessage
_codec: MessageCodec[RankMessage] = MessageCodec(RankMessage)
pack, unpack = _codec.pack, _codec.unpack
