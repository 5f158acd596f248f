"""Backends of the benchmark: targets, started for it or already running, and transformers' own loop."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from outrider.sampling import SamplingParams
from outrider.settings import SettingsError
from outrider_client.bench import transformers_loop
from outrider_client.client import Client, Message
from outrider_client.generation import Speculation
from outrider_client.results import Result
from outrider_client.terminal.options import BenchOptions, ClientOptions

Answer = TypeVar("Answer")


class Backend(Protocol):
    """Answers conversations under one mode."""

    async def answer(self, messages: Sequence[Message], max_tokens: int, tenant: str) -> Result:
        """One greedy answer for a tenant. Raises `OutriderError` for a conversation that is refused."""


class TargetBackend:
    """A target service, with drafts or without."""

    def __init__(
        self, reach: ClientOptions, address: str, speculate: bool, max_nodes: int | None = None, memory: str = ""
    ) -> None:
        """`max_nodes` limits the drafted rows of a step; None leaves that to the target. `memory` is a prefix of every
        tenant's name, so that drafts learn separately. Must be called from a running event loop."""
        self._reach = reach
        self._memory = memory
        self._speculation = Speculation(enabled=None if speculate else False, max_nodes=max_nodes)
        # Read once, and one connection for all tenants: neither is a part of the answers' times.
        self._token = reach.secret()
        self._client = Client(reach.connection(address))

    def client(self, tenant: str = "") -> Client:
        """The client for a tenant. With a token, the token determines the tenant."""
        name = self._reach.tenant if self._token else tenant or self._reach.tenant
        return self._client.acting_for(token=self._token, tenant=name)

    async def answer(self, messages: Sequence[Message], max_tokens: int, tenant: str) -> Result:
        generation = self.client(self._memory + tenant).generate(
            messages=messages,
            sampling=SamplingParams(max_tokens=max_tokens),
            speculation=self._speculation,
            timeout=self._reach.deadline,
        )
        return await generation.result()

    async def close(self) -> None:
        await self._client.close()


class TransformersBackend:
    """transformers' `generate` on the same model, in a separate process."""

    def __init__(self, options: BenchOptions) -> None:
        self._model = options.model, options.dtype, options.device
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    async def load(self) -> None:
        """Load the model. Raises `SettingsError` when that fails."""
        await self._run(transformers_loop.load)

    async def answer(self, messages: Sequence[Message], max_tokens: int, tenant: str) -> Result:  # noqa: ARG002
        return await self._run(partial(transformers_loop.answer, messages=messages, max_tokens=max_tokens))

    async def _run(self, work: Callable[..., Answer]) -> Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._process, work, *self._model)
        except Exception as error:
            raise SettingsError(f"the transformers process failed: {error}") from error

    async def close(self) -> None:
        self._process.shutdown(cancel_futures=True)
