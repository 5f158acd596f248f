"""Gateways on free ports, before scripted targets in this process and before a real one with a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from scripted_engine import SERVED, ScriptedEngine
from scripted_service import Target, byte_tokenizer, served_tokenizer, target_over
from transformers import PreTrainedModel
from waits import HUNG_SECONDS
from warm_python import shared_python, warm_executable

from outrider_client.client import Client
from outrider_client.local.stack import Stack, wait_for_drafter
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.server import GatewayServer


@dataclass(frozen=True)
class Gateway:
    """A running gateway, the targets behind it, and two clients of it."""

    server: GatewayServer
    targets: list[Target]
    openai: AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    async def idle(self) -> None:
        """Wait until no answer is being written, or fail."""
        async with asyncio.timeout(HUNG_SECONDS):
            while any(target.running for target in self.server.application.targets.all):
                await asyncio.sleep(0.005)
            for target in self.targets:
                await target.idle()


@contextlib.asynccontextmanager
async def running_before(
    addresses: list[str], targets: list[Target], token: str = "unused", **settings: Any
) -> AsyncIterator[Gateway]:
    # A test that fails in the middle of an answer should not wait for its end.
    config = GatewayConfig(target=",".join(addresses), listen="127.0.0.1:0", **{"drain_seconds": 2.0, **settings})
    async with GatewayServer(config, AccessOptions()) as server:
        url = f"http://{server.address}"
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as openai,
            httpx.AsyncClient(base_url=url, timeout=HUNG_SECONDS) as http,
        ):
            yield Gateway(server, targets, openai, http)


@contextlib.asynccontextmanager
async def gateway_over(
    *engines: ScriptedEngine,
    served: dict[str, Any] | None = None,
    serving: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    async with contextlib.AsyncExitStack() as leave:
        model = replace(SERVED, **{"tokenizer": served_tokenizer(), **(served or {})})
        targets = [
            await leave.enter_async_context(target_over(engine, model, **(serving or {})))
            for engine in engines or (ScriptedEngine(),)
        ]
        addresses = [target.server.address for target in targets]
        yield await leave.enter_async_context(running_before(addresses, targets, **settings))


@pytest.fixture
def gateways() -> Any:
    """`gateway_over(*engines, served=, serving=, **settings)`: an async context manager of a `Gateway`."""
    return gateway_over


@pytest.fixture(name="gateway_before")
def gateway_before_fixture() -> Any:
    """`running_before(addresses, targets, token, **settings)`: an async context manager of a `Gateway`."""
    return running_before


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with gateway_over() as running:
        yield running


@pytest.fixture(scope="session")
def model(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model, which is also the name that it is served under."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def real_target(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a target service with that model and a draft service with a trie, in processes of their own."""
    with asyncio.Runner() as runner:
        stack = Stack(tmp_path_factory.mktemp("sockets"))

        async def start() -> str:
            draft = await stack.start("draft", "draft_service", "--drafter", "trie")
            flags = ("--model", model, "--dtype", "float32", "--threads", "1", "--draft", draft)
            # A tiny model is faster than any draft: without this nothing would be drafted.
            flags += ("--row-budget", "all", "--draft-wait-ms", "200")
            target = await stack.start("target", "target_service", *flags)
            async with Client.connect(target) as client:
                assert await wait_for_drafter(client) == "trie"
            return target

        try:
            with warm_executable(shared_python("services")):
                address = runner.run(start())
            yield address
        finally:
            runner.run(stack.__aexit__(None, None, None))


@pytest.fixture
async def real(real_target: str) -> AsyncIterator[Gateway]:
    async with running_before([real_target], []) as running:
        yield running
