"""How every SDK connects, waits and gives up: TLS, deadlines, retries, and errors that a person can read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sdk.certificates import Certificates
from sdk.toolchains import EXAMPLES
from tcp_server import answering
from waits import HUNG_SECONDS

from outrider.errors import OutriderError, QuotaExceeded, UnknownModel, all_errors
from outrider.ports import free_port
from outrider.serving import GrpcServer, Service, ServingOptions, TlsFiles
from outrider.v1 import target_pb2 as pb
from outrider.v1 import target_pb2_grpc

pytestmark = [pytest.mark.sdk, pytest.mark.asyncio(loop_scope="session")]

UNAVAILABLE, DEADLINE_EXCEEDED = 14, 4
CALLS = pytest.mark.parametrize("case", ["call", "stream"])
ANSWERS = {"call": {"model": "scripted"}, "stream": {"text": "one two"}}
ARGUMENTS = {"chat": ("hi",), "sampling": ("7", "hi")}


@dataclass
class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Refuses its first calls, and notes when each came and how long it would wait."""

    refusal: OutriderError = field(default_factory=lambda: QuotaExceeded("the queue is full"))
    refusals: int = 0
    silent: bool = False
    came: list[float] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)

    async def _receive(self, context: Any) -> None:
        self.came.append(time.monotonic())
        self.deadlines.append(context.time_remaining())
        if self.refusals >= len(self.came):
            raise self.refusal
        if self.silent:
            await asyncio.sleep(HUNG_SECONDS)

    async def GetTargetInfo(self, _request: Any, context: Any) -> pb.GetTargetInfoResponse:  # type: ignore[override]
        await self._receive(context)
        return pb.GetTargetInfoResponse(model="scripted")

    async def Generate(self, _request: Any, context: Any) -> None:  # type: ignore[override]
        await self._receive(context)
        await context.write(pb.GenerateResponse(started=pb.GenerateStarted(sequence_id=1)))
        for text in ("one", " two"):
            await context.write(pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[3], text=text)))
        await context.write(pb.GenerateResponse(finished=pb.GenerateFinished()))


@asynccontextmanager
async def serving(target: ScriptedTarget, tls: TlsFiles | None = None) -> AsyncIterator[str]:
    """Its address."""
    service = Service(
        "outrider.v1.TargetService", lambda to: target_pb2_grpc.add_TargetServiceServicer_to_server(target, to)
    )
    server = GrpcServer(ServingOptions(tls=tls or TlsFiles()), [service])
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@CALLS
class TestRetries:
    async def test_waits_as_long_as_asked_and_tries_again(self, sdk: Any, case: str) -> None:
        target = ScriptedTarget(refusals=1)
        async with serving(target) as address:
            assert await sdk.run(case, target=address) == ANSWERS[case]
        first, second = target.came
        assert second - first >= QuotaExceeded.retry_after

    async def test_attempts_are_bounded(self, sdk: Any, case: str) -> None:
        target = ScriptedTarget(refusals=9)
        async with serving(target) as address:
            problem = await sdk.run(case, target=address, attempts=2)
        assert (problem["reason"], problem["line"]) == ("QUOTA_EXCEEDED", "QUOTA_EXCEEDED: the queue is full")
        assert len(target.came) == 2

    async def test_no_wait_past_the_deadline(self, sdk: Any, case: str) -> None:
        target = ScriptedTarget(QuotaExceeded("the queue is full").after(2 * HUNG_SECONDS), refusals=9)
        async with serving(target) as address:
            problem = await sdk.run(case, target=address, timeoutMs=int(1000 * HUNG_SECONDS))
        assert problem["reason"] == "QUOTA_EXCEEDED"
        assert len(target.came) == 1

    async def test_what_will_not_get_better_is_not_tried_again(self, sdk: Any, case: str) -> None:
        target = ScriptedTarget(UnknownModel("nothing is served"), refusals=9)
        async with serving(target) as address:
            problem = await sdk.run(case, target=address)
        assert problem["reason"] == "UNKNOWN_MODEL"
        assert problem["is"]
        assert len(target.came) == 1


