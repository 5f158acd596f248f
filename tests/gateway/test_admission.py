"""Who is let in at the gateway, how much of it and in what share, before anything of a request is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from outrider.errors import Unauthenticated
from outrider.serving import Authenticator, Caller, GrpcServer, Service, ServingOptions
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable
from outrider_gateway.admission import UNCOUNTED_BYTES
from outrider_gateway.caller import HttpCaller
from outrider_gateway.failures import Refused
from outrider_gateway.http import json_object
from outrider_gateway.known_callers import KnownCallers
from outrider_gateway.peers import peer_name
from outrider_gateway.targets import Target, Targets
from target_service.api.server import SERVICE_NAME

GOOD, OTHER = "good-token-of-length", "other-token-of-length"
TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}
HELD = {**TEXT, "max_tokens": 250, "ignore_eos": True}
# Longer than anything here takes on a busy machine.
HUNG_SECONDS = 60.0
JSON = {"content-type": "application/json"}


def padded(body: dict[str, Any]) -> bytes:
    """A body of 200,000 bytes, most of which say nothing."""
    return json.dumps(body).encode().ljust(200_000)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def locked() -> dict[str, Any]:
    return {"authenticator": Authenticator({GOOD: Caller("good"), OTHER: Caller("other")})}


@contextlib.asynccontextmanager
async def beside(requests: list[Any]) -> AsyncIterator[None]:
    """Requests that go on while the block runs."""
    tasks = list(map(asyncio.create_task, requests))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("token", [lambda: "wrong-token-of-length", lambda: secrets.token_hex(16)], ids=["one", "many"])
@pytest.mark.parametrize("path", ["completions", "models"])
async def test_unknown_callers_take_no_place(gateways: Any, token: Any, path: str) -> None:
    """A target answers them late once they are many; until then they held the places of all others."""
    async with gateways(ScriptedEngine(tick=0.01), serving=locked(), max_running=8) as gateway:

        async def ask() -> Any:
            if path == "models":
                return await gateway.http.get("/v1/models", headers=bearer(token()))
            return await gateway.http.post("/v1/completions", json=TEXT, headers=bearer(token()))

        refused = await asyncio.gather(*(ask() for _ in range(64)))
        assert {answer.status_code for answer in refused} <= {401, 429}
        async with beside([ask() for _ in range(40)]):
            for _ in range(8):
                answer = await gateway.http.post("/v1/completions", json=TEXT, headers=bearer(GOOD))
                assert answer.status_code == 200
        assert {request.tenant for request in gateway.targets[0].engine.requests} == {"good"}


@pytest.mark.parametrize("tokens", [True, False])
async def test_one_tenant_leaves_places_to_others(gateways: Any, tokens: bool) -> None:
    serving = locked() if tokens else {}
    engine = ScriptedEngine(tick=0.05)
    loud, quiet = (
        (bearer(OTHER), bearer(GOOD)) if tokens else ({"outrider-tenant": "loud"}, {"outrider-tenant": "quiet"})
    )
    async with gateways(engine, serving=serving, max_running=32) as gateway:
        many = [gateway.http.post("/v1/completions", json={**HELD, "n": 4}, headers=loud) for _ in range(12)]
        async with beside(many):
            async with asyncio.timeout(HUNG_SECONDS):
                while sum(target.running for target in gateway.server.application.targets.all) < 20:
                    await asyncio.sleep(0.01)
            for _ in range(4):
                answer = await gateway.http.post("/v1/completions", json=TEXT, headers=quiet)
                assert answer.status_code == 200
        await gateway.idle()


async def begin(address: str, size: int, headers: dict[str, str] | None = None) -> tuple[Any, Any]:
    """The head of a request whose body has `size` bytes."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    named = {"host": "localhost", "content-type": "application/json", "content-length": str(size), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode())
    return reader, writer


async def test_a_caller_is_checked_before_its_body_is_there(gateways: Any) -> None:
    async with gateways(serving=locked(), body_seconds=600) as gateway:
        reader, writer = await begin(gateway.server.address, 4_000_000, bearer("wrong-token-of-length"))
        assert b" 401 " in await asyncio.wait_for(reader.readline(), HUNG_SECONDS)
        writer.close()


