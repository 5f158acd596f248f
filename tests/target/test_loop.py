"""The engine's step where the device has no memory for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engine_harness import ScriptedDraft, engine_config, make_runner, plain, plain_each, random_tree, request
from transformers import PreTrainedModel

from outrider.errors import QuotaExceeded
from outrider.sampling import SamplingParams
from outrider.wire.frames import OpenSequence
from target_service.core.sequence import SequenceFailed, SequenceFinished, StepVerdict
from target_service.engine import launching
from target_service.engine.loop import EngineLoop
from target_service.execution.batch import StepBatch
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import HostSteps, Launched, Ready
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier


class SmallDevice(HostSteps):
    """A device with memory for a step of so many rows."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        super().__init__(runner)
        self._rows = rows

    def launch(self, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        if len(batch.input.token_ids) > self._rows:
            raise torch.OutOfMemoryError("out of memory")
        return super().launch(batch, verifiers, passes, ready)


@pytest.mark.parametrize("rows", [8, 40])
def test_steps_shrink_until_they_fit(tiny_model: PreTrainedModel, rows: int) -> None:
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(), steps=SmallDevice(runner, rows))
    wanted = [request([5] * 60, 6), request([7, 8, 9], 6)]
    for number, one in enumerate(wanted, start=1):
        loop.add(loop.make(number, one))
    said: dict[int, list[int]] = {1: [], 2: []}
    while loop.live:
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                said[event.sequence_id] += event.token_ids
    assert [tuple(said[1]), tuple(said[2])] == plain_each(tiny_model, wanted)


def test_a_sequence_that_never_fits_is_refused_and_the_others_go_on(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model)
    loop = EngineLoop(runner, engine_config(), steps=SmallDevice(runner, 1))
    for number in (1, 2):
        loop.add(loop.make(number, request([number + 4], 4)))
    last = {}
    while loop.live:
        for event in loop.step() or ():
            last[event.sequence_id] = event
    assert isinstance(last[1], SequenceFinished)
    assert isinstance(last[2], SequenceFailed) and isinstance(last[2].error, QuotaExceeded)
    assert runner.cache.used_pages == 0


def test_kernels_are_warmed_up_without_a_trace(tiny_model: PreTrainedModel) -> None:
    runner = make_runner(tiny_model)
    steps = DeviceSteps(runner, max_sequences=4, max_rows=64)
    steps.warm_up()
    loop = EngineLoop(runner, engine_config(), steps=steps)
    wanted = request([5, 6], 5)
    loop.add(loop.make(1, wanted))
    said: list[int] = []
    while loop.live:
        said += [token for event in loop.step() or () if isinstance(event, StepVerdict) for token in event.token_ids]
    assert tuple(said) == plain(tiny_model, wanted)


def test_lockstep_says_what_the_fast_loop_says(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's loop in torch on a CPU, where a GPU's would run; in lockstep it is not even made."""
    made: list[DeviceSteps] = []

    def device_steps(runner: ModelRunner, *, max_sequences: int, max_rows: int, typical: bool) -> DeviceSteps:
        assert not typical
        made.append(DeviceSteps(runner, max_sequences=max_sequences, max_rows=max_rows))
        return made[-1]

    monkeypatch.setattr(launching, "best_steps", device_steps)
    seeded = SamplingParams(temperature=0.8, ignore_eos=True)
    wanted = [request([5, 6, 7], 12), request([9] * 20, 9), request([3], 7, sampling=seeded)]
    said: dict[bool, list[list[int]]] = {}
    for lockstep in (False, True):
        runner, before = make_runner(tiny_model), len(made)
        runner.enable_device_row_selection(engine_config().max_running, 7)
        loop = EngineLoop(runner, replace(engine_config(), lockstep=lockstep))
        loop.drafting.attach(ScriptedDraft(loop.drafting, random_tree(runner.vocabulary_size, 8)))
        loop.drafting.listen()
        for number, one in enumerate(wanted):
            loop.add(loop.make(number, one))
        said[lockstep] = [[] for _ in wanted]
        while loop.live:
            for event in loop.step() or ():
                if isinstance(event, StepVerdict):
                    said[lockstep][event.sequence_id] += event.token_ids
        assert len(made) - before == (not lockstep)
    assert said[True] == said[False] == [list(plain(tiny_model, one)) for one in wanted]


class NotedSteps(HostSteps):
    """Notes its launches."""

    def __init__(self, runner: ModelRunner, notes: list[str], *, in_background: bool) -> None:
        super().__init__(runner)
        self._notes = notes
        self.in_background = in_background

    def launch(self, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        self._notes.append("launch")
        return super().launch(batch, verifiers, passes, ready)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_draft_reads_a_prompt_while_the_device_does(tiny_model: PreTrainedModel, in_background: bool) -> None:
    runner, notes = make_runner(tiny_model), list[str]()

    class NotedDraft(ScriptedDraft):
        def open(self, sequence: OpenSequence) -> None:
            notes.append("open")
            super().open(sequence)

    loop = EngineLoop(runner, engine_config(), steps=NotedSteps(runner, notes, in_background=in_background))
    loop.drafting.attach(NotedDraft(loop.drafting, random_tree(runner.vocabulary_size, 4)))
    loop.drafting.listen()
    loop.add(loop.make(1, request([5, 6, 7], 4)))
    while loop.live:
        loop.step()
    # A device that keeps the host would let a draft elsewhere begin only after the prompt.
    assert notes[:2] == (["launch", "open"] if in_background else ["open", "launch"])
    assert notes.count("open") == 1
