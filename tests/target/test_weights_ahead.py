"""Weights that are exchanged where steps are launched behind one another: no pass is of two kinds of weights."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
from conftest import make_tiny
from early_steps import EarlySteps
from engine_harness import DEVICE_SEQUENCES, engine_config, make_runner, plain, request
from other_weights import other_weights

from outrider.errors import OutriderError
from outrider.sampling import SamplingParams
from outrider.weight_updates import RunningRequests, WeightsUpdated
from target_service.core.sequence import SequenceFinished, StepVerdict
from target_service.core.weights import WeightUpdate
from target_service.engine.exchange import WeightExchange
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import Steps
from target_service.model.runner import ModelRunner

pytestmark = pytest.mark.values

TOKENS = 40
PROMPTS = ([5, 6, 7], [9, 8], [30, 31, 30, 31, 30])


def steps_of(kind: str, runner: ModelRunner) -> Steps:
    if kind == "host":
        return EarlySteps(runner)
    if kind == "chosen":
        # The device chooses rows from what the text says already.
        runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    return DeviceSteps(runner, max_sequences=DEVICE_SEQUENCES, max_rows=512)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("kind", ["host", "device", "chosen"])
@pytest.mark.parametrize("after_steps", [2, 3])
def test_continuing_behind_steps_under_way(
    kind: str, passes: int, temperature: float, after_steps: int, tmp_path: Path
) -> None:
    old = make_tiny()
    new = other_weights(old)
    new.save_pretrained(tmp_path)
    sampling = SamplingParams(ignore_eos=True, temperature=temperature, seed=3)
    wanted = [request(prompt, TOKENS, sampling=sampling) for prompt in PROMPTS]
    runner = make_runner(copy.deepcopy(old))
    loop = EngineLoop(runner, engine_config(), steps=steps_of(kind, runner))
    loop.speculation.updates.multi_step.passes = passes
    exchange = WeightExchange(runner, loop, lambda: None, lambda: None)
    results: list[WeightsUpdated | OutriderError] = []
    verdicts: dict[int, list[StepVerdict]] = {}
    for sequence_id, one in enumerate(wanted, start=1):
        loop.add(loop.make(sequence_id, one))
    ended = steps = 0
    while ended < len(wanted):
        if steps == after_steps:
            exchange.start_reading(1, WeightUpdate(str(tmp_path), RunningRequests.CONTINUE), results.append)
            while exchange._pending is not None and not exchange._pending.read:
                time.sleep(0.001)
        assert exchange.exchange_when_ready() == []
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                verdicts.setdefault(event.sequence_id, []).append(event)
            ended += isinstance(event, SequenceFinished)
        loop.scheduler.pages.check_integrity(live.sequence for live in loop.live.values())
        steps += 1
    (done,) = results
    assert isinstance(done, WeightsUpdated), done
    assert not loop.settling and runner.cache.used_pages == 0
    for sequence_id, one in enumerate(wanted, start=1):
        by_version = {
            version: [t for v in verdicts[sequence_id] if v.model_version == version for t in v.token_ids]
            for version in (1, 2)
        }
        first, rest = by_version[1], by_version[2]
        assert first and rest and len(first) + len(rest) == TOKENS
        assert first == list(plain(copy.deepcopy(old), one))[: len(first)]
        again = request([*one.token_ids, *first], len(rest), sampling=sampling)
        assert rest == list(plain(copy.deepcopy(new), again))
