"""Several targets behind one gateway: who gets what, and what happens when one goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from waits import HUNG_SECONDS, until

from outrider_client.client import Client

TEXT = {"model": "counter", "prompt": "a", "max_tokens": 3, "temperature": 0}


def series(page: str, name: str) -> float:
    return float(next(line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(name)))


async def test_a_conversation_stays_and_load_is_bounded(gateways: Any) -> None:
    engines = [ScriptedEngine(tick=0.005) for _ in range(3)]
    async with gateways(*engines) as gateway:
        for _ in range(6):
            await gateway.http.post("/v1/completions", json=TEXT, headers={"outrider-tenant": "acme"})
        assert sorted(len(engine.requests) for engine in engines) == [0, 0, 6]
        asked = {**TEXT, "max_tokens": 60}
        headers = {"outrider-tenant": "acme"}
        for engine in engines:
            engine.paused.set()
        posts = [gateway.http.post("/v1/completions", json=asked, headers=headers) for _ in range(12)]
        answers = asyncio.gather(*posts)
        await until(lambda: sum(len(engine.requests) for engine in engines) == 18)
        for engine in engines:
            engine.go_on()
        await answers
        counts = sorted(len(engine.requests) for engine in engines)
        assert sum(counts) == 18
        assert counts[0] >= 2


async def test_conversations_are_spread(gateways: Any) -> None:
    """Each stays where its first turn was; one that has another's key goes where that is."""
    engines = [ScriptedEngine() for _ in range(3)]
    async with gateways(*engines) as gateway:

        async def ask(*contents: str, **more: str) -> int:
            """Which engine answered."""
            before = [len(engine.requests) for engine in engines]
            roles = ("system", "user", "assistant", "user")
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
            body = {"model": "counter", "messages": messages, "max_tokens": 1, **more}
            assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
            return next(place for place, engine in enumerate(engines) if len(engine.requests) > before[place])

        first = [await ask("be brief", f"question {number}") for number in range(24)]
        assert set(first) == {0, 1, 2}
        assert first == [await ask("be brief", f"question {number}", "answer", "why?") for number in range(24)]
        assert len({await ask("be brief", f"question {number}", prompt_cache_key="same") for number in range(24)}) == 1


async def test_target_that_goes_before_the_first_token_is_replaced(gateways: Any) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with gateways(*engines, health_seconds=3600.0) as gateway:
        await gateway.http.post("/v1/completions", json=TEXT)
        first = next(i for i, engine in enumerate(engines) if engine.requests)
        await gateway.targets[first].server.stop(0)
        answer = await gateway.http.post("/v1/completions", json=TEXT)
        assert answer.json()["choices"][0]["text"] == "bcd"
        assert len(engines[1 - first].requests) == 1
        ready = (await gateway.http.get("/health/ready")).json()
        assert sorted(ready["targets"].values()) == [False, True]
        assert series((await gateway.http.get("/metrics")).text, "outrider_gateway_retries_total") == 1


async def test_draining_target_is_replaced(gateways: Any) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with gateways(*engines, health_seconds=3600.0) as gateway:
        await gateway.http.post("/v1/completions", json=TEXT)
        first = next(i for i, engine in enumerate(engines) if engine.requests)
        engines[first].drain()
        assert (await gateway.http.post("/v1/completions", json=TEXT)).status_code == 200
        assert len(engines[1 - first].requests) == 1


async def test_target_whose_engine_is_dead_is_replaced(gateways: Any) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with gateways(*engines, health_seconds=3600.0) as gateway:
        await gateway.http.post("/v1/completions", json=TEXT)
        first = next(i for i, engine in enumerate(engines) if engine.requests)
        engines[first].die(RuntimeError("broken"))
        answer = await gateway.http.post("/v1/completions", json=TEXT)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "bcd")
        assert len(engines[1 - first].requests) == 1