class TestDeadlines:
    @pytest.mark.parametrize(("case", "seconds"), [("call", 10), ("stream", 600)])
    async def test_default(self, sdk: Any, case: str, seconds: float) -> None:
        target = ScriptedTarget()
        async with serving(target) as address:
            # Its way takes a part, of ten seconds on a busy machine sometimes most.
            while len(target.deadlines) < 8 and max(target.deadlines, default=0) <= 0.3 * seconds:
                await sdk.run(case, target=address, timeoutMs=0)
        assert 0.3 * seconds < max(target.deadlines) <= seconds

    @CALLS
    async def test_passes(self, sdk: Any, case: str) -> None:
        async with serving(ScriptedTarget(silent=True)) as address:
            problem = await sdk.run(case, target=address, timeoutMs=200)
        assert (problem["code"], problem["reason"]) == (DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


class TestUnreachable:
    @CALLS
    async def test_refused_connection(self, sdk: Any, case: str) -> None:
        address = f"127.0.0.1:{free_port()}"
        # At its deadline it would be another code.
        problem = await sdk.run(case, target=address, timeoutMs=int(1000 * HUNG_SECONDS))
        assert (problem["code"], problem["reason"]) == (UNAVAILABLE, "UNREACHABLE")
        assert problem["line"].startswith(f"cannot reach {address}: ")
        assert "refused" in problem["line"].lower()
        assert "\n" not in problem["line"]

    @pytest.mark.parametrize("address", ["http://127.0.0.1:50051", "localhost", ":50051", "", "unix:"])
    async def test_what_is_no_address(self, sdk: Any, address: str) -> None:
        problem = await sdk.run("call", target=address)
        assert problem["refused"] == f'address "{address}": expected HOST:PORT or unix:PATH'


class TestTls:
    def serve(self, certificates: Certificates, *, mutual: bool = False) -> Any:
        client_ca = str(certificates.authority) if mutual else ""
        files = TlsFiles(str(certificates.server), str(certificates.server_key), client_ca)
        return serving(ScriptedTarget(), files)

    def client(self, certificates: Certificates, *, mutual: bool = False) -> dict[str, Any]:
        own = {"certificate": str(certificates.client), "key": str(certificates.client_key)} if mutual else {}
        return {"tls": True, "ca": str(certificates.authority), "serverName": "outrider.test"} | own

    @CALLS
    async def test_own_authority(self, sdk: Any, certificates: Certificates, case: str) -> None:
        async with self.serve(certificates) as address:
            assert await sdk.run(case, target=address, **self.client(certificates)) == ANSWERS[case]

    @CALLS
    async def test_mutual(self, sdk: Any, certificates: Certificates, case: str) -> None:
        async with self.serve(certificates, mutual=True) as address:
            given = self.client(certificates, mutual=True)
            assert await sdk.run(case, target=address, **given) == ANSWERS[case]

    async def test_mutual_without_a_certificate(self, sdk: Any, certificates: Certificates) -> None:
        async with self.serve(certificates, mutual=True) as address:
            problem = await sdk.run("call", target=address, **self.client(certificates))
        assert problem["reason"] == "UNREACHABLE"
        assert "\n" not in problem["line"]

    @pytest.mark.parametrize("change", [{"ca": ""}, {"serverName": ""}], ids=["unknown_authority", "other_name"])
    async def test_certificate_is_checked(self, sdk: Any, certificates: Certificates, change: dict[str, Any]) -> None:
        async with self.serve(certificates) as address:
            problem = await sdk.run("call", target=address, **self.client(certificates) | change)
        assert problem["reason"] == "UNREACHABLE"
        assert "certificate" in problem["line"]

    async def test_plain_text_to_tls(self, sdk: Any, certificates: Certificates) -> None:
        async with self.serve(certificates) as address:
            problem = await sdk.run("call", target=address)
        assert problem["reason"] == "UNREACHABLE"
        assert "a server does" in problem["line"] and "that expects TLS" in problem["line"]

    async def test_tls_to_plain_text(self, sdk: Any, certificates: Certificates) -> None:
        async with serving(ScriptedTarget()) as address:
            problem = await sdk.run("call", target=address, **self.client(certificates))
        assert problem["line"] == f"cannot reach {address}: it does not speak TLS"

    @pytest.mark.parametrize(
        ("change", "refusal"),
        [
            ({"key": ""}, "its key"),
            ({"ca": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
            ({"ca": __file__}, "holds no PEM certificate"),
            ({"key": "server_key"}, "key"),
            ({"certificate": __file__}, "certificate"),
        ],
        ids=["no_key", "no_file", "no_authority", "another_key", "no_certificate"],
    )
    async def test_files_are_checked_first(
        self, sdk: Any, certificates: Certificates, change: dict[str, str], refusal: str
    ) -> None:
        given = {name: str(getattr(certificates, value, value)) for name, value in change.items()}
        problem = await sdk.run("call", **self.client(certificates, mutual=True) | given)
        assert problem["refused"].lower().startswith("tls") and refusal in problem["refused"]

    async def test_a_port_of_http(self, sdk: Any) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()

        async with answering(answer) as address:
            problem = await sdk.run("call", target=address)
        assert problem["line"] == f"cannot reach {address}: it speaks HTTP/1 and no gRPC, as a gateway does"


async def test_every_reason_has_a_name(sdk: Any) -> None:
    assert sorted(await sdk.run("reasons")) == sorted(error.reason for error in all_errors())


class TestExamples:
    @pytest.mark.parametrize(
        ("name", "given"),
        [
            ("chat", ()),
            ("chat", ("127.0.0.1:1",)),
            ("chat", ("127.0.0.1:1", "a question", "of", "several", "words")),
            ("sampling", ()),
            ("sampling", ("127.0.0.1:1", "7")),
            ("sampling", ("127.0.0.1:1", "seven", "hi")),
            ("sampling", ("127.0.0.1:1", "-1", "hi")),
            ("sampling", ("127.0.0.1:1", str(2**64), "hi")),
            ("sampling", ("127.0.0.1:1", "7", "hi", "there")),
        ],
    )
    async def test_usage(self, sdk: Any, name: str, given: tuple[str, ...]) -> None:
        status, out, err = await sdk.run_example(name, *given)
        assert (status, out) == (2, "")
        assert err.startswith("usage: ")
        assert err.count("\n") == 1

    @pytest.mark.parametrize("name", EXAMPLES)
    async def test_refused_connection_is_one_line(self, sdk: Any, name: str) -> None:
        address = f"127.0.0.1:{free_port()}"
        status, out, err = await sdk.run_example(name, address, *ARGUMENTS[name])
        assert (status, out) == (1, "")
        assert err.startswith(f"cannot reach {address}: ")
        assert err.count("\n") == 1

    async def test_seeded_sampling(self, sdk: Any) -> None:
        status, out, err = await sdk.run_example("sampling", sdk.services.target, "7", "hi")
        assert (status, err) == (0, "")
        assert out.endswith("drawn twice, the same: true\n")
        # Another seed draws something else, so the line says something.
        assert out != (await sdk.run_example("sampling", sdk.services.target, "8", "hi"))[1]
