"""Many requests through both services, and what they keep of them: `python -m chaos.soak --requests 20000`.

Memory and descriptors of both are sampled as the requests go on. Prompts are new all the time, so that tries learn,
fill up and forget; every tenth is one whose answer is known, and compared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from chaos.report import say, write
from chaos.taught import SAMPLINGS, Taught, taught
from chaos.world import VOCABULARY, World, world_of
from forked import Child

_BESIDE = 16
_SAMPLES = 100
_KNOWN_EVERY = 10
# Of all samples, until caches and tries are full.
_WARM_UP = 0.3
# Tries that are full long before the warm-up is over.
_TRIES = ("--capacity", "60000", "--tenant-capacity", "30000", "--corpus-capacity", "30000", "--own-capacity", "200000")
# A leak of one small object a request is more than this; what allocators do to memory that nobody leaks is less.
MOST_KB_PER_THOUSAND = 50.0


@dataclass
class Watched:
    """A service's memory in KB and its descriptors, by the number of requests answered."""

    child: Child
    requests: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def sample(self, requests: int) -> None:
        process = psutil.Process(self.child.pid)
        self.requests.append(requests)
        self.memory.append(process.memory_info().rss / 1024)
        self.descriptors.append(process.num_fds())

    def figures(self) -> dict[str, Any]:
        """The slope of memory after the warm-up, as the median of the slopes of all pairs (Theil and Sen), and the
        interval that holds it in 95 of 100 cases."""
        begin = int(len(self.requests) * _WARM_UP)
        slope, low, high = _median_slope(self.memory[begin:], self.requests[begin:])
        return {
            "kb_per_1000_requests": round(1000 * slope, 2),
            "interval_95": [round(1000 * low, 2), round(1000 * high, 2)],
            "mb_after_warm_up": round(self.memory[begin] / 1024, 1),
            "mb_at_the_end": round(self.memory[-1] / 1024, 1),
            "descriptors_after_warm_up": [min(self.descriptors[begin:]), max(self.descriptors[begin:])],
            "descriptors_idle": [self.descriptors[0], self.descriptors[-1]],
            "samples": len(self.requests) - begin,
        }


def _median_slope(values: Sequence[float], at: Sequence[float]) -> tuple[float, float, float]:
    """The median of the slopes of all pairs, and the interval that holds the slope in 95 of 100 cases (Sen 1968).
    Without SciPy: see `chi_squared`."""
    y, x = np.asarray(values, float), np.asarray(at, float)
    first, second = np.triu_indices(len(y), 1)
    apart = x[first] != x[second]
    slopes = np.sort((y[second] - y[first])[apart] / (x[second] - x[first])[apart])
    # Of Kendall's statistic, where there are no ties.
    spread = 1.96 * np.sqrt(len(y) * (len(y) - 1) * (2 * len(y) + 5) / 18)
    low, high = (round((len(slopes) + side * spread) / 2) for side in (-1, 1))
    return float(np.median(slopes)), float(slopes[max(0, low - 1)]), float(slopes[min(len(slopes) - 1, high)])


class Soak:
    """Asks for answers, many beside each other, until there were enough."""

    def __init__(self, world: World, requests: int, seed: int) -> None:
        self._world = world
        self._requests = requests
        self._coins = random.Random(seed)
        self._numbers = itertools.count()
        self._answered = 0
        self._watched = {"target": Watched(world.target), "draft": Watched(world.draft)}
        self.drafted = self.accepted = self.compared = 0

    async def run(self) -> dict[str, Any]:
        begun = time.monotonic()
        starts = [supervisor.child.starts for supervisor in self._world.supervisors]
        await self._sample()
        async with asyncio.TaskGroup() as group:
            for _ in range(_BESIDE):
                group.create_task(self._ask_on())
        await asyncio.sleep(1.0)
        await self._sample()
        assert starts == [supervisor.child.starts for supervisor in self._world.supervisors], "a service has died"
        return {
            "requests": self._answered,
            "compared": self.compared,
            "seconds": round(time.monotonic() - begun),
            "drafted": self.drafted,
            "accepted_share": round(self.accepted / max(1, self.drafted), 3),
            **{name: watched.figures() for name, watched in self._watched.items()},
        }

    async def _sample(self) -> None:
        for watched in self._watched.values():
            watched.sample(self._answered)

    async def _ask_on(self) -> None:
        async with self._world.client() as client:
            while (number := next(self._numbers)) < self._requests:
                await self._ask(client, number)
                self._answered += 1
                if self._answered % max(1, self._requests // _SAMPLES) == 0:
                    await self._sample()

    async def _ask(self, client: Any, number: int) -> None:
        coins, taught_answers = self._coins, self._world.taught
        name, max_tokens = coins.choice(list(SAMPLINGS)), coins.randint(8, 24)
        sampling = replace(SAMPLINGS[name], max_tokens=max_tokens)
        known = coins.randrange(len(taught_answers.prompts)) if number % _KNOWN_EVERY == 0 else None
        prompt = [coins.randrange(3, VOCABULARY) for _ in range(coins.randint(4, 40))]
        token_ids = prompt if known is None else taught_answers.prompts[known]
        result = await client.generate(token_ids=token_ids, sampling=sampling, timeout=300).result()
        if known is not None:
            assert list(result.token_ids) == taught_answers.answer(name, known, max_tokens), f"request {number}"
            self.compared += 1
        self.drafted += result.speculation.drafted_tokens
        self.accepted += result.speculation.accepted_tokens


async def soak(taught_model: Taught, folder: Path, requests: int, seed: int = 1) -> dict[str, Any]:
    """So many requests to services of their own."""
    flags = ("--tenant-requests-per-second", "0", "--tenant-burst", "0")
    async with world_of(taught_model, folder / "soaked", "trie", target_flags=flags, draft_flags=_TRIES) as world:
        return await Soak(world, requests, seed).run()


def leaks(figures: dict[str, Any]) -> list[str]:
    """What of a soak's figures shows a leak."""
    found = []
    for name in ("target", "draft"):
        of = figures[name]
        if of["kb_per_1000_requests"] > MOST_KB_PER_THOUSAND and of["interval_95"][0] > 0:
            found.append(f"{name} keeps {of['kb_per_1000_requests']} KB of 1,000 requests")
        before, after = of["descriptors_idle"]
        if after > before + 2:
            found.append(f"{name} holds {after} descriptors after {before}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--folder", type=Path, help="where to keep models and logs; a passing one without it")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as passing:
        folder = chosen.folder or Path(passing)
        told = asyncio.run(soak(taught(folder), folder, chosen.requests, chosen.seed))
    write(chosen.json, "chaos.soak", told)
    say(json.dumps(told, indent=1))
    for leak in leaks(told):
        say(leak)
    return 1 if leaks(told) else 0


if __name__ == "__main__":
    sys.exit(main())
