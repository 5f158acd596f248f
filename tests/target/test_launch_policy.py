"""How a pass is launched: found out by load, and found out anew as it changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.launch_policy import LaunchPolicy

pytestmark = pytest.mark.values

RUN_AHEAD, WAIT = LaunchMode.RUN_AHEAD, LaunchMode.WAIT_FOR_DRAFT
ONE_PASS, ANSWER, LAUNCH = 6e-3, 0.7e-3, 0.3e-3
# Passes of each way before either is chosen.
TRIAL = 32


@dataclass
class Engine:
    """Passes that make so many tokens, by the way that they are launched; they vary by `noise` of their mean."""

    tokens: dict[LaunchMode, float]
    noise: float = 0.3
    seed: int = 0
    load: int = 8
    modes: LaunchPolicy = field(default_factory=LaunchPolicy)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def run(self, passes: int) -> list[LaunchMode]:
        modes_chosen = []
        for _ in range(passes):
            way = self.modes.choose(self.load, ANSWER, LAUNCH, ONE_PASS)
            shape = 1 / self.noise**2
            tokens = self._dice.gammavariate(shape, self.tokens[way] / shape)
            seconds = ONE_PASS + (ANSWER if way is WAIT else 0.0)
            self.modes.observe_pass(self.load, way, tokens, seconds * self._dice.lognormvariate(0, 0.02))
            modes_chosen.append(way)
        return modes_chosen


# Tokens of the two modes_chosen where a pass takes 6 ms and with an answer 6.7: those of the first make more a second,
# then the other's.
BETTER = {RUN_AHEAD: {RUN_AHEAD: 3.0, WAIT: 2.5}, WAIT: {RUN_AHEAD: 3.0, WAIT: 4.4}}


def steady_from(modes_chosen: list[LaunchMode], better: LaunchMode, passes: int = 60) -> int:
    """The first pass from which on so many were launched in the better way."""
    return next(at for at in range(len(modes_chosen) - passes) if set(modes_chosen[at : at + passes]) == {better})


@pytest.mark.parametrize(
    ("answer_seconds", "pass_seconds", "tried"),
    [
        (0.19 * ONE_PASS - LAUNCH, ONE_PASS, True),
        (0.21 * ONE_PASS - LAUNCH, ONE_PASS, False),
        (0.0, ONE_PASS, False),
        (ANSWER, 0.0, False),
        (0.0, 0.0, False),
    ],
)
def test_none_waits_where_answers_take_long_or_nobody_knows(
    answer_seconds: float, pass_seconds: float, tried: bool
) -> None:
    modes, modes_chosen = LaunchPolicy(), []
    for _ in range(3000):
        modes_chosen.append(modes.choose(8, answer_seconds, LAUNCH, pass_seconds))
        modes.observe_pass(8, modes_chosen[-1], 3.0, ONE_PASS)
    assert (WAIT in modes_chosen) is tried


@pytest.mark.parametrize("seed", range(12))
def test_a_trial_that_makes_much_less_ends_soon(seed: int) -> None:
    """Each costs half a pass there."""
    modes_chosen = Engine({RUN_AHEAD: 3.0, WAIT: 1.9}, 0.3, seed).run(1000)
    assert modes_chosen.count(WAIT) <= 20


def test_one_that_was_better_is_not_chosen_while_answers_take_long() -> None:
    engine = Engine(BETTER[WAIT])
    assert engine.run(200)[-1] is WAIT
    assert engine.modes.choose(8, ONE_PASS, LAUNCH, ONE_PASS) is RUN_AHEAD
    assert engine.modes.choose(8, ANSWER, LAUNCH, ONE_PASS) is WAIT


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("better", LaunchMode)
def test_the_better_way_is_found(better: LaunchMode, noise: float, seed: int) -> None:
    engine = Engine(BETTER[better], noise, seed)
    assert engine.modes.preferred(engine.load) is RUN_AHEAD
    modes_chosen = engine.run(8000)
    assert engine.modes.preferred(engine.load) is better
    assert (
        modes_chosen[: 2 * TRIAL].count(WAIT) == TRIAL
        if better is WAIT
        else 12 <= modes_chosen[: 2 * TRIAL].count(WAIT) <= TRIAL
    )
    assert steady_from(modes_chosen, better) <= 130
    # And the other is tried seldom, but tried.
    others = sum(way is not better for way in modes_chosen[200:])
    assert 0 < others <= 0.02 * len(modes_chosen[200:])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("better", LaunchMode)
def test_the_better_way_is_found_where_passes_vary_by_as_much_as_they_make(better: LaunchMode, seed: int) -> None:
    """By and large: the other is taken for the better at times, which loses a fifth of the tokens meanwhile."""
    modes_chosen = Engine(BETTER[better], 1.0, seed).run(8000)
    assert steady_from(modes_chosen, better) <= 1500
    assert sum(way is not better for way in modes_chosen[200:]) <= 0.25 * len(modes_chosen[200:])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("better", LaunchMode)
def test_another_is_chosen_once_it_is_better(better: LaunchMode, seed: int) -> None:
    """Soon where the one in use has become worse, and with the next tries where only the other has become better."""
    other = RUN_AHEAD if better is WAIT else WAIT
    engine = Engine(BETTER[better], seed=seed)
    engine.run(1000)
    engine.tokens = BETTER[other]
    assert steady_from(engine.run(3000), other) <= 2200
    engine.tokens = {other: 0.5 * BETTER[other][other], better: BETTER[other][better]}
    assert steady_from(engine.run(500), better) <= 150


def test_another_draft_is_measured_anew() -> None:
    engine = Engine(BETTER[WAIT])
    assert engine.run(200)[-1] is WAIT
    engine.modes.forget()
    assert engine.run(2 * TRIAL) == [RUN_AHEAD] * TRIAL + [WAIT] * TRIAL


def test_loads_are_told_apart_by_powers_of_two() -> None:
    engine = Engine(BETTER[WAIT])
    engine.run(200)
    assert all(engine.modes.choose(load, ANSWER, LAUNCH, ONE_PASS) is WAIT for load in (8, 11, 15))
    engine.load, engine.tokens = 4, BETTER[RUN_AHEAD]
    assert engine.run(300)[-1] is RUN_AHEAD
    assert all(engine.modes.choose(load, ANSWER, LAUNCH, ONE_PASS) is RUN_AHEAD for load in (4, 7))
    # As the nearest one.
    assert engine.modes.choose(16, ANSWER, LAUNCH, ONE_PASS) is WAIT
    assert engine.modes.choose(8, ANSWER, LAUNCH, ONE_PASS) is WAIT


@pytest.mark.parametrize("better", LaunchMode)
def test_the_mode_of_the_nearest_load_is_taken_where_none_was_tried(better: LaunchMode) -> None:
    engine = Engine(BETTER[better])
    engine.run(200)
    engine.load = 64
    assert set(engine.run(120)) == {better}
    assert engine.modes.preferred(64) is better
    # And both are tried in the end.
    (other,) = set(LaunchMode) - {better}
    engine.tokens = BETTER[other]
    engine.run(1000)
    assert engine.modes.preferred(64) is other
    assert engine.modes.preferred(8) is better
