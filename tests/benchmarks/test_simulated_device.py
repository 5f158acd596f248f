"""A simulated device emits what was recorded, plain and drafted, and takes the given time."""

from __future__ import annotations

import random
import time

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, request

from benchmarks.engine.simulated_device import DeviceTimes, SimulatedSteps, accepted_rows, empty_runner
from benchmarks.shared.virtual_clock import VirtualClock
from outrider.tree import TokenTree
from target_service.core.sequence import StepVerdict
from target_service.engine.loop import EngineLoop

VOCABULARY = 97
TIMES = DeviceTimes(one_pass=2e-3, row=1e-5, host=1e-4)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock(1e-6).install(monkeypatch)


def test_the_walk_goes_as_far_as_the_text() -> None:
    tree = TokenTree((9, 4, 5, 6, 7), (0, 0, 0, 2, 3), (1.0,) * 5)
    assert accepted_rows(tree, [5, 6, 7, 1]) == (2, 3, 4)
    assert accepted_rows(tree, [5, 1, 7, 1]) == (2,)
    assert accepted_rows(tree, [1, 6]) == ()


def test_a_step_ends_when_its_time_is_up() -> None:
    steps = SimulatedSteps(TIMES)
    loop = EngineLoop(empty_runner(VOCABULARY, 4096), engine_config(), steps=steps)
    steps.expect(1, [3] * 9)
    loop.add(loop.make(1, request([5, 7], 4)))
    begin = time.perf_counter()
    step = loop.launcher.launch_next()
    assert step is not None and step.launched.on_device and not step.launched.ended()
    step.launched.wait()
    assert step.launched.ended() and time.perf_counter() > begin + TIMES.one_pass
    assert step.launched.span is None


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_sequences_say_their_texts_in_the_devices_time(drafted: bool) -> None:
    dice = random.Random(3)
    prompts = [[dice.randrange(VOCABULARY) for _ in range(5)] for _ in range(2)]
    outputs = [[dice.randrange(VOCABULARY) for _ in range(80)] for _ in range(2)]
    steps = SimulatedSteps(TIMES)
    loop = EngineLoop(empty_runner(VOCABULARY, 4096), engine_config(), steps=steps)
    if drafted:
        whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
        loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree(whole, VOCABULARY, 8, right=0.9)))
        loop.drafting.listen()
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        steps.expect(number, output)
        loop.add(loop.make(number, request(prompt, 40)))
    said: dict[int, list[int]] = {1: [], 2: []}
    begin, launched = time.perf_counter(), 0
    while loop.live:
        launched += 1
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                said[event.sequence_id] += event.token_ids
    took = time.perf_counter() - begin
    assert [said[1], said[2]] == [output[:40] for output in outputs]
    # One at a time no pass of forty can be saved, and with drafts many are. None is quicker than it was asked to be.
    assert launched < 30 if drafted else launched >= 40
    assert took > launched * TIMES.one_pass
