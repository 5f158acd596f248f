"""Runs the measurement, in an order that exposes every mode to the same noise of the machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product

from outrider.errors import OutriderError
from outrider_client.bench.backends import Backend
from outrider_client.bench.profile import StepProfile
from outrider_client.bench.prompts import BenchPrompt
from outrider_client.bench.samples import TRANSFORMERS, BenchMode, Block, RequestOutcome
from outrider_client.client import Message

WARM_UP: tuple[Message, ...] = (("user", "Count from one to ten, then count from one to ten once more."),)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. Modes alternate within every block of prompts."""

    prompts: Sequence[BenchPrompt]
    modes: Sequence[BenchMode]
    concurrency: Sequence[int]
    max_tokens: int
    # Part of this run's tenant names, so that no trie holds the prompts from another run.
    run_id: str
    repeats: int = 1
    second_turns: bool = False
    isolate: bool = False

    def turns(self, prompt: BenchPrompt) -> int:
        return min(len(prompt.turns), 2) if self.second_turns else 1

    def requests(self) -> int:
        per_mode = sum(map(self.turns, self.prompts)) * self.repeats
        return sum(per_mode * sum(1 for mode in self.modes if runs(mode, level)) for level in self.concurrency)


def runs(mode: BenchMode, concurrency: int) -> bool:
    """transformers' loop takes one request at a time."""
    return mode.name != TRANSFORMERS or concurrency == 1


@dataclass
class Runner:
    """Runs a plan. `on_answer` is called after each answer with what is measured; `profile` reads targets' metrics."""

    _plan: Plan
    _backends: Mapping[BenchMode, Backend]
    _on_answer: Callable[[str], None]
    _profile: StepProfile = field(default_factory=lambda: StepProfile({}))
    # First answers by prompt, of the mode that ran first: every mode's second turn builds on them.
    _answers: dict[str, str] = field(default_factory=dict)

    async def warm_up(self) -> None:
        """Have every backend compile and allocate before anything is measured."""
        for mode in self._plan.modes:
            for _ in range(2):
                await self._backends[mode].answer(WARM_UP, 32, f"bench-{self._plan.run_id}-warm")

    async def measure_all(self) -> list[Block]:
        """Run every block of every repeat. Raises `ServiceUnreachable` when a target is gone."""
        blocks: list[Block] = []
        for repeat, concurrency in product(range(self._plan.repeats), self._plan.concurrency):
            for number, prompts in enumerate(self._blocks(concurrency)):
                blocks.extend(await self._interleave(prompts, concurrency, repeat, number))
        return blocks

    def _blocks(self, concurrency: int) -> Iterator[list[BenchPrompt]]:
        # Requests of a block per concurrent one: enough to keep all running, few enough to alternate modes often.
        size = 1 if concurrency == 1 else concurrency * 4
        for _, group in groupby(self._plan.prompts, key=lambda prompt: prompt.task):
            prompts = list(group)
            for start in range(0, len(prompts), size):
                yield prompts[start : start + size]

    async def _interleave(
        self, prompts: Sequence[BenchPrompt], concurrency: int, repeat: int, number: int
    ) -> list[Block]:
        modes = [mode for mode in self._plan.modes if runs(mode, concurrency)]
        shift = (number + repeat) % len(modes)
        blocks: list[Block] = []
        for turn in range(max(map(self._plan.turns, prompts))):
            wanted = [prompt for prompt in prompts if turn < self._plan.turns(prompt)]
            ready = [prompt for prompt in wanted if turn == 0 or prompt.prompt_id in self._answers]
            if not ready:
                continue
            for mode in modes[shift:] + modes[:shift]:
                blocks.append(await self._block(mode, ready, turn, concurrency, repeat))
            if turn == 0:
                first = next(block for block in blocks if block.mode == modes[0])
                for request in first.requests:
                    if request.result is not None:
                        self._answers.setdefault(request.prompt_id, request.result.text)
        return blocks

    async def _block(
        self, mode: BenchMode, prompts: Sequence[BenchPrompt], turn: int, concurrency: int, repeat: int
    ) -> Block:
        places = asyncio.Semaphore(concurrency)
        tenant = f"bench-{self._plan.run_id}-{repeat}-{concurrency}"

        async def one(prompt: BenchPrompt) -> RequestOutcome:
            async with places:
                measured = await self._request(mode, prompt, turn, tenant)
            self._on_answer(f"{prompt.task}, {concurrency} at once, {mode.label}")
            return measured

        before = await self._profile.read(mode)
        begun = time.perf_counter()
        requests = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - begun
        await self._profile.add(mode, before)
        return Block(mode, prompts[0].task, concurrency, repeat, seconds, tuple(requests))

    async def _request(self, mode: BenchMode, prompt: BenchPrompt, turn: int, tenant: str) -> RequestOutcome:
        messages: list[Message] = [("user", prompt.turns[0])]
        if turn:
            messages += [("assistant", self._answers[prompt.prompt_id]), ("user", prompt.turns[turn])]
        if self._plan.isolate:
            tenant = f"{tenant}-{self._plan.prompts.index(prompt)}"
        try:
            result = await self._backends[mode].answer(messages, self._plan.max_tokens, tenant)
        except OutriderError as error:
            # For example a prompt longer than the model's context: it is counted, and the rest goes on.
            return RequestOutcome(prompt.prompt_id, turn, None, error.reason)
        return RequestOutcome(prompt.prompt_id, turn, result)
