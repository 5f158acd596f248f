"""Backends of the benchmark: targets, started for it or already running, and transformers' own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.sampling import SamplingParams
from outrider.settings import SettingsError
from outrider_client.client import Client, Message
from outrider_client.generation import Speculation
from outrider_client.results import RequestTimes, Result, SpeculationTotals
from outrider_client.terminal.options import BenchOptions, ClientOptions

_LINE_LIMIT = 16 * 1024 * 1024


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


@dataclass
class TransformersBackend:
    """transformers' `generate` on the same model, in a separate process."""

    _process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, options: BenchOptions) -> TransformersBackend:
        """Load the model. Raises `SettingsError` when that fails."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "outrider_client.bench.transformers_loop",
            *("--model", options.model, "--dtype", options.dtype, "--device", options.device),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        backend = cls(process)
        await backend._read()
        return backend

    async def answer(self, messages: Sequence[Message], max_tokens: int, tenant: str) -> Result:  # noqa: ARG002
        assert self._process.stdin is not None
        request = {"messages": messages, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        row = await self._read()
        count = len(row["token_ids"])
        return Result(
            text=row["text"],
            token_ids=tuple(row["token_ids"]),
            finish_reason=None,
            stop_token_id=None,
            stop_string=None,
            prompt_tokens=row["prompt_tokens"],
            completion_tokens=count,
            speculation=SpeculationTotals(count, 0, 0, 0, (), (), 0, 0),
            times=RequestTimes(0.0, 0.0, 0.0),
            time_to_first_token=row["ttft"],
            duration=row["duration"],
        )

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SettingsError(f"the transformers process exited with status {await self._process.wait()}")
        row: dict[str, Any] = json.loads(line)
        return row

    async def close(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
