"""Time of steps shared by tenants, in an engine whose steps cost by the row, as a processor's do."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
from conftest import make_tiny
from engine_harness import engine_config, make_runner, plain, request

from benchmarks.shared.virtual_clock import VirtualClock
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.batch import StepBatch
from target_service.execution.host_executor import HostSteps, Launched, Ready
from target_service.sampling.verifier import SequenceVerifier

# Seconds of a step, and of each of its rows: far above what the tiny model takes.
_STEP, _ROW = 0.008, 0.004


class DearRows(HostSteps):
    """Steps that take their time, row by row. `slept` is what they took."""

    slept = 0.0

    def launch(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        seconds = _STEP + _ROW * len(batch.input.token_ids)
        time.sleep(seconds)
        self.slept += seconds
        return super().launch(batch, verifiers, passes, ready)


class Timed:
    """A loop, and how long requests of one tenant take in it. Ends of others are counted."""

    def __init__(self) -> None:
        self._runner = make_runner(make_tiny(), kv_tokens=8192)
        config = engine_config(max_running=32, prefill_chunk=32)
        self._steps = DearRows(self._runner)
        self.loop = EngineLoop(self._runner, config, steps=self._steps)
        self._last = 0
        self.others = 0

    def add(self, wanted: SequenceRequest) -> int:
        self._last += 1
        self.loop.add(self.loop.make(self._last, wanted))
        return self._last

    def ask(self, wanted: SequenceRequest) -> tuple[float, tuple[int, ...]]:
        """Seconds of steps until it is answered, and the answer."""
        begun, mine, said = self._steps.slept, self.add(wanted), list[int]()
        while True:
            for event in self.loop.step() or ():
                if event.sequence_id != mine:
                    self.others += isinstance(event, StepVerdict)
                elif isinstance(event, StepVerdict):
                    said += event.token_ids
                else:
                    assert isinstance(event, SequenceFinished)
                    return self._steps.slept - begun, tuple(said)


def test_one_of_few_is_not_held_up_by_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualClock(1e-5).install(monkeypatch)
    timed = Timed()
    few, many = request([5, 6, 7], 8, tenant="few"), request(range(3, 43), 60, tenant="many")
    expected = plain(make_tiny(), few)
    for _ in range(4):
        timed.ask(few)
    quiet = sorted(timed.ask(few)[0] for _ in range(5))[2]
    for number in range(100):
        timed.add(replace(many, seed=number))
    # What steps of many take is seen first.
    for _ in range(15):
        timed.loop.step()
    timed.others = 0
    found = [timed.ask(few) for _ in range(8)]
    assert all(said == expected for _, said in found)
    # All thirty-two in each step make it nine times.
    assert sorted(seconds for seconds, _ in found)[4] <= 3 * quiet
    # The others go on all the while.
    assert timed.others >= 8 * 8
