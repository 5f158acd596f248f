"""UpdateWeights over a real server: who may, from where, how much, and that what is dropped touches nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted_engine import ScriptedEngine
from scripted_service import Target, target_over
from waits import HUNG_SECONDS, until

from outrider.errors import (
    DeadlineExceeded,
    InvalidField,
    NotSupported,
    OutriderError,
    PermissionDenied,
    QuotaExceeded,
)
from outrider.serving import Authenticator, Caller
from outrider.v1 import target_pb2 as pb
from outrider.weight_updates import RunningRequests
from outrider.wire.trees import error_of_rpc
from target_service.api import weights
from target_service.config import TargetConfig
from target_service.core.weights import UpdateDone, WeightUpdate

OPERATOR, TENANT = "operator-0123456789", "tenant-0123456789"
TOKENS = {OPERATOR: Caller("ops", operator=True), TENANT: Caller("acme")}


def as_caller(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),)}


class ReadingEngine(ScriptedEngine):
    """Notes what files an update's folder holds while it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[bytes] = []

    def update_weights(self, update: WeightUpdate, done: UpdateDone) -> int:
        self.files = [path.read_bytes() for path in sorted(Path(update.folder).glob("*.safetensors"))]
        return super().update_weights(update, done)


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    for name in ("allowed/step-1", "allowed/refused", "allowed/held", "elsewhere", "staging"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(b"secret")
    return tmp_path


@asynccontextmanager
async def serving(roots: Path, engine: ScriptedEngine | None = None, **changes: Any) -> AsyncIterator[Target]:
    folders = {"weights_folder": str(roots / "allowed"), "weights_staging": str(roots / "staging")}
    tokens = changes.pop("tokens", TOKENS)
    config = TargetConfig(**{"weights_stream_gb": 1000e-9, **folders, **changes})
    async with target_over(engine or ReadingEngine(), config=config, authenticator=Authenticator(tokens)) as target:
        yield target
    assert list((roots / "staging").iterdir()) == []


def begin(folder: str = "", sizes: Iterable[int] = (), running: Any = 0) -> pb.UpdateWeightsRequest:
    update = pb.BeginUpdate(running=running)
    if folder:
        update.folder = folder
    if sizes:
        update.files.sizes.extend(sizes)
    return pb.UpdateWeightsRequest(begin=update)


def data(content: bytes) -> pb.UpdateWeightsRequest:
    return pb.UpdateWeightsRequest(data=content)


async def update(target: Target, *requests: pb.UpdateWeightsRequest, token: str = OPERATOR) -> pb.UpdateWeightsResponse:
    response: pb.UpdateWeightsResponse = await target.stub.UpdateWeights(iter(requests), **as_caller(token))
    return response


async def refused(target: Target, *requests: pb.UpdateWeightsRequest, token: str = OPERATOR) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await update(target, *requests, token=token)
    error = error_of_rpc(caught.value)
    assert isinstance(error, OutriderError), caught.value
    return error


@pytest.mark.parametrize(
    ("number", "running"),
    [
        (pb.RUNNING_REQUESTS_UNSPECIFIED, RunningRequests.DRAIN),
        (pb.RUNNING_REQUESTS_DRAIN, RunningRequests.DRAIN),
        (pb.RUNNING_REQUESTS_ABORT, RunningRequests.ABORT),
        (pb.RUNNING_REQUESTS_CONTINUE, RunningRequests.CONTINUE),
    ],
)
async def test_a_folder(roots: Path, number: Any, running: RunningRequests) -> None:
    async with serving(roots) as target:
        response = await update(target, begin("step-1", running=number))
        assert target.engine.updates == [WeightUpdate(str(roots / "allowed" / "step-1"), running)]
        info = await target.stub.GetTargetInfo(pb.GetTargetInfoRequest(), **as_caller(TENANT))
    assert (response.model_version, response.tensors, response.bytes) == (2, 3, 1200)
    assert (response.prepare_nanoseconds, response.pause_nanoseconds) == (7_000_000, 2_000_000)
    assert (response.aborted_sequences, response.continued_sequences) == (1, 2)
    assert info.model_version == 2


async def test_who_may(roots: Path) -> None:
    async with serving(roots) as target:
        assert isinstance(await refused(target, begin("step-1"), token=TENANT), PermissionDenied)
        assert target.engine.updates == []
    async with serving(roots, tokens=None) as target:
        assert isinstance(await refused(target, begin("step-1")), PermissionDenied)
        assert target.engine.updates == []
    async with serving(roots, tokens=None, weights_without_token=True) as target:
        assert (await update(target, begin("step-1"))).model_version == 2
    async with serving(roots, weights_without_token=True) as target:
        assert isinstance(await refused(target, begin("step-1"), token=TENANT), PermissionDenied)


async def test_a_caller_who_may_not_is_refused_before_it_sends_anything(roots: Path) -> None:
    async with serving(roots) as target:
        call = target.stub.UpdateWeights(**as_caller(TENANT))
        async with asyncio.timeout(HUNG_SECONDS):
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("../elsewhere", PermissionDenied),
        ("/etc", PermissionDenied),
        ("step-1/../../elsewhere", PermissionDenied),
        ("link", PermissionDenied),
        ("linked", PermissionDenied),
        ("../absent", PermissionDenied),
        ("absent", InvalidField),
        ("a\0b", InvalidField),
    ],
)
async def test_folders_that_are_not_allowed(roots: Path, folder: str, kind: type[OutriderError]) -> None:
    (roots / "allowed" / "link").symlink_to(roots / "elsewhere")
    (roots / "allowed" / "linked").mkdir()
    (roots / "allowed" / "linked" / "model.safetensors").symlink_to(roots / "elsewhere" / "model.safetensors")
    async with serving(roots) as target:
        assert type(await refused(target, begin(folder))) is kind
        assert target.engine.updates == []