async def test_long_bodies_are_read_by_a_thread_and_others_are_served(
    gateways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, threads = threading.Event(), threading.Event(), list[str]()

    def read(raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        if len(raw) > 100_000:
            begun.set()
            assert go.wait(HUNG_SECONDS)
        return json_object(raw)

    monkeypatch.setattr("outrider_gateway.endpoint.json_object", read)
    async with gateways() as gateway:
        long = gateway.http.post("/v1/completions", content=padded(TEXT), headers=JSON)
        async with beside([]):
            reading = asyncio.create_task(long)
            await asyncio.to_thread(begun.wait, HUNG_SECONDS)
            assert (await gateway.http.get("/health")).status_code == 200
            assert (await gateway.http.post("/v1/completions", json=TEXT)).status_code == 200
            go.set()
            assert (await reading).status_code == 200
    assert [name.startswith("texts") for name in threads] == [True, False]


async def test_a_thread_reads_many_messages_and_not_as_many_token_ids(
    gateways: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()

    def read(raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return json_object(raw)

    monkeypatch.setattr("outrider_gateway.endpoint.json_object", read)
    ids, messages = [100] * 9000, [{"role": "user", "content": "a"}] * 250
    async with gateways() as gateway:
        await gateway.http.post("/v1/completions", json={**TEXT, "prompt": ids})
        await gateway.http.post("/v1/chat/completions", json={"model": TEXT["model"], "messages": messages})
    assert len(json.dumps(ids)) > 2 * len(json.dumps(messages))
    assert [name.startswith("texts") for name in threads] == [False, True]


async def test_the_bytes_of_all_bodies_together_are_bounded(gateways: Any) -> None:
    size = UNCOUNTED_BYTES + 100_000
    async with gateways(max_pending_bytes=1_000_000, body_seconds=600) as gateway:
        shares = gateway.server.application._admission._bytes
        begun = [await begin(gateway.server.address, size) for _ in range(20)]
        for _, writer in begun:
            writer.write(b" " * (size - 1))
        answers = [asyncio.create_task(reader.readline()) for reader, _ in begun]
        async with asyncio.timeout(HUNG_SECONDS):
            # Each is either held, or refused.
            while round(shares.taken / 99_999) + sum(task.done() for task in answers) < 20:
                await asyncio.sleep(0.01)
        assert 0 < shares.taken < shares.total
        assert {(await task).split()[1] for task in answers if task.done()} == {b"429"}
        # A short one needs no place.
        assert (await gateway.http.post("/v1/completions", json=TEXT)).status_code == 200
        for task in answers:
            task.cancel()
        for _, writer in begun:
            writer.close()
        async with asyncio.timeout(HUNG_SECONDS):
            while shares.taken:
                await asyncio.sleep(0.01)


async def test_a_prompt_counts_once_for_each_choice(gateways: Any) -> None:
    async with gateways(max_pending_bytes=1_000_000) as gateway:
        answer = await gateway.http.post("/v1/completions", content=padded(TEXT), headers=JSON)
        assert answer.status_code == 200
        refused = await gateway.http.post("/v1/completions", content=padded({**TEXT, "n": 16}), headers=JSON)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "bytes of bodies" in refused.json()["error"]["message"]


async def test_what_a_caller_names_is_told_in_short(gateways: Any) -> None:
    async with gateways() as gateway:
        answer = await gateway.http.post("/v1/completions", json={**TEXT, "a" * 1_000_000: 1})
        assert answer.status_code == 400 and len(answer.content) < 10_000


class Asked:
    """A target that knows one token, and counts how often it is asked."""

    address = "asked:1"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.wait: asyncio.Event | None = None
        self.error: Exception | None = None

    def acting_for(self, *, token: str, tenant: str) -> Any:
        assert tenant == ""
        asked = self

        class Acting:
            async def info(self, _timeout: float) -> Any:
                asked.asked.append(token)
                if asked.wait is not None and token != GOOD:
                    await asked.wait.wait()
                if asked.error is not None:
                    raise asked.error
                if token != GOOD:
                    raise Unauthenticated("who?")
                return type("Info", (), {"tenant": "acme"})

        return Acting()


def knowing(asked: Any) -> tuple[KnownCallers, list[float]]:
    """Callers that this target knows, and the clock."""
    targets = Targets([asked], health_seconds=1.0, load_bound=1.25)
    targets.all[0].healthy = True
    now = [0.0]
    return KnownCallers(targets, lambda: now[0]), now


def calling(token: str) -> HttpCaller:
    return HttpCaller(token, "", {})  # type: ignore[arg-type]


async def test_a_caller_is_asked_for_once_in_a_while() -> None:
    asked = Asked()
    known, now = knowing(asked)
    together = await asyncio.gather(*(known.tenant(calling(GOOD)) for _ in range(5)))
    assert together == ["acme"] * 5 and len(asked.asked) == 1
    for _ in range(3):
        with pytest.raises(Refused, match="who"):
            await known.tenant(calling("wrong"))
    assert asked.asked == [GOOD, "wrong"]
    now[0] = 30.0
    assert await known.tenant(calling(GOOD)) == "acme"
    with pytest.raises(Refused, match="who"):
        # It may have been given out meanwhile.
        await known.tenant(calling("wrong"))
    assert asked.asked == [GOOD, "wrong", "wrong"]
    known.refused(calling(GOOD))
    await known.tenant(calling(GOOD))
    assert asked.asked[-1] == GOOD


async def test_questions_that_are_answered_late_make_room_for_others() -> None:
    asked = Asked()
    asked.wait = asyncio.Event()
    known, _ = knowing(asked)
    wrong = [asyncio.create_task(known.tenant(calling(f"wrong{number}"))) for number in range(100)]
    async with asyncio.timeout(HUNG_SECONDS):
        assert await known.tenant(calling(GOOD)) == "acme"
        done, _ = await asyncio.wait(wrong, timeout=0)
        while len(done) < 60:
            done, _ = await asyncio.wait(wrong, timeout=0.01)
    assert {task.exception().status for task in done} == {429}  # type: ignore[union-attr]
    asked.wait.set()
    statuses = {getattr(error, "status", None) for error in await asyncio.gather(*wrong, return_exceptions=True)}
    assert statuses == {401, 429}


async def test_a_target_that_is_gone_is_left_out_and_said_why() -> None:
    asked = Asked()
    asked.error = ServiceUnreachable("asked:1", "Connection refused")
    known, _ = knowing(asked)
    with pytest.raises(Refused, match="Connection refused") as raised:
        await known.tenant(calling(GOOD))
    assert raised.value.status == 503
    with pytest.raises(Refused, match="Connection refused"):
        await known.tenant(calling(GOOD))
    assert len(asked.asked) == 1


def test_an_ipv6_network_is_one_peer() -> None:
    assert peer_name("2001:db8::1") == peer_name("2001:db8::ffff:1") != peer_name("2001:db8:0:1::1")
    assert peer_name("::ffff:10.0.0.1") == peer_name("10.0.0.1") == "10.0.0.1"
    assert peer_name("fe80::1%eth0") == "fe80::/64"


@contextlib.asynccontextmanager
async def loading_target(**options: Any) -> AsyncIterator[str]:
    server = GrpcServer(ServingOptions(**options), [Service(SERVICE_NAME)])
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


@pytest.mark.parametrize("path", ["completions", "models"])
async def test_a_model_that_is_being_loaded_is_said_to_be(gateway_before: Any, path: str) -> None:
    async with loading_target() as address, gateway_before([address], []) as gateway:
        ask = gateway.http.get("/v1/models") if path == "models" else gateway.http.post("/v1/completions", json=TEXT)
        answer = await ask
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert re.search(r"the model is being loaded \(\d+ s so far\)$", answer.json()["error"]["message"])


async def test_other_causes_are_in_the_answer(gateway_before: Any, unused_tcp_port: int) -> None:
    async with gateway_before([f"127.0.0.1:{unused_tcp_port}"], []) as gateway:
        answer = await gateway.http.post("/v1/completions", json=TEXT)
        assert answer.status_code == 503 and "Connection refused" in answer.json()["error"]["message"]


async def test_a_target_that_is_being_started_is_no_warning(
    unused_tcp_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `outrider up` starts it beside the gateway."""
    now = 0.0
    monkeypatch.setattr("outrider_gateway.targets.time", SimpleNamespace(monotonic=lambda: now))
    caplog.set_level("INFO")
    async with Client.connect(f"127.0.0.1:{unused_tcp_port}") as client:
        target = Target(client, start_seconds=60)
        for now in (1.0, 12.0, 59.0):  # noqa: B007
            await target.check_health()
        assert target.state == "being started (59 s so far)"
        now = 61.0
        await target.check_health()
    said = [record.getMessage().rpartition("target ")[2].partition(" ")[2] for record in caplog.records]
    assert said[0] == "is being started" and said[1].startswith("is left out: cannot reach") and len(said) == 2
