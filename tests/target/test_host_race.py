"""Where the host is the limit, the way that makes most tokens a second is found, whatever single passes take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from target_service.speculation.policy.host_race import HostRace, Way

LOAD = 64
# What the host works of the time, where it is the limit and where it is not.
LIMIT, NO_LIMIT = 0.95, 0.4


@dataclass
class Engine:
    """Launches that make tokens at a rate by their way, some of them beside prompts, which take three times as long."""

    rates: dict[Way, float]
    busy: float = LIMIT
    most: Way = Way.DRAFT
    seed: int = 0
    race: HostRace = field(default_factory=HostRace)
    tokens: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def run(self, launches: int, load: int = LOAD) -> list[Way]:
        """The ways of so many launches."""
        ways = []
        for _ in range(launches):
            way = min(self.race.way(load), self.most)
            tokens = self._dice.randrange(load // 2, 2 * load)
            seconds = tokens / self.rates[way] * self._dice.choice((0.6, 0.6, 1.8))
            self.race.observe(load, self.most, tokens, seconds, (1 - self.busy) * seconds, drafted=way is not Way.PLAIN)
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
            ways.append(way)
        return ways


def rates(plain: float, own: float, draft: float) -> dict[Way, float]:
    return {Way.PLAIN: plain, Way.OWN: own, Way.DRAFT: draft}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("each", "best"),
    [
        (rates(50e3, 35e3, 30e3), Way.PLAIN),
        (rates(40e3, 50e3, 30e3), Way.OWN),
        (rates(40e3, 45e3, 60e3), Way.DRAFT),
    ],
)
def test_the_fastest_is_found_within_two_races(each: dict[Way, float], best: Way, seed: int) -> None:
    engine = Engine(each, seed=seed)
    engine.run(64 + 3 * 72 + 512 + 3 * 72)
    assert engine.race.way(LOAD) is best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("each", [rates(50e3, 35e3, 25e3), rates(25e3, 35e3, 50e3), rates(40e3, 50e3, 25e3)])
def test_races_cost_little(each: dict[Way, float], seed: int) -> None:
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
    assert engine.race.way(LOAD) is Way.PLAIN
    engine.rates = rates(50e3, 60e3, 120e3)
    engine.run(8192 + 2 * (512 + 3 * 72))
    ways = engine.run(1000)
    assert ways.count(Way.DRAFT) > 600


def test_nothing_is_raced_where_the_device_is_the_limit() -> None:
    """Not even where plain passes would be faster: their times tell that."""
    engine = Engine(rates(50e3, 30e3, 20e3), busy=NO_LIMIT)
    assert set(engine.run(3000)) == {Way.DRAFT}


def test_races_end_with_the_limit() -> None:
    engine = Engine(rates(50e3, 30e3, 20e3))
    engine.run(20_000)
    assert engine.race.way(LOAD) is Way.PLAIN
    engine.busy = NO_LIMIT
    engine.run(8192 + 3 * 72)
    assert set(engine.run(3000)) == {Way.DRAFT}


def test_a_load_says_nothing_of_another() -> None:
    engine = Engine(rates(50e3, 30e3, 20e3))
    engine.run(2000)
    assert engine.race.way(LOAD) is not Way.DRAFT
    assert engine.race.way(4) is Way.DRAFT


def test_another_draft_is_tried_at_once() -> None:
    engine = Engine(rates(50e3, 30e3, 20e3))
    engine.run(2000)
    engine.race.forget()
    assert engine.race.way(LOAD) is Way.DRAFT


@pytest.mark.parametrize("most", [Way.PLAIN, Way.OWN])
def test_only_what_there_is_is_raced(most: Way) -> None:
    """Without a draft its way is none, and without lookup there is nothing to race."""
    engine = Engine(rates(50e3, 30e3, 20e3), most=most)
    ways = engine.run(3000)
    assert Way.DRAFT not in ways
    assert engine.race.way(LOAD) is (Way.PLAIN if most is Way.OWN else Way.DRAFT)


def test_a_launch_without_a_time_is_no_observation() -> None:
    race = HostRace()
    for _ in range(200):
        race.observe(LOAD, Way.DRAFT, 0, 0.0, 0.0, drafted=True)
    assert race.way(LOAD) is Way.DRAFT
