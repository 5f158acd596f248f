"""A client of several targets behind one DNS name, with gRPC's own resolver and a name server on loopback."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from name_server import name_server
from scripted_engine import ScriptedEngine
from scripted_service import target_over
from waits import HUNG_SECONDS

from outrider.sampling import SamplingParams
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable
from outrider_client.policy import SINGLE_ATTEMPT


async def test_calls_go_round_the_addresses_that_are_ready() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with asyncio.timeout(HUNG_SECONDS), target_over(engines[0]) as first:
        port = first.server.address.rpartition(":")[2]
        async with (
            target_over(engines[1], listen=f"127.0.0.2:{port}") as second,
            name_server({"targets.test.": ["127.0.0.1", "127.0.0.2"]}) as names,
            Client.connect(f"dns://127.0.0.1:{names.port}/targets.test:{port}", policy=SINGLE_ATTEMPT) as client,
        ):

            async def ask() -> None:
                await client.generate(token_ids=[5], sampling=SamplingParams(max_tokens=1)).result()

            def counts() -> list[int]:
                return [len(engine.requests) for engine in engines]

            # The second connection may be made later than the first.
            while min(counts()) == 0:
                await ask()
            before = Counter(dict(enumerate(counts())))
            for _ in range(10):
                await ask()
            assert Counter(dict(enumerate(counts()))) - before == {0: 5, 1: 5}

            # One that drains says so to whoever watches its health, and gets nothing more.
            second.server.health.set_serving(False)
            while True:
                before_second = len(engines[1].requests)
                for _ in range(4):
                    await ask()
                if len(engines[1].requests) == before_second:
                    break
            second.server.health.set_serving(True)
            while len(engines[1].requests) == before_second:
                await ask()


async def test_a_name_that_no_server_knows() -> None:
    async with (
        asyncio.timeout(HUNG_SECONDS),
        name_server({}) as names,
        Client.connect(f"dns://127.0.0.1:{names.port}/nowhere.test:1", policy=SINGLE_ATTEMPT) as client,
    ):
        with pytest.raises(ServiceUnreachable, match=r"nowhere\.test"):
            await client.info()
