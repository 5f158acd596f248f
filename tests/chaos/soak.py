"""An hour of requests through both services and a gateway, and what their processes keep: `python -m chaos.soak`.

Memory and descriptors of every process are sampled as time goes on. Prompts are new all the time, so that tries learn,
fill up and forget; with drafts every tenth is one whose answer is known, and compared. Without drafts the model runs in
bf16, in which the processor's libraries keep something for each number of rows (`outrider.runtime.ONEDNN_CACHES`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil
from chaos.report import say, write
from chaos.taught import SAMPLINGS, Taught, taught
from chaos.world import VOCABULARY, World, world_of
from waits import HUNG_SECONDS

from outrider.sampling import SamplingParams
from outrider_client.generation import Speculation

_BESIDE = 16
_SAMPLES = 120
_KNOWN_EVERY = 10
# Of all samples, until caches and tries are full.
_WARM_UP = 0.3
# Tries that are full long before the warm-up is over.
_TRIES = ("--capacity", "60000", "--tenant-capacity", "30000", "--corpus-capacity", "30000", "--own-capacity", "200000")
_UNLIMITED = ("--tenant-requests-per-second", "0", "--tenant-burst", "0")
# A leak of some hundred bytes a request is more than this, at some twenty requests a second. What allocators do to
# memory that nobody leaks is less, at least at the end: a service over gRPC grew by 16 MB in its first 30,000 requests,
# and by nothing after these.
MOST_KB_PER_MINUTE = 150.0
# Of all samples, in which what grows must still grow to be a leak.
_END = 0.3
# Descriptors of connections that are kept for a while after the last request.
_CONNECTIONS = 8


@dataclass
class Watched:
    """A process's memory in KB and its descriptors, by the minutes that have passed."""

    process: psutil.Process | None
    minutes: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def sample(self, minutes: float) -> None:
        assert self.process is not None
        self.minutes.append(minutes)
        self.memory.append(self.process.memory_info().rss / 1024)
        self.descriptors.append(self.process.num_fds())

    def figures(self) -> dict[str, Any]:
        """The slope of memory after the warm-up, as the median of the slopes of all pairs (Theil and Sen), and the
        interval that holds it in 95 of 100 cases."""
        begin, last = int(len(self.minutes) * _WARM_UP), max(2, int(len(self.minutes) * _END))
        slope, low, high = _median_slope(self.memory[begin:], self.minutes[begin:])
        return {
            "kb_per_minute": round(slope, 2),
            "interval_95": [round(low, 2), round(high, 2)],
            "kb_per_minute_at_the_end": round(_median_slope(self.memory[-last:], self.minutes[-last:])[0], 2),
            "mb_at_the_start": round(self.memory[0] / 1024, 1),
            "mb_after_warm_up": round(self.memory[begin] / 1024, 1),
            "mb_at_the_end": round(self.memory[-1] / 1024, 1),
            "descriptors_after_warm_up": [min(self.descriptors[begin:]), max(self.descriptors[begin:])],
            "descriptors_idle": [self.descriptors[0], self.descriptors[-1]],
            "samples": len(self.minutes) - begin,
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
    """Asks for answers, many beside each other, until the time is over."""

    def __init__(
        self, world: World, gateway: psutil.Process, url: str, minutes: float, drafts: bool, seed: int
    ) -> None:
        self._world, self._url = world, url
        self._minutes, self._drafts = minutes, drafts
        self._begun = time.monotonic()
        self._coins = random.Random(seed)
        self._numbers = itertools.count()
        processes = {"target": psutil.Process(world.target.pid), "draft": psutil.Process(world.draft.pid)}
        processes |= {f"engine{number or ''}": one for number, one in enumerate(world.target.children())}
        self._watched = {name: Watched(one) for name, one in {**processes, "gateway": gateway}.items()}
        self.answered = self.left = self.drafted = self.accepted = self.compared = 0

    async def run(self) -> dict[str, Any]:
        starts = [supervisor.child.starts for supervisor in self._world.supervisors]
        self._begun = time.monotonic()
        self._sample()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._sample_on())
            asking = [group.create_task(self._ask_on(number % 4 == 0)) for number in range(_BESIDE)]
            await asyncio.wait(asking)
            watching.cancel()
        await asyncio.sleep(1.0)
        self._sample()
        assert starts == [supervisor.child.starts for supervisor in self._world.supervisors], "a service has died"
        return {
            "requests": self.answered,
            "left_early": self.left,
            "compared": self.compared,
            "minutes": round(self._passed, 1),
            "drafted": self.drafted,
            "accepted_share": round(self.accepted / max(1, self.drafted), 3),
            "processes": {name: watched.figures() for name, watched in self._watched.items()},
        }

    @property
    def _passed(self) -> float:
        return (time.monotonic() - self._begun) / 60

    def _sample(self) -> None:
        for watched in self._watched.values():
            watched.sample(self._passed)

    async def _sample_on(self) -> None:
        while True:
            await asyncio.sleep(60 * self._minutes / _SAMPLES)
            self._sample()

    async def _ask_on(self, by_http: bool) -> None:
        async with self._world.client() as client, httpx.AsyncClient(base_url=self._url, timeout=HUNG_SECONDS) as http:
            while self._passed < self._minutes:
                await (self._ask_by_http(http) if by_http else self._ask(client, next(self._numbers)))
                self.answered += 1

    def _prompt(self, most: int = 120) -> list[int]:
        return [self._coins.randrange(3, VOCABULARY) for _ in range(self._coins.randint(4, most))]

    async def _ask(self, client: Any, number: int) -> None:
        coins, taught_answers = self._coins, self._world.taught
        name, max_tokens = coins.choice(list(SAMPLINGS)), coins.randint(8, 24)
        known = None
        if self._drafts and number % _KNOWN_EVERY == 0:
            known = coins.randrange(len(taught_answers.prompts))
        token_ids = self._prompt() if known is None else taught_answers.prompts[known]
        sampling = replace(SAMPLINGS[name], max_tokens=max_tokens)
        if known is None:
            sampling = self._varied(sampling)
        speculation = None if self._drafts else Speculation(enabled=False)
        generation = client.generate(token_ids=token_ids, sampling=sampling, speculation=speculation, timeout=300)
        if known is None and coins.random() < 0.05:
            async with generation:
                await anext(aiter(generation))
            self.left += 1
            return
        result = await generation.result()
        if known is not None:
            assert list(result.token_ids) == taught_answers.answer(name, known, max_tokens), f"request {number}"
            self.compared += 1
        self.drafted += result.speculation.drafted_tokens
        self.accepted += result.speculation.accepted_tokens

    def _varied(self, sampling: SamplingParams) -> SamplingParams:
        """With what else a request may ask for, now and then."""
        coins = self._coins
        return replace(
            sampling,
            logprobs=5 if coins.random() < 0.2 else None,
            stop=("ab",) if coins.random() < 0.1 else (),
            logit_bias={5: 2.0} if coins.random() < 0.1 else {},
        )

    async def _ask_by_http(self, http: httpx.AsyncClient) -> None:
        coins = self._coins
        body: dict[str, Any] = {"prompt": self._prompt(), "max_tokens": coins.randint(4, 24)}
        if coins.random() < 0.3:
            body["prompt"] = "".join(map(chr, self._coins.choices(range(97, 123), k=30)))
        body |= {"outrider": {"speculation": self._drafts}, "stream": coins.random() < 0.5}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def gateway_process(target: str, log: Path) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A gateway before the target in a process of its own, and its URL."""
    command = ("-m", "outrider_gateway", "--listen", "127.0.0.1:0", "--target", target)
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=written)
    try:
        async with asyncio.timeout(HUNG_SECONDS):
            while b"serving http://" not in (said := log.read_bytes()):
                await asyncio.sleep(0.1)
        yield psutil.Process(process.pid), "http://" + said.split(b"serving http://")[1].split()[0].decode()
    finally:
        process.kill()
        await process.wait()


async def soak(taught_model: Taught, folder: Path, minutes: float, *, drafts: bool, seed: int = 1) -> dict[str, Any]:
    """Requests for so many minutes to services of their own."""
    soaked = folder / ("drafted" if drafts else "plain")
    flags = _UNLIMITED if drafts else (*_UNLIMITED, "--dtype", "bfloat16")
    async with (
        world_of(taught_model, soaked, "trie", "own", target_flags=flags, draft_flags=_TRIES) as world,
        gateway_process(f"unix:{soaked}/target.sock", soaked / "gateway.log") as (gateway, url),
    ):
        return await Soak(world, gateway, url, minutes, drafts=drafts, seed=seed).run()


def leaks(figures: dict[str, Any]) -> list[str]:
    """What of a soak's figures shows a leak."""
    found = []
    for name, of in figures["processes"].items():
        least = min(of["kb_per_minute"], of["kb_per_minute_at_the_end"])
        if least > MOST_KB_PER_MINUTE and of["interval_95"][0] > 0:
            found.append(f"{name} keeps {of['kb_per_minute']} KB a minute")
        before, after = of["descriptors_idle"]
        if after > before + _CONNECTIONS:
            found.append(f"{name} holds {after} descriptors after {before}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--drafts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--folder", type=Path, help="where to keep models and logs; a passing one without it")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as passing:
        folder = chosen.folder or Path(passing)
        told = asyncio.run(soak(taught(folder), folder, chosen.minutes, drafts=chosen.drafts, seed=chosen.seed))
    write(chosen.json, "chaos.soak", told)
    say(json.dumps(told, indent=1))
    for leak in leaks(told):
        say(leak)
    return 1 if leaks(told) else 0


if __name__ == "__main__":
    sys.exit(main())
