"""The messages of an update of a target's weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from outrider.errors import InvalidField
from outrider.v1 import target_pb2
from outrider.weight_updates import RunningRequests, WeightsUpdated

# Well below the limit of a message.
_PIECE_BYTES = 1 << 20
_Files = Sequence[Path | bytes]
_Requests = AsyncIterator[target_pb2.UpdateWeightsRequest]


def updated_from_pb(pb: target_pb2.UpdateWeightsResponse) -> WeightsUpdated:
    prepare, pause = pb.prepare_nanoseconds / 1e9, pb.pause_nanoseconds / 1e9
    counts = pb.aborted_sequences, pb.continued_sequences
    return WeightsUpdated(pb.model_version, pb.tensors, pb.bytes, prepare, pause, *counts)


def update_requests(folder: str, files: _Files, running: RunningRequests) -> _Requests:
    """The messages of an update: of a folder on the server, or of safetensors files, as paths here or as their bytes.
    Raises `InvalidField` unless exactly one of the two is given, and `OSError` for a file that is not there."""
    if bool(folder) == bool(files):
        raise InvalidField("source", "needs exactly one of folder and files")
    begin = target_pb2.BeginUpdate(running=target_pb2.RunningRequests.Value(f"RUNNING_REQUESTS_{running.name}"))
    if folder:
        begin.folder = folder
    else:
        begin.files.sizes.extend(file.stat().st_size if isinstance(file, Path) else len(file) for file in files)
    return _messages(begin, files)


async def _messages(begin: target_pb2.BeginUpdate, files: _Files) -> _Requests:
    yield target_pb2.UpdateWeightsRequest(begin=begin)
    for file in files:
        if isinstance(file, Path):
            with file.open("rb") as opened:
                while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
                    yield target_pb2.UpdateWeightsRequest(data=piece)
        else:
            for start in range(0, len(file), _PIECE_BYTES):
                yield target_pb2.UpdateWeightsRequest(data=file[start : start + _PIECE_BYTES])
