"""Where the host is the limit, the level that makes most tokens a second is found, whatever single passes take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from target_service.speculation.policy.throughput_trial import SpeculationLevel, ThroughputTrial

LOAD = 64
# What the host works of the time, where it is the limit and where it is not.
LIMIT, NO_LIMIT = 0.95, 0.4


@dataclass
class Engine:
    """Launches that make tokens at a rate by their level, some of them beside prompts, which take three times as
    long."""

    rates: dict[SpeculationLevel, float]
    busy: float = LIMIT
    most: SpeculationLevel = SpeculationLevel.DRAFT
    seed: int = 0
    throughput_trial: ThroughputTrial = field(default_factory=ThroughputTrial)
    tokens: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def run(self, launches: int, load: int = LOAD) -> list[SpeculationLevel]:
        """The levels of so many launches."""
        levels = []
        for _ in range(launches):
            level = min(self.throughput_trial.allowed(load), self.most)
            tokens = self._dice.randrange(load // 2, 2 * load)
            seconds = tokens / self.rates[level] * self._dice.choice((0.6, 0.6, 1.8))
            self.throughput_trial.observe_launch(
                load, self.most, tokens, seconds, (1 - self.busy) * seconds, drafted=level is not SpeculationLevel.NONE
            )
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
            levels.append(level)
        return levels


def rates(plain: float, own: float, draft: float) -> dict[SpeculationLevel, float]:
    return {SpeculationLevel.NONE: plain, SpeculationLevel.LOOKUP_ONLY: own, SpeculationLevel.DRAFT: draft}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("each", "best"),
    [
        (rates(50e3, 35e3, 30e3), SpeculationLevel.NONE),
        (rates(40e3, 50e3, 30e3), SpeculationLevel.LOOKUP_ONLY),
        (rates(40e3, 45e3, 60e3), SpeculationLevel.DRAFT),
    ],
)
def test_the_fastest_is_found_within_two_trials(
    each: dict[SpeculationLevel, float], best: SpeculationLevel, seed: int
) -> None:
    engine = Engine(each, seed=seed)
    engine.run(64 + 3 * 72 + 512 + 3 * 72)
    assert engine.throughput_trial.allowed(LOAD) is best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("each", [rates(50e3, 35e3, 25e3), rates(25e3, 35e3, 50e3), rates(40e3, 50e3, 25e3)])
def test_trials_cost_little(each: dict[SpeculationLevel, float], seed: int) -> None:
    """Of the tokens of some minutes."""
    engine = Engine(each, seed=seed)
    engine.run(3000)
    engine.tokens = engine.seconds = 0.0
    engine.run(100_000)
    assert engine.tokens / engine.seconds > 0.985 * max(each.values())


@pytest.mark.parametrize("seed", range(3))
def test_what_has_become_faster_is_noticed(seed: int) -> None:
    engine = Engine(rates(50e3, 30e3, 20e3), seed=seed)
    engine.run(20_000)
    assert engine.throughput_trial.allowed(LOAD) is SpeculationLevel.NONE
    engine.rates = rates(50e3, 60e3, 120e3)
    engine.run(8192 + 2 * (512 + 3 * 72))
    levels = engine.run(1000)
    assert levels.count(SpeculationLevel.DRAFT) > 600


def test_nothing_is_tried_where_the_device_is_the_limit() -> None:
    """Not even where plain passes would be faster: their times tell that."""
    engine = Engine(rates(50e3, 30e3, 20e3), busy=NO_LIMIT)
    assert set(engine.run(3000)) == {SpeculationLevel.DRAFT}


def test_races_end_with_the_limit() -> None:
    engine = Engine(rates(50e3, 30e3, 20e3))
    engine.run(20_000)
    assert engine.throughput_trial.allowed(LOAD) is SpeculationLevel.NONE
    engine.busy = NO_LIMIT
    engine.run(8192 + 3 * 72)
    assert set(engine.run(3000)) == {SpeculationLevel.DRAFT}


def test_a_load_says_nothing_of_another() -> None:
    engine = Engine(rates(50e3, 30e3, 20e3))
    engine.run(2000)
    assert engine.throughput_trial.allowed(LOAD) is not SpeculationLevel.DRAFT
    assert engine.throughput_trial.allowed(4) is SpeculationLevel.DRAFT


def test_another_draft_is_tried_at_once() -> None:
    engine = Engine(rates(50e3, 30e3, 20e3))
    engine.run(2000)
    engine.throughput_trial.forget()
    assert engine.throughput_trial.allowed(LOAD) is SpeculationLevel.DRAFT


@pytest.mark.parametrize("most", [SpeculationLevel.NONE, SpeculationLevel.LOOKUP_ONLY])
def test_only_what_there_is_is_tried(most: SpeculationLevel) -> None:
    """Without a draft its level is none, and without lookup there is nothing to compare."""
    engine = Engine(rates(50e3, 30e3, 20e3), most=most)
    levels = engine.run(3000)
    assert SpeculationLevel.DRAFT not in levels
    assert engine.throughput_trial.allowed(LOAD) is (
        SpeculationLevel.NONE if most is SpeculationLevel.LOOKUP_ONLY else SpeculationLevel.DRAFT
    )


def test_a_launch_without_a_time_is_no_observation() -> None:
    trial = ThroughputTrial()
    for _ in range(200):
        trial.observe_launch(LOAD, SpeculationLevel.DRAFT, 0, 0.0, 0.0, drafted=True)
    assert trial.allowed(LOAD) is SpeculationLevel.DRAFT
