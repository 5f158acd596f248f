"""Updates of a target's weights: where they come from, what becomes of running requests, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from outrider.errors import InvalidField
from outrider.v1 import target_pb2

# Well below what a message may be.
_PIECE_BYTES = 1 << 20


class RunningRequests(Enum):
    """What becomes of requests that have begun. Those that wait run with the new weights, whatever it is."""

    # They end with the old weights first; the others wait until then.
    DRAIN = "drain"
    # They end with `WeightsChanged`, to be asked again.
    ABORT = "abort"
    # They are read again with the new weights, and go on.
    CONTINUE = "continue"


_NUMBERS = {
    RunningRequests.DRAIN: target_pb2.RUNNING_REQUESTS_DRAIN,
    RunningRequests.ABORT: target_pb2.RUNNING_REQUESTS_ABORT,
    RunningRequests.CONTINUE: target_pb2.RUNNING_REQUESTS_CONTINUE,
}


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """An update that was done; times in seconds.

    `model_version` is that of the weights in force; `tensors` and `bytes` are what was exchanged. `prepare` took
    reading and checking, while requests ran, and `pause` the exchange, in which no step ran. `aborted` requests ended
    with `WeightsChanged`; `continued` ones are read again.
    """

    model_version: int
    tensors: int
    bytes: int
    prepare: float
    pause: float
    aborted: int
    continued: int

    @classmethod
    def from_pb(cls, pb: target_pb2.UpdateWeightsResponse) -> WeightsUpdated:
        return cls(
            pb.model_version,
            pb.tensors,
            pb.bytes,
            pb.prepare_nanoseconds / 1e9,
            pb.pause_nanoseconds / 1e9,
            pb.aborted_sequences,
            pb.continued_sequences,
        )


def update_requests(
    folder: str, files: Sequence[Path | bytes], running: RunningRequests
) -> AsyncIterator[target_pb2.UpdateWeightsRequest]:
    """The messages of an update: of a folder on the server, or of safetensors files, as paths here or as their bytes.

    Raises `InvalidField` unless exactly one of the two is given, and `OSError` for a file that is not there.
    """
    if bool(folder) == bool(files):
        raise InvalidField("source", "needs exactly one of folder and files")
    begin = target_pb2.BeginUpdate(running=_NUMBERS[running])
    if folder:
        begin.folder = folder
    else:
        begin.files.sizes.extend(file.stat().st_size if isinstance(file, Path) else len(file) for file in files)
    return _messages(begin, files)


async def _messages(
    begin: target_pb2.BeginUpdate, files: Sequence[Path | bytes]
) -> AsyncIterator[target_pb2.UpdateWeightsRequest]:
    yield target_pb2.UpdateWeightsRequest(begin=begin)
    for file in files:
        if isinstance(file, Path):
            with file.open("rb") as opened:
                while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
                    yield target_pb2.UpdateWeightsRequest(data=piece)
        else:
            for start in range(0, len(file), _PIECE_BYTES):
                yield target_pb2.UpdateWeightsRequest(data=file[start : start + _PIECE_BYTES])
