"""What a service meets on a machine: taken sockets, stale certificates, new tokens, forged lines, slow scrapers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from waits import HUNG_SECONDS

from outrider.errors import EngineDead, Unauthenticated
from outrider.runtime import LOG_FORMAT, OneLineFormatter
from outrider.serving import Authenticator, GrpcServer, Service, ServingOptions, TlsFiles, load_and_serve
from outrider.settings import SettingsError
from outrider.telemetry.registry import MetricsServer
from outrider.wire.trees import error_of_rpc
from outrider_client.cli.app import main as outrider
from outrider_client.terminal.options import ClientOptions
from target_service.config import TargetConfig
from target_service.preflight import check_settings, link_options

OLD, NEW = "old-token-of-length", "new-token-of-length"


class TestUnixSocket:
    async def test_one_that_is_served_is_not_taken_over(self, echo: Any, tmp_path: Path) -> None:
        address = f"unix:{tmp_path}/s"
        first = GrpcServer(ServingOptions(listen=address), [Service(echo.name, echo.Echo().add)])
        await first.start()
        second = GrpcServer(ServingOptions(listen=address), [])
        with pytest.raises(SettingsError, match="another process does"):
            await second.start()
        await second.stop(0)
        async with grpc.aio.insecure_channel(address) as channel:
            assert await echo.call(channel, "Unary") == b"default"
        await first.stop(0)

    async def test_one_that_was_left_behind_is_replaced(self, echo: Any, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{tmp_path}/s")
            left.listen()
        server = GrpcServer(ServingOptions(listen=f"unix:{tmp_path}/s"), [Service(echo.name, echo.Echo().add)])
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await echo.call(channel, "Unary") == b"default"
        await server.stop(0)

    async def test_what_is_no_socket_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("a letter")
        server = GrpcServer(ServingOptions(listen=f"unix:{tmp_path}/s"), [])
        with pytest.raises(SettingsError, match="no socket"):
            await server.start()
        await server.stop(0)
        assert (tmp_path / "s").read_text() == "a letter"


class TestCertificates:
    def made(self, folder: Path, days: int) -> TlsFiles:
        key, chain, dated = folder / "key.pem", folder / "chain.pem", folder / "dated.pem"
        made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self.openssl(*made, "-keyout", str(key), "-out", str(chain), "-subj", "/CN=localhost")
        self.openssl("x509", "-in", str(chain), "-signkey", str(key), "-days", str(days), "-out", str(dated))
        return TlsFiles(str(dated), str(key))

    def openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)

    def test_one_that_has_expired_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="expired"):
            self.made(tmp_path, -1).check()

    def test_one_that_holds_is_taken(self, tmp_path: Path, certificates: Any) -> None:
        self.made(tmp_path, 2).check()
        TlsFiles(str(certificates.server), str(certificates.server_key), str(certificates.authority)).check()

    def test_a_key_of_another_is_refused(self, certificates: Any) -> None:
        with pytest.raises(SettingsError, match="no certificate and its key"):
            TlsFiles(str(certificates.server), str(certificates.client_key)).check()

    def test_a_file_of_something_else_is_refused(self, tmp_path: Path, certificates: Any) -> None:
        junk = tmp_path / "junk.pem"
        junk.write_text("junk")
        with pytest.raises(SettingsError, match="no certificate and its key"):
            TlsFiles(str(junk), str(certificates.server_key)).check()
        with pytest.raises(SettingsError, match="holds no PEM certificate"):
            TlsFiles(str(certificates.server), str(certificates.server_key), str(junk)).check()

    def test_files_for_a_draft_are_looked_at_too(self, tmp_path: Path, certificates: Any) -> None:
        junk = tmp_path / "junk.pem"
        junk.write_text("junk")
        with pytest.raises(SettingsError, match="holds no PEM certificate"):
            link_options(TargetConfig(draft_tls_ca=str(junk)))
        own = {"draft_tls_certificate": str(certificates.client), "draft_tls_key": str(certificates.client_key)}
        assert link_options(TargetConfig(draft_tls_ca=str(certificates.authority), **own)).tls is not None
        with pytest.raises(SettingsError, match="no certificate and its key"):
            link_options(TargetConfig(draft_tls_ca=str(certificates.authority), **own | {"draft_tls_key": str(junk)}))


class IdleWorker:
    """Always well."""

    def alive(self) -> bool:
        return True

    def failure(self) -> BaseException | None:
        return None

    async def drain(self) -> None: ...


async def test_tokens_are_read_anew_on_sighup(echo: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A revoked one worked until the restart, and the signal ended the service."""
    path = tmp_path / "tokens"
    path.write_text(f"{OLD} acme\n")

    def read() -> Authenticator:
        return Authenticator.from_file(str(path))

    options = ServingOptions(authenticator=read(), read_tokens=read)
    server = GrpcServer(options, [Service(echo.name, echo.Echo().add)])
    stopping, loaded = asyncio.Event(), asyncio.Event()

    async def load() -> IdleWorker:
        loaded.set()
        return IdleWorker()

    serving = asyncio.create_task(load_and_serve(server, load, 1.0, stopping))
    await asyncio.wait({serving, asyncio.create_task(loaded.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert loaded.is_set(), await serving

    async def answers(token: str) -> bool:
        try:
            await echo.call(channel, "Unary", metadata=(("authorization", f"Bearer {token}"),))
        except grpc.aio.AioRpcError as error:
            assert isinstance(error_of_rpc(error), Unauthenticated)
            return False
        return True

    async with grpc.aio.insecure_channel(server.address) as channel:
        assert await answers(OLD) and not await answers(NEW)
        path.write_text(f"{NEW} acme\n")
        assert await answers(OLD)
        signal.raise_signal(signal.SIGHUP)
        async with asyncio.timeout(HUNG_SECONDS):
            while not await answers(NEW):
                await asyncio.sleep(0.01)
        assert not await answers(OLD)
        path.write_text("no token\n")
        signal.raise_signal(signal.SIGHUP)
        async with asyncio.timeout(HUNG_SECONDS):
            while "the tokens are unchanged" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await answers(NEW)
    stopping.set()
    assert await asyncio.wait_for(serving, HUNG_SECONDS) == 0


def test_a_message_is_one_line_of_the_log() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
    forged = "gone\n2026-01-01 00:00:00 CRITICAL outrider: all is lost\r\x1b[2J\u2028\x85\u00e9"
    handler.emit(logging.LogRecord("outrider", logging.WARNING, "", 0, "no draft: %s", (forged,), None))
    assert len(written.getvalue().splitlines()) == 1
    assert "gone\\n2026" in written.getvalue() and "\x1b" not in written.getvalue() and "\u00e9" in written.getvalue()


def test_a_traceback_keeps_its_lines() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
    try:
        raise KeyError("a")
    except KeyError:
        handler.emit(logging.LogRecord("outrider", logging.ERROR, "", 0, "a bug", (), sys.exc_info()))
    assert len(written.getvalue().splitlines()) > 2


def test_clients_try_again_when_an_engine_has_died() -> None:
    assert EngineDead.code is grpc.StatusCode.UNAVAILABLE and EngineDead.retry_after


class TestMetricsPort:
    def test_half_a_request_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each kept a thread for ever."""
        monkeypatch.setattr("outrider.telemetry.registry._REQUEST_SECONDS", 0.5)
        server = MetricsServer("127.0.0.1:0")
        host, _, port = server.address.rpartition(":")
        halves = [socket.create_connection((host, int(port)), timeout=HUNG_SECONDS) for _ in range(40)]
        try:
            for half in halves:
                half.sendall(b"GET /metr")
            for half in halves:
                # The other end hangs up; whether orderly does not matter.
                with contextlib.suppress(ConnectionResetError):
                    assert half.recv(1) == b""
            with socket.create_connection((host, int(port)), timeout=HUNG_SECONDS) as whole:
                whole.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert whole.recv(15).startswith(b"HTTP/1.")
        finally:
            for half in halves:
                half.close()
            server.close()

    def test_a_request_that_comes_byte_by_byte_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outrider.telemetry.registry._REQUEST_SECONDS", 0.5)
        server = MetricsServer("127.0.0.1:0")
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=HUNG_SECONDS) as slow:
            hung = time.monotonic() + HUNG_SECONDS
            with pytest.raises(OSError):
                while time.monotonic() < hung:
                    slow.sendall(b"G")
                    time.sleep(0.05)
        server.close()


class TestSettings:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"draft": "foo"}, "is not HOST:PORT"),
            ({"draft": "http://host:50052"}, "is not HOST:PORT"),
            ({"draft": "host:99999"}, "is not HOST:PORT"),
            ({"draft": "unix:"}, "is not HOST:PORT"),
            ({"draft": "a:1,b"}, "'b' is not HOST:PORT"),
            ({"draft": "a:1,inprocess:trie"}, "is not HOST:PORT"),
            ({"draft": "inprocess:"}, "names no drafter"),
            ({"max_context": 999_999_999}, "at most"),
        ],
        ids=["word", "page", "port", "path", "one_of_two", "mixed", "no_drafter", "context"],
    )
    def test_what_cannot_be_meant_is_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(SettingsError, match=message):
            check_settings(TargetConfig(**change))

    @pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "a\udcff", "x" * 257])
    def test_a_name_that_no_message_can_carry_is_refused(self, name: str) -> None:
        with pytest.raises(SettingsError, match="is no name of 1 to 256 printable characters"):
            check_settings(TargetConfig(served_model_name=f"alpha,{name}", listen="127.0.0.1:0"))

    def test_names_are_served_once_each(self) -> None:
        config = TargetConfig(served_model_name=" alpha, Zoë ,a b,alpha,", listen="127.0.0.1:0")
        check_settings(config)
        assert config.served_names == ("alpha", "Zoë", "a b")

    @pytest.mark.parametrize(
        "draft",
        ["draft:50052", "127.0.0.1:1", "[::1]:50052", "unix:/run/d", "inprocess:trie", "a:1, b:2", "dns:///a:1"],
    )
    def test_addresses_are_taken(self, draft: str) -> None:
        check_settings(TargetConfig(draft=draft, listen="127.0.0.1:0"))


class TestClientToken:
    def test_no_flag_takes_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Every user of the machine may read the flags of its processes."""
        with pytest.raises(SystemExit):
            outrider(["health", "--token", OLD])
        assert "no such flag or argument: --token" in capsys.readouterr().err

    def test_a_file_holds_it(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text(OLD + "\n")
        assert ClientOptions(token_file=str(path)).secret() == OLD
        assert ClientOptions(token=NEW).secret() == NEW
        with pytest.raises(SettingsError, match="No such file"):
            ClientOptions(token_file=str(tmp_path / "absent")).secret()
