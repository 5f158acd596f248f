"""Targets behind a name whose addresses change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import SERVED, ScriptedEngine
from scripted_service import model_tokenizer, target_over
from waits import HUNG_SECONDS, until

from outrider.sampling import SamplingParams
from outrider.settings import SettingsError
from outrider_client.client import Client
from outrider_gateway.config import GatewayConfig
from outrider_gateway.discovery import Resolver, TargetName, target_name
from outrider_gateway.failures import NoTarget
from outrider_gateway.targets import FoundTargets, Targets

NAME = TargetName("targets.test", 50051)


class Records:
    """A name server of one name: `addresses`, or a failure."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    async def look_up(self, _host: str, _port: int) -> list[tuple[Any, ...]]:
        self.asked += 1
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        pairs = (address.rpartition(":") for address in self.addresses)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, int(port))) for host, _, port in pairs]


@asynccontextmanager
async def behind(records: Records) -> AsyncIterator[Targets]:
    named = FoundTargets(Resolver(NAME, records.look_up), Client.connect)
    async with asyncio.timeout(HUNG_SECONDS):
        async with Targets([], health_seconds=0.01, load_bound=1.25, sources=[named]) as targets:
            yield targets


def addresses(targets: Targets) -> list[str]:
    return sorted(target.address for target in targets.usable)


async def test_targets_come_and_go_with_their_name() -> None:
    async with target_over() as first, target_over() as second, target_over() as third:
        one, two, three = (target.server.address for target in (first, second, third))
        records = Records(one, two)
        async with behind(records) as targets:
            assert addresses(targets) == sorted((one, two))
            records.addresses = [two, three]
            await until(lambda: addresses(targets) == sorted((two, three)))
            assert {targets.pick(str(key), "").address for key in range(50)} == {two, three}


async def test_there_is_a_target_while_one_takes_the_place_of_another() -> None:
    async with target_over() as leaving, target_over() as joining:
        records = Records(leaving.server.address)
        async with behind(records) as targets:
            records.addresses = [joining.server.address]
            while addresses(targets) != [joining.server.address]:
                assert targets.usable
                await asyncio.sleep(0)


async def test_the_answers_of_a_target_that_left_its_name_end_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = list[str](), Client.close

    async def noted(client: Client) -> None:
        closed.append(client.address)
        await close(client)

    monkeypatch.setattr(Client, "close", noted)
    engine = ScriptedEngine()
    engine.pause_after(2)
    async with target_over(engine) as leaving, target_over() as staying:
        records = Records(leaving.server.address)
        async with behind(records) as targets:
            target = targets.all[0]
            with target.counting():
                answer = target.client.generate(token_ids=[5], sampling=SamplingParams(max_tokens=6))
                await anext(aiter(answer))
                records.addresses = [staying.server.address]
                await until(lambda: target not in targets.all and targets.usable)
                engine.go_on()
                assert (await answer.result()).completion_tokens == 6 and not closed
            await until(lambda: closed == [target.address])


async def test_a_name_without_an_address_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with target_over() as only:
        records = Records(only.server.address)
        async with behind(records) as targets:
            records.addresses, asked = [], records.asked
            await until(lambda: records.asked > asked + 3)
            assert addresses(targets) == [only.server.address]
    warnings = [line for line in caplog.messages if "no address" in line]
    assert warnings == ["dns:///targets.test:50051 has no address: Name or service not known"]


async def test_a_name_that_gets_its_first_address_later() -> None:
    records = Records()
    async with behind(records) as targets, target_over() as late:
        with pytest.raises(NoTarget, match=r"dns:///targets\.test:50051: no address is known"):
            targets.pick("key", "")
        records.addresses = [late.server.address]
        await until(lambda: targets.usable)


async def test_a_gateway_finds_targets_by_the_resolver_of_the_system(gateway_before: Any) -> None:
    engine = ScriptedEngine()
    served = replace(SERVED, tokenizer=model_tokenizer())
    async with target_over(engine, served) as target:
        port = target.server.address.rpartition(":")[2]
        async with gateway_before([f"dns:///localhost:{port}"], [target]) as gateway:
            answer = await gateway.http.post(
                "/v1/completions", json={"model": "counter", "prompt": "a", "max_tokens": 1}
            )
    assert answer.status_code == 200 and len(engine.requests) == 1


@pytest.mark.parametrize(
    "address",
    ["dns:///targets.test", "dns:targets.test:1", "dns://127.0.0.1/targets.test:1", "dns:///a:0", "dns:///:1"],
)
def test_names_that_are_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="is not dns:///HOST:PORT"):
        GatewayConfig(target=address)


def test_names_are_told_from_addresses() -> None:
    assert target_name("127.0.0.1:50051") is None and target_name("unix:/run/target.sock") is None
    assert target_name("dns:///targets.test:50051") == NAME
