"""A tuning run: measures candidates against the settings in force, as long as the time allows, and chooses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby, zip_longest
from pathlib import Path
from time import monotonic

from outrider.settings import SettingsError
from outrider_client.bench.backends import Backend
from outrider_client.bench.prompts import BenchPrompt, load_prompts
from outrider_client.bench.report import ALL_TASKS, cells
from outrider_client.bench.runner import Plan, Runner
from outrider_client.bench.samples import PLAIN, BenchMode, Block
from outrider_client.bench.session import Note
from outrider_client.local.stack import ServiceFailed, private_stack
from outrider_client.results import TargetInfo
from outrider_client.tuning.budget import (
    Costs,
    final_seconds,
    measurable,
    next_share,
    seconds_for_all,
)
from outrider_client.tuning.candidates import Candidate
from outrider_client.tuning.estimates import Estimate, better, estimate, most_promising, over_loads
from outrider_client.tuning.services import Setup, Side

# What takes turns, and a block of each.
_Way = tuple[BenchMode, Backend]
_Pair = tuple[Block, Block]
_IN_FORCE = BenchMode(Candidate().label)
NO_TIME = "for lack of time"


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One configuration at one load, against a base in turn with it. `tokens_per_step` is None without output."""

    ratio: Estimate
    tokens_per_second: float
    tokens_per_step: float | None
    base_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate against the settings in force, by load."""

    label: str
    by_load: Mapping[int, LoadFigures]

    @property
    def ratio(self) -> Estimate:
        """Over all loads."""
        return over_loads([figures.ratio for figures in self.by_load.values()])


@dataclass(frozen=True, slots=True)
class Tuning:
    """Results. `speculation` is the settings in force against plain decoding; `final` is the best candidate, if one
    was faster at all, measured once more where there were several; `left_out` has the others with reasons."""

    info: TargetInfo
    speculation: Measured
    measured: tuple[tuple[Candidate, Measured], ...]
    final: tuple[Candidate, Measured] | None
    left_out: tuple[tuple[Candidate, str], ...]
    # An estimate of the time that measuring every candidate takes.
    minutes_for_all: float

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that is faster beyond the noise, if any."""
        return self.final[0] if self.final is not None and better(self.final[1].ratio) else None


def read_prompts(path: str) -> list[BenchPrompt]:
    """Prompts of a file, or the packaged ones, alternating between tasks. Raises `SettingsError`."""
    source = Path(path) if path else Path(str(files("outrider_client.tuning") / "prompts.jsonl"))
    tasks = [list(group) for _, group in groupby(load_prompts(source), key=lambda prompt: prompt.task)]
    # All under one task, since a block holds prompts of one task.
    return [replace(prompt, task=ALL_TASKS) for row in zip_longest(*tasks) for prompt in row if prompt is not None]


@dataclass(frozen=True)
class Comparison:
    """Runs two configurations in turn on the same prompts, block by block, at each load."""

    _prompts: Sequence[BenchPrompt]
    _loads: Sequence[int]
    _max_tokens: int

    async def measure(self, first: _Way, second: _Way, until: float, start: int = 0) -> tuple[Measured, float]:
        """Measure first against second until the time `until` of `monotonic`, for at least one round over the loads.
        `start` is the index of the first prompt. Returns the figures and the seconds of a round. Raises `SettingsError`
        where a block gets no answers."""
        # Both, so that neither has colder caches.
        for _, backend in (second, first):
            await backend.answer((("user", "Count from one to ten."),), 24, "warm")
        begun, rounds = monotonic(), 0
        pairs: dict[int, list[_Pair]] = {load: [] for load in self._loads}
        # A new tenant, so that no trie holds these prompts.
        run_id = secrets.token_hex(4)
        while True:
            for load in self._loads:
                pairs[load].append(await self._pair(first, second, load, rounds, start, run_id))
            rounds += 1
            seconds = (monotonic() - begun) / rounds
            if monotonic() + seconds / 2 > until:
                return Measured(first[0].name, {load: _figures(found) for load, found in pairs.items()}), seconds

    async def _pair(self, first: _Way, second: _Way, load: int, number: int, start: int, run_id: str) -> _Pair:
        count = 1 if load == 1 else max(load, min(2 * load, len(self._prompts)))
        at = start + number * count
        plan = Plan(
            prompts=[self._prompts[(at + place) % len(self._prompts)] for place in range(count)],
            modes=(first[0], second[0]) if number % 2 else (second[0], first[0]),
            concurrency=(load,),
            max_tokens=self._max_tokens,
            # A new tenant each time the prompts repeat, for the same reason.
            run_id=f"{run_id}-{(number * count) // len(self._prompts)}",
        )
        found = {block.mode: block for block in await Runner(plan, dict((first, second)), lambda _: None).measure_all()}
        for block in found.values():
            if not block.tokens:
                raise SettingsError(f"the target gives no answers: {block.requests[0].refusal or 'they are empty'}")
        return found[first[0]], found[second[0]]


def _figures(pairs: Sequence[_Pair]) -> LoadFigures:
    own, base = ([pair[place] for pair in pairs] for place in (0, 1))
    cell = cells(own, [own[0].mode])[0]
    ratio = estimate([(one.tokens / one.seconds, other.tokens / other.seconds) for one, other in pairs])
    rate = cells(base, [base[0].mode])[0]["tokens_per_second"]
    return LoadFigures(ratio, cell["tokens_per_second"], cell["mean_accepted_length"], rate)


