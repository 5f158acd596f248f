"""Random fault runs: `python -m chaos.runs --count 1000`, or `--seed N` for one of them again.

A run is made of its seed alone: which drafter, where the engine is, how tokens are chosen, what is asked when, and what
goes wrong when. Every answer must be the plain loop's, whatever went wrong, and afterwards the services must be whole
again by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chaos.faults import ENDING, FAULTS, Fault, draw
from chaos.report import say, write
from chaos.taught import MAX_TOKENS, SAMPLINGS, Taught, taught
from chaos.world import DRAFTERS, Supervisor, World, world_of

from outrider.errors import DeadlineExceeded, Draining, EngineDead, Loading, OutriderError, QuotaExceeded
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable
from outrider_client.results import Result

# One in so many runs has an engine in a process of its own, which takes seconds to start again.
_OWN_IN = 6
# Of one attempt, and of a request with all of its attempts; of coming back. Chosen: longer than a half-open connection
# stays unnoticed, than a draft at fault is left alone after a second fault (4 s), and than an engine of its own needs
# to start on a machine that is busy with twenty others.
_ATTEMPT_SECONDS, _REQUEST_SECONDS, RECOVERY_SECONDS = 20.0, 600.0, 600.0
# What a caller may be told while services come and go, after which it asks again.
_PASSING = (ServiceUnreachable, Draining, EngineDead, Loading, DeadlineExceeded, QuotaExceeded)


@dataclass(frozen=True)
class Plan:
    """All that a seed decides."""

    seed: int
    drafter: str
    placement: str
    sampling: str
    # (seconds after the start, prompt, tokens)
    requests: tuple[tuple[float, int, int], ...]
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int, prompts: int) -> Plan:
        coins = random.Random(seed)
        drafter = DRAFTERS[seed % 3]
        requests = tuple(
            (round(coins.uniform(0, 0.4), 3), coins.randrange(prompts), coins.randint(40, MAX_TOKENS))
            for _ in range(coins.randint(3, 6))
        )
        return cls(
            seed,
            drafter,
            "own" if (seed // 9) % _OWN_IN == _OWN_IN - 1 else "shared",
            list(SAMPLINGS)[seed // 3 % 3],
            requests,
            tuple(sorted((draw(coins, drafter) for _ in range(coins.randint(1, 3))), key=lambda fault: fault.after)),
        )


@dataclass
class Outcome:
    """What came of a run. `problems` is empty where all held."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    retries: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    recovery_seconds: float = 0.0
    seconds: float = 0.0


def unexplained_ends(supervisors: Sequence[Supervisor], before: Sequence[int], kinds: Set[str]) -> list[str]:
    """Services that ended though no fault of `kinds` ends them: they were started again, and nobody would have noticed.

    `before` is how often each had ended when the run began.
    """
    return [
        f"{supervisor.child.module} ended by itself: {supervisor.statuses[known:]}"
        for supervisor, known, ending in zip(supervisors, before, ENDING, strict=True)
        if supervisor.statuses[known:] and not kinds & ending
    ]