async def test_no_folder_unless_one_is_set(roots: Path) -> None:
    async with serving(roots, weights_folder="") as target:
        assert isinstance(await refused(target, begin(str(roots / "allowed"))), PermissionDenied)


async def test_the_engines_refusal_is_the_callers(roots: Path) -> None:
    async with serving(roots) as target:
        assert isinstance(await refused(target, begin("refused")), InvalidField)
        assert (await update(target, begin("step-1"))).model_version == 2


async def test_streamed_files_arrive_whole(roots: Path) -> None:
    async with serving(roots) as target:
        pieces = [data(b"abc"), data(b""), data(b"defgh"), data(b"ij")]
        response = await update(target, begin(sizes=[4, 0, 6]), *pieces)
        assert response.model_version == 2
        engine = target.engine
        assert isinstance(engine, ReadingEngine)
        assert engine.files == [b"abcd", b"", b"efghij"]


@pytest.mark.parametrize(
    ("requests", "kind"),
    [
        ([], InvalidField),
        ([data(b"x")], InvalidField),
        ([pb.UpdateWeightsRequest()], InvalidField),
        ([begin()], InvalidField),
        ([begin("step-1", running=9)], InvalidField),
        ([begin(sizes=[5]), data(b"1234")], InvalidField),
        ([begin(sizes=[5]), data(b"123456")], InvalidField),
        ([begin(sizes=[5]), data(b"12345"), data(b"6")], InvalidField),
        ([begin(sizes=[5]), data(b"123"), begin("step-1")], InvalidField),
        ([begin(sizes=[1] * 1025)], InvalidField),
        ([begin(sizes=[600, 401])], QuotaExceeded),
        ([begin(sizes=[2**63, 2**63])], QuotaExceeded),
    ],
    ids=str,
)
async def test_streams_that_make_no_sense_touch_nothing(
    roots: Path, requests: list[pb.UpdateWeightsRequest], kind: type[OutriderError]
) -> None:
    async with serving(roots) as target:
        assert type(await refused(target, *requests)) is kind
        assert target.engine.updates == []


async def test_a_dropped_stream_touches_nothing_and_the_next_is_taken(roots: Path) -> None:
    async with serving(roots) as target:
        call = target.stub.UpdateWeights(**as_caller(OPERATOR))
        await call.write(begin(sizes=[10]))
        await call.write(data(b"12345"))
        async with asyncio.timeout(HUNG_SECONDS):
            while not list((roots / "staging").rglob("*.safetensors")):
                await asyncio.sleep(0.01)
        assert isinstance(await refused(target, begin("step-1")), QuotaExceeded)
        call.cancel()
        async with asyncio.timeout(HUNG_SECONDS):
            while list((roots / "staging").iterdir()):
                await asyncio.sleep(0.01)
        assert target.engine.updates == []
        assert (await update(target, begin("step-1"))).model_version == 2


async def test_a_silent_stream_is_ended(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SILENCE_SECONDS", 0.1)
    async with serving(roots) as target:
        call = target.stub.UpdateWeights(**as_caller(OPERATOR))
        await call.write(begin(sizes=[10]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(error_of_rpc(caught.value), DeadlineExceeded)


async def test_a_call_that_ends_while_requests_drain_is_given_up(roots: Path) -> None:
    async with serving(roots) as target:
        call = target.stub.UpdateWeights(iter([begin("held")]), **as_caller(OPERATOR))
        await until(lambda: target.engine.updates)
        call.cancel()
        async with asyncio.timeout(HUNG_SECONDS):
            while target.engine.cancelled_updates != [1]:
                await asyncio.sleep(0.01)
        assert (await update(target, begin("step-1"))).model_version == 2


async def test_staging_that_cannot_be_written(roots: Path) -> None:
    async with serving(roots, weights_staging=str(roots / "staging")) as target:
        absent = TargetConfig(weights_stream_gb=10e-9, weights_staging=str(roots / "absent"))
        with pytest.raises(NotSupported):
            async with weights.WeightUpdates(target.engine, absent)._received(None, (5,)):  # type: ignore[arg-type]
                pass


async def test_every_chunk_and_verdict_says_its_version(roots: Path) -> None:
    engine = ReadingEngine()
    async with serving(roots, engine) as target:
        request = pb.GenerateRequest(tokens={"token_ids": [5]}, sampling={"max_tokens": 3})
        versions = {
            response.chunk.model_version
            async for response in target.stub.Generate(request, **as_caller(TENANT))
            if response.HasField("chunk")
        }
    assert versions == {1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{OPERATOR} ops operator", None),
        (f"{OPERATOR} ops admin", "expected `TOKEN TENANT` or `TOKEN TENANT operator`"),
        (f"{OPERATOR} ops operator operator", "expected"),
    ],
)
def test_the_tokens_file_names_operators(tmp_path: Path, line: str, said: str | None) -> None:
    from outrider.settings import SettingsError

    path = tmp_path / "tokens"
    path.write_text(f"{TENANT} acme\ntenant acme weight=2\n{line}\n")
    if said is not None:
        with pytest.raises(SettingsError, match=said):
            Authenticator.from_file(str(path))
        return
    known = Authenticator.from_file(str(path))
    assert known.caller([("authorization", f"Bearer {OPERATOR}")]) == Caller("ops", operator=True)
    assert known.caller([("authorization", f"Bearer {TENANT}")]) == Caller("acme", operator=False)
    with pytest.raises(PermissionDenied):
        known.caller([("authorization", f"Bearer {OPERATOR}"), ("outrider-tenant", "acme")])
    assert not Authenticator().caller([("outrider-tenant", "ops")]).operator