class _Tuner:
    def __init__(self, setup: Setup, comparison: Comparison, sides: tuple[Side, Side], offset: int, note: Note) -> None:
        self._setup = setup
        self._comparison = comparison
        self._base, self._challenger = sides
        self._offset = offset
        self._note = note
        self._left_out: list[tuple[Candidate, str]] = []
        self._measured: list[tuple[Candidate, Measured]] = []

    async def tune(self) -> Tuning:
        begun, seconds = monotonic(), 60.0 * self._setup.options.minutes
        until = begun + seconds
        # On a GPU one after the other, since each takes a share of the free memory. On a CPU together, so that other
        # load affects both alike while they time their own steps.
        sides = (self._base,) if self._setup.gpu else (self._base, self._challenger)
        self._note("starting targets and drafts")
        await asyncio.gather(*(side.start() for side in sides))
        started = monotonic() - begun
        self._note("measuring the settings in force against plain decoding")
        in_force, plain = self._base.backend(Candidate()), self._base.backend(Candidate(), speculate=False)
        # This share of the whole time decides nothing. Chosen.
        end = monotonic() + 0.15 * seconds
        speculation, pair = await self._comparison.measure((_IN_FORCE, in_force), (BenchMode(PLAIN), plain), end)
        info = await in_force.client().info()
        # Estimates, until a draft has been changed.
        spent, costs = monotonic() - begun, Costs(change=self._base.draft_seconds, pair=pair)
        ahead = started if self._setup.gpu else 0.0
        bound = info.max_rows - 1
        above = [one for one in self._setup.candidates if one.max_nodes is not None and one.max_nodes > bound]
        self._left_out += [(one, f"the target's own max_draft_nodes is {bound}") for one in above]
        waiting = [one for one in self._setup.candidates if one not in above]
        needed = seconds_for_all(spent + ahead, len(waiting), costs)
        if self._setup.gpu:
            waiting, costs = await self._with_a_challenger(waiting, until, ahead, costs)
        final = await self._screen_and_confirm(waiting, until, costs)
        return Tuning(info, speculation, tuple(self._measured), final, tuple(self._left_out), needed / 60.0)

    async def _with_a_challenger(
        self, waiting: list[Candidate], until: float, ahead: float, costs: Costs
    ) -> tuple[list[Candidate], Costs]:
        """Choose between a second target, which takes `ahead` seconds to start, and the first alone, which can only
        measure other `max_nodes`, without changing its draft: whichever measures more. Returns the candidates it can
        measure and their costs."""
        left = until - monotonic()
        bounds, unchanged = [one for one in waiting if not one.draft], replace(costs, change=0.0)
        alone = measurable(left, len(bounds), unchanged)
        if len(bounds) < len(waiting) and measurable(left - ahead, len(waiting), costs) >= max(1, alone):
            self._note("starting a second target and draft, for candidates")
            await self._challenger.start()
            return waiting, costs
        self._challenger = self._base
        self._left_out += [(candidate, NO_TIME) for candidate in waiting if candidate.draft]
        return bounds, unchanged

    async def _screen_and_confirm(
        self, waiting: list[Candidate], until: float, costs: Costs
    ) -> tuple[Candidate, Measured] | None:
        begun_left = until - monotonic()
        while waiting:
            left, kept = until - monotonic(), final_seconds(begun_left, costs)
            share = next_share(left, kept, len(waiting), not self._measured, costs)
            if not share:
                break
            candidate, begun = waiting.pop(0), monotonic()
            self._note(f"measuring {candidate.label}, {len(waiting)} more wait")
            costs = await self._measure(candidate, begun + share, costs)
        self._left_out += [(candidate, NO_TIME) for candidate in waiting]
        place = most_promising([measured.ratio for _, measured in self._measured])
        if place is None:
            return None
        if len(self._measured) == 1 and until - monotonic() < costs.least:
            return self._measured[0]
        best = self._measured[place][0]
        self._note(f"measuring the best once more: {best.label}")
        await self._challenger.apply(best)
        return best, (await self._against(best, until, self._offset))[0]

    async def _measure(self, candidate: Candidate, until: float, costs: Costs) -> Costs:
        """Measure a candidate, or note why not. Returns the costs as measured now."""
        begun = monotonic()
        try:
            await self._challenger.apply(candidate)
        except ServiceFailed as error:
            self._left_out.append((candidate, error.tail[-1] if error.tail else str(error)))
            return costs
        change = monotonic() - begun
        measured, pair = await self._against(candidate, until, 0)
        self._measured.append((candidate, measured))
        return Costs(max(costs.change if self._measured[1:] else 0.0, change), pair)

    async def _against(self, candidate: Candidate, until: float, start: int) -> tuple[Measured, float]:
        own, in_force = self._challenger.backend(candidate), self._base.backend(Candidate())
        return await self._comparison.measure((BenchMode(candidate.label), own), (_IN_FORCE, in_force), until, start)


async def tune(setup: Setup, loads: Sequence[int], prompts: Sequence[BenchPrompt], note: Note) -> Tuning:
    """Measure candidates in the time of the options. Raises `SettingsError`, `ServiceFailed`, or what a call raises."""
    comparison = Comparison(prompts, loads, setup.options.max_tokens)
    async with AsyncExitStack() as leave:
        stack = await leave.enter_async_context(private_stack())
        sides = Side("base", setup, stack, leave), Side("other", setup, stack, leave)
        # The second measurement starts at prompts that the first may not have reached.
        return await _Tuner(setup, comparison, sides, len(prompts) // 2, note).tune()
