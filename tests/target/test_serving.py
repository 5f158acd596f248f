"""The shared server plumbing, over real sockets: errors, tenants, limits."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waits import HUNG_SECONDS

from outrider.errors import OutriderError, StepSkipped, all_errors
from outrider.serving import Authenticator, Caller, GrpcServer, Service, ServingOptions, check_free
from outrider.serving.calls import MAX_METADATA_BYTES, CallLimits
from outrider.settings import SettingsError
from outrider.wire.trees import error_of_rpc

TOKEN = "0123456789abcdef-secret"
METHODS = ["Unary", "Generate", "Collect", "Converse"]


class TestErrors:
    @pytest.mark.parametrize("method", METHODS)
    async def test_typed_error_arrives_with_details(self, echo: Any, method: str) -> None:
        handler = echo.Echo()
        handler.raises = StepSkipped("step lies ahead", step=7)
        async with echo.serving(handler) as server, grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo.call(channel, method)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = error_of_rpc(caught.value)
        assert isinstance(error, StepSkipped)
        assert error.metadata == {"step": "7"}

    @pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
    async def test_every_error_has_its_code(self, echo: Any, kind: type[OutriderError]) -> None:
        handler = echo.Echo()
        handler.raises = kind("field", "problem") if kind.__name__ == "InvalidField" else kind("problem")  # type: ignore[call-arg]
        async with echo.serving(handler) as server, grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo.call(channel, "Unary")
        assert caught.value.code() is kind.code
        assert type(error_of_rpc(caught.value)) is kind

    @pytest.mark.parametrize("method", METHODS)
    async def test_bug_does_not_tell_its_text(self, echo: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
        handler = echo.Echo()
        handler.raises = KeyError("what the tenant said")
        async with echo.serving(handler) as server, grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo.call(channel, method)
            handler.raises = None
            assert await echo.call(channel, method) == b"default"
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "tenant said" not in str(caught.value.details())
        assert f"/{echo.name}/{method}" in caplog.text

    async def test_generator_is_closed_when_the_caller_cancels(self, echo: Any) -> None:
        handler = echo.Echo()
        async with echo.serving(handler) as server, grpc.aio.insecure_channel(server.address) as channel:
            stream = channel.unary_stream(f"/{echo.name}/Generate")(b"forever")
            await stream.read()
            stream.cancel()
            await asyncio.wait_for(handler.released.wait(), HUNG_SECONDS)


class TestTenants:
    @pytest.mark.parametrize("method", METHODS)
    async def test_named_tenant_reaches_the_handler(self, echo: Any, method: str) -> None:
        async with echo.serving(echo.Echo()) as server, grpc.aio.insecure_channel(server.address) as channel:
            assert await echo.call(channel, method, metadata=(("outrider-tenant", "acme.eu-1"),)) == b"acme.eu-1"
            assert await echo.call(channel, method) == b"default"

    @pytest.mark.parametrize("name", ["", "a b", "../etc", "x" * 65, "caf\u00e9".encode().decode("latin-1")])
    def test_bad_names(self, name: str) -> None:
        with pytest.raises(OutriderError, match="outrider-tenant"):
            Authenticator().caller([("outrider-tenant", name)])

    def test_two_names(self) -> None:
        with pytest.raises(OutriderError, match="more than once"):
            Authenticator().caller([("outrider-tenant", "a"), ("outrider-tenant", "b")])

    @pytest.mark.parametrize(
        ("metadata", "code"),
        [
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer wrong"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", TOKEN),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Basic {TOKEN}"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {TOKEN}x"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {TOKEN}"),) * 2, grpc.StatusCode.UNAUTHENTICATED),
            (
                (("authorization", f"Bearer {TOKEN}"), ("outrider-tenant", "other")),
                grpc.StatusCode.PERMISSION_DENIED,
            ),
        ],
        ids=["none", "wrong", "no-scheme", "other-scheme", "longer", "twice", "other-tenant"],
    )
    async def test_refused(self, echo: Any, metadata: Any, code: grpc.StatusCode) -> None:
        options = {"authenticator": Authenticator({TOKEN: Caller("acme")})}
        async with echo.serving(echo.Echo(), **options) as server, grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo.call(channel, "Unary", metadata=metadata)
            assert caught.value.code() is code
            assert TOKEN not in str(caught.value.details())

    async def test_token_decides_the_tenant(self, echo: Any) -> None:
        options = {"authenticator": Authenticator({TOKEN: Caller("acme"), "another-token-of-length": Caller("other")})}
        async with echo.serving(echo.Echo(), **options) as server, grpc.aio.insecure_channel(server.address) as channel:
            assert await echo.call(channel, "Unary", metadata=(("authorization", f"Bearer {TOKEN}"),)) == b"acme"

    async def test_every_method_of_every_service_wants_a_token(self, echo: Any) -> None:
        """Reflection and channelz are doors too. Health is for probes, which have none."""
        options: dict[str, Any] = {
            "authenticator": Authenticator({TOKEN: Caller("acme")}),
            "reflection": True,
            "admin_listen": "127.0.0.1:0",
        }
        async with echo.serving(echo.Echo(), **options) as server:
            served = {
                server.address: [
                    *(f"/{echo.name}/{method}" for method in echo.methods),
                    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                ],
                server.admin_address: [
                    f"/{channelz_pb2.DESCRIPTOR.services_by_name['Channelz'].full_name}/{method.name}"
                    for method in channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].methods
                ],
            }
            for address, paths in served.items():
                async with grpc.aio.insecure_channel(address) as channel:
                    for path in paths:
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await channel.stream_unary(path)(iter([b""]), timeout=HUNG_SECONDS)
                        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, path

    @pytest.mark.parametrize("bearer", [(), (("authorization", "Bearer wrong"),)], ids=["none", "wrong"])
    async def test_health_answers_without_a_token_and_nothing_else_does(self, echo: Any, bearer: Any) -> None:
        options = {"authenticator": Authenticator({TOKEN: Caller("acme")})}
        async with echo.serving(echo.Echo(), **options) as server, grpc.aio.insecure_channel(server.address) as channel:
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
            assert (await stub.Check(request, metadata=bearer)).status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(request, metadata=bearer)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo.call(channel, "Unary", metadata=bearer)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


class TestTokenFile:
    def test_reads(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        path.write_text(f"# who may call\n\n{TOKEN} acme\nabcdefghijklmnopqrst other\n")
        authenticator = Authenticator.from_file(str(path))
        assert authenticator.required
        assert authenticator.caller([("authorization", "bearer abcdefghijklmnopqrst")]).tenant == "other"

    def test_none_given(self) -> None:
        assert not Authenticator.from_file("").required

    @pytest.mark.parametrize(
        "text",
        ["", TOKEN, f"{TOKEN} a b", f"{TOKEN} a/b", "short acme", f"{TOKEN} a\n{TOKEN} b"],
        ids=["empty", "no-tenant", "three-words", "bad-tenant", "short-token", "repeated"],
    )
    def test_refused_without_showing_a_secret(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        path.write_text(text)
        with pytest.raises(SettingsError) as caught:
            Authenticator.from_file(str(path))
        assert TOKEN not in str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="No such file"):
            Authenticator.from_file(str(tmp_path / "absent"))


class TestServer:
    @pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
    async def test_reflection_is_opt_in(self, echo: Any, on: bool) -> None:
        async with (
            echo.serving(echo.Echo(), reflection=on) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            if not on:
                # A stream that is refused while its first message is on its way may end in gRPC's own INTERNAL.
                asked = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked(b"")
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                return
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            answer = await stream.read()
            assert echo.name in {service.name for service in answer.list_services_response.service}
            stream.cancel()

    async def test_channelz_on_the_admin_port_only(self, echo: Any) -> None:
        async with echo.serving(echo.Echo(), admin_listen="127.0.0.1:0") as server:
            async with grpc.aio.insecure_channel(server.admin_address) as channel:
                answer = await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
                assert len(answer.server) >= 2
            async with grpc.aio.insecure_channel(server.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    @pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "example.org:1"])
    async def test_admin_port_must_be_local(self, address: str) -> None:
        with pytest.raises(SettingsError, match="loopback"):
            GrpcServer(ServingOptions(admin_listen=address), [])

    async def test_port_in_use_is_an_error(self, echo: Any) -> None:
        async with echo.serving(echo.Echo()) as server:
            second = GrpcServer(ServingOptions(listen=server.address), [])
            with pytest.raises(SettingsError, match="already in use"):
                await second.start()
            with pytest.raises(SettingsError, match="already in use"):
                check_free(server.address)

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("nowhere", "not HOST:PORT"),
            ("50051", "has no port"),
            ("127.0.0.1:99999", "ports are 1 to 65535"),
            ("http://127.0.0.1:50051", "leave out http://"),
            ("unix:/no/folder/here/s", "no folder /no/folder/here"),
            ("127.0.0.1:http", "not HOST:PORT"),
            ("no.such.host.invalid:1", "cannot listen on no.such.host.invalid:1: "),
            ("192.0.2.1:50051", "Cannot assign"),
        ],
    )
    async def test_an_address_that_cannot_be_is_refused_with_the_reason(self, address: str, message: str) -> None:
        with pytest.raises(SettingsError, match=message):
            check_free(address)

    @pytest.mark.parametrize("address", ["unix-abstract:foo", "dns:///x", "dns:x:99999", "ipv4:127.0.0.1"])
    async def test_other_names_of_grpc_are_refused(self, address: str) -> None:
        reason = re.escape(f"cannot listen: {address!r} is not HOST:PORT or unix:PATH")
        with pytest.raises(SettingsError, match=reason):
            check_free(address)
        server = GrpcServer(ServingOptions(listen=address), [])
        with pytest.raises(SettingsError, match=reason):
            await server.start()
        await server.stop(0)

    @pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", ":0", "unix:/tmp/nobody-listens-here"])
    async def test_an_address_that_is_free_may_be_taken(self, address: str) -> None:
        check_free(address)

    async def test_unix_socket(self, echo: Any, tmp_path: Path) -> None:
        server = GrpcServer(ServingOptions(listen=f"unix:{tmp_path}/s"), [Service(echo.name, echo.Echo().add)])
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await echo.call(channel, "Unary") == b"default"
        await server.stop(0)

    @pytest.mark.parametrize("strikes", [2, 0], ids=["bounded", "boundless"])
    async def test_a_client_that_pings_too_often_is_borne_as_far_as_is_wanted(self, echo: Any, strikes: int) -> None:
        often = [("grpc.keepalive_time_ms", 300), ("grpc.http2.max_pings_without_data", 0)]
        async with (
            echo.serving(echo.Echo(), ping_strikes=strikes) as server,
            grpc.aio.insecure_channel(server.address, options=often) as channel,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            reading = asyncio.ensure_future(watch.read())
            done, _ = await asyncio.wait([reading], timeout=HUNG_SECONDS if strikes else 4.0)
            if strikes:
                assert done and await watch.code() is grpc.StatusCode.UNAVAILABLE
            else:
                assert not done
            watch.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def test_large_message_is_refused_and_the_server_lives(self, echo: Any) -> None:
        options = {"limits": CallLimits(message_bytes=1024)}
        async with echo.serving(echo.Echo(), **options) as server, grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{echo.name}/Unary")(bytes(2048))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await echo.call(channel, "Unary") == b"default"

    async def test_large_metadata_is_refused(self, echo: Any) -> None:
        """Every time, from a little above the limit on; other calls of the connection go on."""
        async with echo.serving(echo.Echo()) as server, grpc.aio.insecure_channel(server.address) as channel:
            for size in (MAX_METADATA_BYTES + 100, MAX_METADATA_BYTES * 3 // 2, 4 * MAX_METADATA_BYTES):
                for _ in range(10):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await echo.call(channel, "Unary", metadata=(("x-large", "x" * size),))
                    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert await echo.call(channel, "Unary", metadata=(("x-fits", "x" * 15_000),)) == b"default"

    async def test_too_many_calls_are_refused(self, echo: Any) -> None:
        async with (
            echo.serving(echo.Echo(), limits=CallLimits(2)) as server,
            grpc.aio.insecure_channel(server.address) as first,
            grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as second,
        ):
            streams = [channel.unary_stream(f"/{echo.name}/Generate")(b"forever") for channel in (first, second)]
            for stream in streams:
                await stream.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo.call(second, "Unary", timeout=HUNG_SECONDS)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for stream in streams:
                stream.cancel()