async def test_a_second_target_has_the_time_that_the_first_left(gateways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`request_seconds` bounds the request, however many targets are tried."""
    now, left, generate = 100.0, list[float](), Client.generate

    def noted(client: Client, *, timeout: float, **asked: Any) -> Any:
        left.append(timeout)
        return generate(client, timeout=timeout, **asked)

    monkeypatch.setattr(Client, "generate", noted)
    for module in ("endpoint", "dispatch"):
        monkeypatch.setattr(f"outrider_gateway.{module}.perf_counter", lambda: now)
    engines = [ScriptedEngine(), ScriptedEngine()]
    for engine in engines:
        engine.paused.set()
    async with gateways(*engines, health_seconds=3600.0, request_seconds=HUNG_SECONDS) as gateway:
        asking = asyncio.create_task(gateway.http.post("/v1/completions", json=TEXT))
        await until(lambda: any(engine.requests for engine in engines))
        now += 20.0
        first = next(i for i, engine in enumerate(engines) if engine.requests)
        engines[first].die(RuntimeError("broken"))
        await until(lambda: engines[1 - first].requests)
        engines[1 - first].go_on()
        assert (await asking).status_code == 200
        assert left == [HUNG_SECONDS, HUNG_SECONDS - 20.0]


async def test_nothing_left_is_503(gateways: Any) -> None:
    async with gateways() as gateway:
        await gateway.targets[0].server.stop(0)
        for _ in range(2):
            answer = await gateway.http.post("/v1/completions", json=TEXT)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "target_unavailable")
            assert answer.headers["retry-after"] == "1"
        assert (await gateway.http.get("/health/ready")).status_code == 503
        assert (await gateway.http.get("/health")).status_code == 200


async def tenants_by_target(gateway: Any) -> list[str]:
    """A tenant that each target ranks first for."""
    found: dict[int, str] = {}
    names: Iterator[str] = (f"tenant-{number}" for number in range(100))
    while len(found) < len(gateway.targets):
        tenant = next(names)
        before = [len(target.engine.requests) for target in gateway.targets]
        await gateway.http.post("/v1/completions", json=TEXT, headers={"outrider-tenant": tenant})
        after = [len(target.engine.requests) for target in gateway.targets]
        found.setdefault(
            next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]), tenant
        )
    return [found[place] for place in range(len(gateway.targets))]


@pytest.mark.parametrize("how", ["engine", "service"])
async def test_target_that_dies_in_mid_stream_ends_its_own_answers_only(gateways: Any, how: str) -> None:
    """What was said cannot be said again elsewhere: its answers end with an error, the others go on, and the next
    request of its tenants is another target's."""
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with gateways(*engines, health_seconds=3600.0) as gateway:
        tenants = await tenants_by_target(gateway)
        half_way = [asyncio.Event() for _ in tenants]
        for engine in engines:
            engine.pause_after(40)

        async def read(tenant: str) -> list[str]:
            asked = {**TEXT, "max_tokens": 150, "stream": True}
            headers = {"outrider-tenant": tenant}
            lines: list[str] = []
            async with gateway.http.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        lines.append(line.removeprefix("data: "))
                    half_way[tenants.index(tenant)].set()
            return lines

        readers = [asyncio.create_task(read(tenant)) for tenant in tenants]
        for each in half_way:
            await asyncio.wait_for(each.wait(), HUNG_SECONDS)
        if how == "engine":
            engines[0].die(RuntimeError("broken"))
        else:
            await gateway.targets[0].server.stop(0)
        engines[1].go_on()
        broken, whole = await asyncio.wait_for(asyncio.gather(*readers), HUNG_SECONDS)
        assert "error" in json.loads(broken[-1]) and "[DONE]" not in broken
        assert json.loads(broken[0])["choices"][0]["text"].startswith("b")
        assert whole[-1] == "[DONE]"
        assert sum(len(json.loads(line)["choices"][0]["text"]) for line in whole[:-1]) == 150
        if how == "engine":
            # A service whose engine is dead says so in its health, and ends.
            await gateway.targets[0].server.stop(0)
        answer = await gateway.http.post("/v1/completions", json=TEXT, headers={"outrider-tenant": tenants[0]})
        assert answer.json()["choices"][0]["text"] == "bcd"
        assert engines[1].requests[-1].tenant == tenants[0]
