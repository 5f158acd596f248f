"""Where the host is the limit, it is found whether drafted rows make more a second, whatever single passes take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from target_service.speculation.policy.throughput_trial import ThroughputTrial

LOAD = 64
# What the host works of the time, where it is the limit and where it is not.
LIMIT, NO_LIMIT = 0.95, 0.4


@dataclass
class Engine:
    """Launches that make tokens at a rate, plain ones and those with drafted rows, some of them beside prompts, which
    take three times as long."""

    plain: float
    drafted: float
    busy: float = LIMIT
    seed: int = 0
    throughput_trial: ThroughputTrial = field(default_factory=ThroughputTrial)
    tokens: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def run(self, launches: int, load: int = LOAD) -> list[bool]:
        """Which of so many launches had drafted rows."""
        chosen = []
        for _ in range(launches):
            drafted = self.throughput_trial.allows_rows(load)
            tokens = self._dice.randrange(load // 2, 2 * load)
            seconds = tokens / (self.drafted if drafted else self.plain) * self._dice.choice((0.6, 0.6, 1.8))
            self.throughput_trial.observe_launch(load, tokens, seconds, (1 - self.busy) * seconds, drafted=drafted)
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
            chosen.append(drafted)
        return chosen


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("plain", "drafted"), [(50e3, 30e3), (50e3, 40e3), (40e3, 50e3), (40e3, 60e3)])
def test_the_faster_is_found_within_two_trials(plain: float, drafted: float, seed: int) -> None:
    engine = Engine(plain, drafted, seed=seed)
    engine.run(64 + 2 * 72 + 512 + 2 * 72)
    assert engine.throughput_trial.allows_rows(LOAD) is (drafted > plain)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("plain", "drafted"), [(50e3, 25e3), (25e3, 50e3), (50e3, 40e3), (40e3, 50e3)])
def test_trials_cost_little(plain: float, drafted: float, seed: int) -> None:
    """Of the tokens of some minutes."""
    engine = Engine(plain, drafted, seed=seed)
    engine.run(3000)
    engine.tokens = engine.seconds = 0.0
    engine.run(100_000)
    assert engine.tokens / engine.seconds > 0.985 * max(plain, drafted)


@pytest.mark.parametrize("seed", range(3))
def test_what_has_become_faster_is_noticed(seed: int) -> None:
    engine = Engine(50e3, 20e3, seed=seed)
    engine.run(20_000)
    assert not engine.throughput_trial.allows_rows(LOAD)
    engine.drafted = 120e3
    engine.run(8192 + 2 * (512 + 2 * 72))
    assert engine.run(1000).count(True) > 600


def test_nothing_is_tried_where_the_device_is_the_limit() -> None:
    """Not even where plain passes would be faster: their times tell that."""
    assert all(Engine(50e3, 20e3, busy=NO_LIMIT).run(3000))


def test_trials_end_with_the_limit() -> None:
    engine = Engine(50e3, 20e3)
    engine.run(20_000)
    assert not engine.throughput_trial.allows_rows(LOAD)
    engine.busy = NO_LIMIT
    engine.run(8192 + 2 * 72)
    assert all(engine.run(3000))


def test_a_load_says_nothing_of_another() -> None:
    engine = Engine(50e3, 20e3)
    engine.run(2000)
    assert not engine.throughput_trial.allows_rows(LOAD)
    assert engine.throughput_trial.allows_rows(4)


def test_another_draft_is_tried_at_once() -> None:
    engine = Engine(50e3, 20e3)
    engine.run(2000)
    engine.throughput_trial.forget()
    assert engine.throughput_trial.allows_rows(LOAD)


def test_nothing_is_tried_where_nothing_is_drafted() -> None:
    trial = ThroughputTrial()
    for _ in range(200):
        trial.observe_launch(LOAD, 64, 1e-3, 0.0, drafted=False)
    assert trial.allows_rows(LOAD)


def test_a_launch_without_a_time_is_no_observation() -> None:
    trial = ThroughputTrial()
    for _ in range(200):
        trial.observe_launch(LOAD, 0, 0.0, 0.0, drafted=True)
    assert trial.allows_rows(LOAD)
