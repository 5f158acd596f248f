"""Updates of the model's weights by callers: who may send them, from where, and how much.

The engine reads the folder or the streamed files. One update is taken at a time, so that the disk never holds the files
of two.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

from outrider import errors
from outrider.errors import OutriderError
from outrider.serving import Caller
from outrider.v1 import target_pb2 as pb
from outrider.weight_updates import RunningRequests, WeightsUpdated
from target_service.config import TargetConfig
from target_service.core.events import ServingEngine
from target_service.core.weights import WeightUpdate

_RUNNING = {pb.RunningRequests.Value(f"RUNNING_REQUESTS_{one.name}"): one for one in RunningRequests}
_RUNNING[pb.RUNNING_REQUESTS_UNSPECIFIED] = RunningRequests.DRAIN
# As documented in target.proto.
_MOST_FILES = 1024
# Seconds after which a silent stream is ended, since its files take disk space. Chosen, not measured.
_SILENCE_SECONDS = 60.0


class WeightUpdates:
    """Takes updates for an engine. Belongs to the event loop."""

    def __init__(self, engine: ServingEngine, config: TargetConfig) -> None:
        self._engine = engine
        self._config = config
        self._lock = asyncio.Lock()

    async def update(self, caller: Caller, requests: AsyncIterator[pb.UpdateWeightsRequest]) -> WeightsUpdated:
        """Take one update to its end. Cancelled before the exchange, it changes nothing.

        Raises `InvalidField`, `PermissionDenied` for callers and folders that are not allowed, `QuotaExceeded`,
        `DeadlineExceeded` for a stream that falls silent, and what `Engine.update_weights` raises.
        """
        if self._config.auth_tokens:
            if not caller.operator:
                raise errors.PermissionDenied("the token is no operator's")
        elif not self._config.weights_without_token:
            raise errors.PermissionDenied("only operators may update weights, and they need a token: see --auth-tokens")
        first = await _next(requests)
        if first is None or first.WhichOneof("part") != "begin":
            raise errors.InvalidField("begin", "must come first")
        begin = first.begin
        running = _RUNNING.get(begin.running)
        if running is None:
            raise errors.InvalidField("begin.running", "is not known")
        if self._lock.locked():
            raise errors.QuotaExceeded("another update of the weights is under way")
        async with self._lock:
            source = begin.WhichOneof("source")
            if source == "folder":
                return await self._exchange(WeightUpdate(str(self._allowed(begin.folder)), running))
            if source != "files":
                raise errors.InvalidField("begin.source", "one of folder and files must be set")
            async with self._received(requests, tuple(begin.files.sizes)) as folder:
                return await self._exchange(WeightUpdate(str(folder), running))

    async def _exchange(self, update: WeightUpdate) -> WeightsUpdated:
        ended: Future[WeightsUpdated | OutriderError] = Future()
        # The engine may set a result also after the call was cancelled.
        ended.set_running_or_notify_cancel()
        update_id = self._engine.update_weights(update, ended.set_result)
        try:
            result = await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            self._engine.cancel_update(update_id)
            raise
        if isinstance(result, OutriderError):
            raise result
        return result

    def _allowed(self, requested: str) -> Path:
        """The requested folder, if it and its files lie within the allowed one."""
        if not self._config.weights_folder:
            raise errors.PermissionDenied("weights may be read from no folder: see --weights-folder")
        root = Path(self._config.weights_folder).resolve()
        try:
            folder = (root / requested).resolve()
        except (OSError, ValueError):
            raise errors.InvalidField("begin.folder", "is no path") from None
        # Before any access to it, so that callers cannot find out what exists elsewhere.
        if not folder.is_relative_to(root):
            raise errors.PermissionDenied("the folder is outside of --weights-folder")
        if not folder.is_dir():
            raise errors.InvalidField("begin.folder", "is no folder")
        if any(not path.resolve().is_relative_to(root) for path in folder.glob("*.safetensors")):
            raise errors.PermissionDenied("a file of the folder is a link to outside of --weights-folder")
        return folder

    @asynccontextmanager
    async def _received(
        self, requests: AsyncIterator[pb.UpdateWeightsRequest], sizes: Sequence[int]
    ) -> AsyncIterator[Path]:
        """A temporary folder with all files of a stream."""
        if not 1 <= len(sizes) <= _MOST_FILES:
            raise errors.InvalidField("begin.files.sizes", f"needs 1 to {_MOST_FILES} entries")
        total, limit = sum(sizes), round(self._config.weights_stream_gb * 1e9)
        if total > limit:
            raise errors.QuotaExceeded("the files are more than a stream may carry", bytes=total, limit=limit).after(
                None
            )
        try:
            folder = Path(tempfile.mkdtemp(prefix="outrider-weights-", dir=self._config.weights_staging or None))
        except OSError as error:
            raise errors.NotSupported(f"streamed weights have nowhere to be: {error.strerror}") from None
        try:
            if shutil.disk_usage(folder).free < total:
                raise errors.QuotaExceeded("the disk has no room for the files", bytes=total).after(None)
            await _spool(requests, folder, sizes)
            yield folder
        except OSError as error:
            raise errors.NotSupported(f"streamed weights cannot be kept: {error.strerror}") from None
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def _spool(requests: AsyncIterator[pb.UpdateWeightsRequest], folder: Path, sizes: Sequence[int]) -> None:
    """Write the stream to one file for each of `sizes`. Raises `InvalidField` unless it has exactly their bytes."""
    # Bytes that have come and belong to no file yet.
    rest = b""
    for number, size in enumerate(sizes):
        with (folder / f"{number:04}.safetensors").open("wb") as file:
            left = size
            while left:
                rest = rest or await _next_data(requests)
                if not rest:
                    raise errors.InvalidField("data", "ends before the files do")
                piece, rest = rest[:left], rest[left:]
                # In a thread: disks are slow, and other calls go on.
                await asyncio.to_thread(file.write, piece)
                left -= len(piece)
    if rest or await _next_data(requests):
        raise errors.InvalidField("data", "is longer than the files' sizes")


async def _next_data(requests: AsyncIterator[pb.UpdateWeightsRequest]) -> bytes:
    """The next bytes of the stream; empty at its end."""
    while (request := await _next(requests)) is not None:
        if request.WhichOneof("part") != "data":
            raise errors.InvalidField("data", "must follow begin, and nothing else")
        if request.data:
            return request.data
    return b""


async def _next(requests: AsyncIterator[pb.UpdateWeightsRequest]) -> pb.UpdateWeightsRequest | None:
    try:
        async with asyncio.timeout(_SILENCE_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        raise errors.DeadlineExceeded(f"the stream was silent for {_SILENCE_SECONDS:g} s") from None
