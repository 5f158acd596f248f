"""Messages between the serving process and the engine's, and their frames.

A message is a struct in msgpack, in a frame of `outrider.processes.framing`. Decoding never runs code from the socket;
`benchmarks/engine/engine_process.py` measures both ends of a step's report.
"""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from outrider.errors import OutriderError
from outrider.processes.framing import Buffer, framed
from outrider.tree import TokenTree
from outrider.weight_updates import WeightsUpdated
from outrider.wire.frames import DraftInfo
from outrider.wire.trees import error_of, status_of
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot
from target_service.core.sequence import SequenceEvent, SequenceRequest, SequenceTotals, StepStats
from target_service.core.weights import WeightUpdate
from tree_kernels.prefix_tree import PageChange


class _EngineMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the messages below."""


# To the engine.


class Configure(_EngineMessage, frozen=True):
    """The first message: the settings to load a model with."""

    config: TargetConfig


class Submit(_EngineMessage, frozen=True):
    """Run a request under an id that was never used before."""

    sequence_id: int
    request: SequenceRequest


class Verify(_EngineMessage, frozen=True):
    """Verify a client's tree in the next step."""

    sequence_id: int
    tree: TokenTree


class Cancel(_EngineMessage, frozen=True):
    """End a sequence."""

    sequence_id: int


class UpdateWeights(_EngineMessage, frozen=True):
    """Exchange the model's weights, under an id that was never used before. Answered by `WeightsDone`."""

    update_id: int
    update: WeightUpdate


class CancelUpdate(_EngineMessage, frozen=True):
    """Keep the old weights, unless they were exchanged already."""

    update_id: int


class Stop(_EngineMessage, frozen=True):
    """Fail the remaining sequences, and end."""


# From the engine.


class ModelFound(_EngineMessage, frozen=True):
    """The model's files are on this machine, so that its tokenizer can be loaded while the model is. Each process loads
    its own tokenizer. The first message, unless it is `StartRefused`."""


class Ready(_EngineMessage, frozen=True):
    """The model is loaded. Nothing but `ModelFound` comes before."""

    served: ServedModel


class StartRefused(_EngineMessage, frozen=True):
    """The engine cannot run: why, and the status to exit with."""

    status: int
    reason: str


class Report(_EngineMessage, frozen=True):
    """What happened since the last report: at most one step's events. Also sent as a heartbeat."""

    events: list[SequenceEvent]
    steps: list[StepStats]
    # Sequences that ended without an event, and how: cancelled ones.
    ended: list[tuple[int, SequenceTotals, str]]
    # Each time that drafting was switched by load: whether it is on.
    switches: list[bool]
    # Shared pages that came and went.
    pages: list[PageChange]
    snapshot: EngineSnapshot
    beat_ns: int


class WeightsDone(_EngineMessage, frozen=True):
    """The result of an update of the weights: `updated`, or else why it was refused."""

    update_id: int
    updated: WeightsUpdated | None
    refused: OutriderError | None


class DrafterChanged(_EngineMessage, frozen=True):
    """The draft service came, went or changed."""

    info: DraftInfo | None


class Dead(_EngineMessage, frozen=True):
    """A step failed. The engine's process logs the reason, and ends."""

    reason: str


ToEngine = Configure | Submit | Verify | Cancel | UpdateWeights | CancelUpdate | Stop
FromEngine = ModelFound | Ready | StartRefused | Report | WeightsDone | DrafterChanged | Dead
Message = ToEngine | FromEngine


def pack(message: Message) -> bytes:
    """The frame of a message."""
    return framed(_encoder.encode(message))


def unpack(body: Buffer) -> Message:
    """The message of a frame without its length. Raises `msgspec.DecodeError` for anything else."""
    message: Message = _decoder.decode(body)
    return message


def _packed_error(error: Any) -> Any:
    """An error as its status: the only value here that is neither a struct nor a dataclass."""
    if not isinstance(error, OutriderError):
        raise NotImplementedError(f"no message holds a {type(error).__name__}")
    return status_of(error).SerializeToString()


def _unpacked_error(_: type[Any], status: Any) -> OutriderError:
    try:
        return error_of(Status.FromString(status))
    except DecodeError as error:
        raise ValueError(f"an error that is no status: {error}") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed_error)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_unpacked_error)
