"""How a pass is launched: by what passes of either mode make, at whichever load that was seen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from target_service.core.sequence import DevicePass
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.controller import SpeculationController
from target_service.speculation.policy.launch_mode import LaunchMode, load_size
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table.layout import KEPT
from tree_kernels.verification import Walk

pytestmark = pytest.mark.values

RUN_AHEAD, WAIT = LaunchMode.RUN_AHEAD, LaunchMode.WAIT_FOR_DRAFT
ONE_PASS, ANSWER, LAUNCH = 6e-3, 0.7e-3, 0.3e-3
COST = StepCost([(1, ONE_PASS), (256, 1.2 * ONE_PASS)])
# Passes of a mode before its tokens are believed, and rows of every pass.
TRIAL, ROWS = 32, 64
PROSPECTS = (0.6, 1.1, 1.6, 1.9, 2.0, 2.0)


@dataclass
class Engine:
    """Passes that accept so many tokens of a sequence, by the mode that they are launched in."""

    accepted: dict[LaunchMode, float]
    seed: int = 0
    load: int = 8
    controller: SpeculationController = field(default_factory=lambda: SpeculationController(KEPT, COST, {}))

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def run(self, passes: int) -> list[LaunchMode]:
        chosen = []
        for _ in range(passes):
            mode = self.controller.choose_mode(self.load, ANSWER, LAUNCH)
            outcomes = [Verified(Walk((), 3), (), (), (self._pass(self.accepted[mode]),)) for _ in range(self.load)]
            self.controller.observe_passes(outcomes, mode, [False] * self.load)
            takes = COST(ROWS) * self._dice.lognormvariate(0, 0.02)
            self.controller.observe_time(self.load, ROWS, takes, mode)
            assert self.controller.times is not None
            self.controller.times.observe_gap(self.load, ANSWER + LAUNCH if mode is WAIT else 0.0, mode)
            chosen.append(mode)
        return chosen

    def _pass(self, mean: float) -> DevicePass:
        accepted = min(7, int(self._dice.expovariate(1 / mean) + 0.5))
        return DevicePass(7, 7, accepted, accepted, 1.6, 1.6, PROSPECTS, 0, ())


# Of every sequence's tokens in a pass: those of the first make more a second, then those of the other mode.
BETTER = {RUN_AHEAD: {RUN_AHEAD: 2.0, WAIT: 1.6}, WAIT: {RUN_AHEAD: 1.2, WAIT: 2.4}}


@pytest.mark.parametrize(("answer", "tried"), [(0.15 * ONE_PASS, True), (0.3 * ONE_PASS, False), (0.0, False)])
def test_none_waits_where_answers_take_long_or_nobody_knows(answer: float, tried: bool) -> None:
    engine = Engine(BETTER[WAIT])
    engine.run(TRIAL)
    assert (engine.controller.choose_mode(8, answer, 0.0) is WAIT) is tried


def test_without_costs_none_waits() -> None:
    controller = SpeculationController(KEPT, None, {})
    assert {controller.choose_mode(8, ANSWER, LAUNCH) for _ in range(100)} == {RUN_AHEAD}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("better", LaunchMode)
def test_the_better_mode_is_found(better: LaunchMode, seed: int) -> None:
    engine = Engine(BETTER[better], seed)
    chosen = engine.run(4000)
    assert set(chosen[:TRIAL]) == {RUN_AHEAD}
    assert chosen[TRIAL : 2 * TRIAL].count(WAIT) >= 12
    others = sum(mode is not better for mode in chosen[3 * TRIAL :])
    # The other is tried seldom, but tried.
    assert engine.controller.is_preferred(better) and 0 < others <= 0.06 * len(chosen)


@pytest.mark.parametrize("better", LaunchMode)
def test_another_is_chosen_once_it_is_better(better: LaunchMode) -> None:
    other = RUN_AHEAD if better is WAIT else WAIT
    engine = Engine(BETTER[better])
    engine.run(1000)
    engine.accepted = BETTER[other]
    engine.run(2200)
    assert engine.controller.is_preferred(other)
    assert engine.run(500).count(other) > 450


def test_another_draft_is_measured_anew() -> None:
    engine = Engine(BETTER[WAIT])
    assert engine.run(200)[-1] is WAIT
    engine.controller.forget_draft()
    assert engine.run(2 * TRIAL) == [RUN_AHEAD] * TRIAL + [WAIT] * TRIAL


@pytest.mark.parametrize("better", LaunchMode)
@pytest.mark.parametrize("load", [1, 64])
def test_what_one_load_shows_serves_at_the_next(better: LaunchMode, load: int) -> None:
    """But for what was left of a first trial, no pass of a new load is spent on finding it out again."""
    engine = Engine(BETTER[better])
    engine.run(300)
    engine.load = load
    chosen = engine.run(60)
    assert chosen.count(better) >= 60 - (TRIAL - 12)


def test_as_many_as_there_is_room_for_and_one_less_are_one_load() -> None:
    """An arrival replaces the one that is missing."""
    for most in (8, 32, 64):
        assert load_size(most) == load_size(most - 1) != load_size(most + 1)
    assert load_size(1) < load_size(2) < load_size(3)