class Runner:
    """Runs plans in one world, one after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Of the plan before: a service that it had drain may end in the next one.
        self._kinds: set[str] = set()

    async def run(self, plan: Plan) -> Outcome:
        outcome, begun = Outcome(plan), time.monotonic()
        ends = [len(supervisor.statuses) for supervisor in self._world.supervisors]
        async with self._world.client() as client:
            asking = [self._ask(client, plan, outcome, *request) for request in plan.requests]
            await asyncio.gather(*asking, self._befall_all(plan, outcome))
        async with self._world.client() as client:
            await self._ask(client, plan, outcome, 0.0, 0, MAX_TOKENS)
        kinds = {fault.kind for fault in plan.faults}
        outcome.problems += unexplained_ends(self._world.supervisors, ends, kinds | self._kinds)
        self._kinds = kinds
        outcome.seconds = time.monotonic() - begun
        return outcome

    async def warm_up(self, samplings: Iterable[str]) -> None:
        """Let the trie see every answer of these once."""
        async with self._world.client() as client:
            for name in samplings:
                sampling = replace(SAMPLINGS[name], max_tokens=MAX_TOKENS)
                prompts = self._world.taught.prompts
                await asyncio.gather(*(client.generate(token_ids=one, sampling=sampling).result() for one in prompts))

    async def _befall_all(self, plan: Plan, outcome: Outcome) -> None:
        """All faults, and then the time that the services take until they are whole, by themselves."""
        await asyncio.gather(*(self._befall(fault) for fault in plan.faults))
        self._world.heal()
        try:
            outcome.recovery_seconds = await self._world.whole(RECOVERY_SECONDS)
        except TimeoutError:
            outcome.problems.append(f"the services were not whole again within {RECOVERY_SECONDS:g} s")

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after)
        await FAULTS[fault.kind](self._world, fault)

    async def _ask(
        self, client: Client, plan: Plan, outcome: Outcome, after: float, prompt: int, max_tokens: int
    ) -> None:
        """One request until it is answered in full, again after what passes."""
        await asyncio.sleep(after)
        expected = self._world.taught.answer(plan.sampling, prompt, max_tokens)
        end = time.monotonic() + _REQUEST_SECONDS
        while True:
            said: list[int] = []
            try:
                result = await self._attempt(client, plan, prompt, max_tokens, said)
            except _PASSING as error:
                if time.monotonic() > end:
                    outcome.problems.append(f"no answer in {_REQUEST_SECONDS:g} s: {error!r}")
                    return
                outcome.retries += 1
                if said != expected[: len(said)]:
                    outcome.problems.append(f"prompt {prompt}: {said} and then {error!r}, not {expected}")
                    return
                await asyncio.sleep(0.05)
                continue
            except OutriderError as error:
                outcome.problems.append(f"{type(error).__name__}, {error.code.name}: {error.message}")
                return
            if said != expected:
                outcome.problems.append(f"prompt {prompt}: {said}, not {expected}")
            outcome.tokens += len(said)
            outcome.drafted += result.speculation.drafted_tokens
            outcome.accepted += result.speculation.accepted_tokens
            return

    async def _attempt(self, client: Client, plan: Plan, prompt: int, max_tokens: int, said: list[int]) -> Result:
        token_ids = self._world.taught.prompts[prompt]
        sampling = replace(SAMPLINGS[plan.sampling], max_tokens=max_tokens)
        async with client.generate(token_ids=token_ids, sampling=sampling, timeout=_ATTEMPT_SECONDS) as generation:
            async for chunk in generation:
                said += chunk.token_ids
            return await generation.result()


async def _lane(seeds: Sequence[int], taught_folder: Taught, folder: Path, name: str) -> list[Outcome]:
    """All runs of one arrangement, in one world."""
    plans, outcomes = [Plan.of(seed, len(taught_folder.prompts)) for seed in seeds], []
    async with world_of(taught_folder, folder / name, plans[0].drafter, plans[0].placement) as world:
        runner = Runner(world)
        await runner.warm_up(dict.fromkeys(plan.sampling for plan in plans))
        for plan in plans:
            seed = plan.seed
            say(f"seed {seed}: {name}, {plan.sampling}, {', '.join(fault.kind for fault in plan.faults)}")
            outcome = await runner.run(plan)
            for problem in outcome.problems:
                say(f"seed {seed} FAILED: {problem}\n  again: python -m chaos.runs --seed {seed}")
            outcomes.append(outcome)
    return outcomes


async def run_seeds(seeds: Iterable[int], found: Taught, folder: Path, lanes_each: int = 1) -> list[Outcome]:
    """Run them all: arrangements beside each other, each split over `lanes_each` worlds."""
    lanes: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    for seed in seeds:
        plan = Plan.of(seed, len(found.prompts))
        place = f"{plan.drafter}-{plan.placement}"
        lane = counts[place] % (lanes_each if plan.placement == "shared" else 1)
        counts[place] += 1
        lanes.setdefault(f"{place}-{lane}", []).append(seed)
    done = await asyncio.gather(*(_lane(each, found, folder, name) for name, each in lanes.items()))
    return sorted((outcome for lane in done for outcome in lane), key=lambda outcome: outcome.plan.seed)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of many runs, by what was varied."""

    def figures(some: Sequence[Outcome]) -> dict[str, Any]:
        drafted = sum(outcome.drafted for outcome in some)
        recoveries = sorted(outcome.recovery_seconds for outcome in some)
        return {
            "runs": len(some),
            "failed": sum(bool(outcome.problems) for outcome in some),
            "seconds_each": round(sum(outcome.seconds for outcome in some) / len(some), 2),
            "requests": sum(len(outcome.plan.requests) + 1 for outcome in some),
            "tokens": sum(outcome.tokens for outcome in some),
            "asked_again": sum(outcome.retries for outcome in some),
            "drafted": drafted,
            "accepted_share": round(sum(outcome.accepted for outcome in some) / max(1, drafted), 3),
            "recovery_seconds": {
                "median": round(recoveries[len(recoveries) // 2], 2),
                "p99": round(recoveries[int(0.99 * (len(recoveries) - 1))], 2),
                "most": round(recoveries[-1], 2),
            },
        }

    groups: dict[str, dict[str, list[Outcome]]] = {"cell": {}, "placement": {}, "fault": {}}
    for outcome in outcomes:
        plan = outcome.plan
        groups["cell"].setdefault(f"{plan.drafter}, {plan.sampling}", []).append(outcome)
        groups["placement"].setdefault(plan.placement, []).append(outcome)
        for kind in {fault.kind for fault in plan.faults}:
            groups["fault"].setdefault(kind, []).append(outcome)
    by = {name: {key: figures(some) for key, some in sorted(group.items())} for name, group in groups.items()}
    failed = [{**asdict(o.plan), "problems": o.problems} for o in outcomes if o.problems]
    return {"all": figures(outcomes), **{f"by_{name}": group for name, group in by.items()}, "failed_runs": failed}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.runs", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--count", type=int, default=1000, help="how many")
    parser.add_argument("--lanes", type=int, default=2, help="worlds of each arrangement that run beside each other")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--folder", type=Path, help="where to keep models and logs; a passing one without it")
    chosen = parser.parse_args(arguments)
    seeds = [chosen.seed] if chosen.seed is not None else range(chosen.first, chosen.first + chosen.count)
    begun = time.monotonic()
    with TemporaryDirectory() as passing:
        folder = chosen.folder or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(run_seeds(seeds, taught(folder), folder, chosen.lanes))
    told = {"seeds": [seeds[0], seeds[-1]], "seconds": round(time.monotonic() - begun), **summary(outcomes)}
    write(chosen.json, "chaos.runs", told)
    say(json.dumps(told["all"], indent=1))
    return 1 if told["failed_runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
