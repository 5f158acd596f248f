"""Messages between the serving process and the engine's, and their frames.

`benchmarks/engine/engine_process.py` measures both ends of a step's report.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from outrider.errors import OutriderError
from outrider.processes.messages import MessageCodec, ProcessMessage
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

# To the engine.


class Configure(ProcessMessage, frozen=True):
    """The first message: the settings to load a model with."""

    config: TargetConfig


class Submit(ProcessMessage, frozen=True):
    """Run a request under an id that was never used before."""

    sequence_id: int
    request: SequenceRequest


class Verify(ProcessMessage, frozen=True):
    """Verify a client's tree in the next step."""

    sequence_id: int
    tree: TokenTree


class Cancel(ProcessMessage, frozen=True):
    """End a sequence."""

    sequence_id: int


class UpdateWeights(ProcessMessage, frozen=True):
    """Exchange the model's weights, under an id that was never used before. Answered by `WeightsDone`."""

    update_id: int
    update: WeightUpdate


class CancelUpdate(ProcessMessage, frozen=True):
    """Keep the old weights, unless they were exchanged already."""

    update_id: int


class Stop(ProcessMessage, frozen=True):
    """Fail the remaining sequences, and end."""


# From the engine.


class ModelFound(ProcessMessage, frozen=True):
    """The model's files are on this machine, so that its tokenizer can be loaded while the model is. Each process loads
    its own tokenizer. The first message, unless it is `StartRefused`."""


class ModelLoaded(ProcessMessage, frozen=True):
    """The model is loaded, and its steps are captured for a while. Meanwhile forms of output can be prepared, for
    logits of so many tokens, of which some end an output."""

    vocabulary_size: int
    end_token_ids: tuple[int, ...]


class Ready(ProcessMessage, frozen=True):
    """The engine takes requests. Nothing but `ModelFound` and `ModelLoaded` comes before."""

    served: ServedModel


class StartRefused(ProcessMessage, frozen=True):
    """The engine cannot run: why, and the status to exit with."""

    status: int
    reason: str


class Report(ProcessMessage, frozen=True):
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


class WeightsDone(ProcessMessage, frozen=True):
    """The result of an update of the weights: `updated`, or else why it was refused."""

    update_id: int
    updated: WeightsUpdated | None
    refused: OutriderError | None


class DrafterChanged(ProcessMessage, frozen=True):
    """The draft service came, went or changed."""

    info: DraftInfo | None


class Dead(ProcessMessage, frozen=True):
    """A step failed. The engine's process logs the reason, and ends."""

    reason: str


ToEngine = Configure | Submit | Verify | Cancel | UpdateWeights | CancelUpdate | Stop
FromEngine = ModelFound | ModelLoaded | Ready | StartRefused | Report | WeightsDone | DrafterChanged | Dead
Message = ToEngine | FromEngine


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


_codec: MessageCodec[Message] = MessageCodec(Message, enc_hook=_packed_error, dec_hook=_unpacked_error)
pack, unpack, receive = _codec.pack, _codec.unpack, _codec.receive
