"""Launches that are held for requests which come while a step runs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain_each, request
from transformers import PreTrainedModel

from benchmarks.loads.simulation import SHAPES, SimulatedEngine
from outrider.sampling import SamplingParams
from target_service.core.sequence import StepVerdict
from target_service.engine.launch_hold import LaunchHold
from target_service.engine.loop import EngineLoop
from target_service.engine.speculation import EngineSpeculation
from target_service.execution.device_executor import DeviceSteps

RUNNING = 4


def test_what_a_launch_needs_is_kept_free_before_the_end() -> None:
    hold = LaunchHold()
    assert hold.lead == math.inf
    for seconds in (0.001, 0.003, 0.002):
        hold.observe_launch(seconds, late=False)
    usual = hold.lead
    assert usual > 2 * 0.003
    hold.observe_launch(0.001, late=True)
    assert hold.lead == pytest.approx(2 * usual)
    for _ in range(20):
        hold.observe_launch(0.003, late=True)
    # However often it was late.
    assert hold.lead == pytest.approx(8 * usual)
    for _ in range(2000):
        hold.observe_request()
        hold.observe_launch(0.003, late=False)
    assert hold.lead == pytest.approx(usual)


def test_nothing_is_held_where_nobody_comes() -> None:
    hold = LaunchHold()
    for _ in range(100):
        hold.observe_launch(0.001, late=None)
    assert hold.lead == math.inf
    hold.observe_request()
    assert hold.lead < 0.01


def test_first_tokens_come_sooner_and_answers_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that ask again 2.5 ms behind their answers, by a clock of the simulation's own."""
    held = SimulatedEngine(SHAPES["8b"], "none").load(16, 64, seed=1)
    monkeypatch.setattr(LaunchHold, "lead", math.inf)
    at_once = SimulatedEngine(SHAPES["8b"], "none").load(16, 64, seed=1)
    assert held["first_token_ms"] < 0.95 * at_once["first_token_ms"]
    assert held["tokens_per_second"] > 0.98 * at_once["tokens_per_second"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafted", [True, False])
def test_requests_come_and_go_while_a_step_runs(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, drafted: bool, seed: int
) -> None:
    monkeypatch.setattr(EngineSpeculation, "hold_launch", lambda *_: True)
    dice = random.Random(seed)
    wanted = [
        request(
            [dice.randrange(90) for _ in range(dice.randrange(5, 60))],
            16 + number,
            sampling=SamplingParams(temperature=0.8 * (number % 2), seed=number, ignore_eos=True),
        )
        for number in range(10)
    ]
    truths = plain_each(tiny_model, wanted)
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(RUNNING, 7)
    steps = DeviceSteps(runner, max_sequences=RUNNING, max_rows=256)
    loop = EngineLoop(runner, engine_config(max_running=RUNNING, prefill_chunk=16), steps=steps)
    if drafted:
        whole = [(*one.token_ids, *truth) for one, truth in zip(wanted, truths, strict=True)]
        loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree(whole, runner.vocabulary_size, 12, right=0.8)))
        loop.drafting.listen()
    said: dict[int, list[int]] = {}
    arriving, gone, held = list(range(len(wanted))), set[int](), itertools.count()

    def come_and_go() -> None:
        next(held)
        if arriving and dice.random() < 0.5:
            said[arriving[0]] = []
            loop.add(loop.make(arriving[0], wanted[arriving.pop(0)]))
        if loop.live and dice.random() < 0.05:
            number = dice.choice(list(loop.live))
            loop.end(number, "cancelled")
            gone.add(number)

    loop.take_arrivals = come_and_go
    while arriving or loop.live:
        if not loop.live:
            come_and_go()
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                said[event.sequence_id] += event.token_ids
        loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
    assert next(held) > 30
    for number, truth in enumerate(truths):
        mine = tuple(said[number])
        assert mine == (truth[: len(mine)] if number in gone else truth)
