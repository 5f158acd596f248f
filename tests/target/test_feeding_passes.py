"""What a draft says while a pass runs, for the one that is launched behind it already."""

from __future__ import annotations

import random
import time
from collections import deque

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain, request
from transformers import PreTrainedModel

from benchmarks.shared.virtual_clock import VirtualClock
from outrider.drafting.events import Grown
from outrider.drafting.inbox import DraftInbox
from outrider.wire.frames import SequenceGrowth
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution import node_tables
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.device_rows import TableStep
from target_service.execution.host_executor import CopiedLater
from target_service.execution.pass_ends import PassEnds

# What a pass of the device takes that is not there, and when its draft answers.
PASS, ANSWER = 0.06, 0.02


class LateDraft(ScriptedDraft):
    """Answers in order and some time after it was asked."""

    def connect(self) -> None:
        self._answers: deque[tuple[float, list[SequenceGrowth]]] = deque()
        super().connect()

    def _send(self, growths: list[SequenceGrowth]) -> None:
        self._answers.append((time.monotonic() + ANSWER, growths))

    def answer(self) -> None:
        while self._answers and self._answers[0][0] <= time.monotonic():
            self.events.receive(Grown(self._answers.popleft()[1]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """A fiftieth of a millisecond passes between two looks at it; a draft answers while it is waited for."""
    clock = VirtualClock(2e-5).install(monkeypatch)
    clock.deliver_while_waiting(monkeypatch)
    return clock


@pytest.fixture
def slow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose passes say what they have to say at once, and are said to have ended later, one by one."""
    ends, ended = [0.0], dict[int, float]()
    begin = TableStep.__init__

    def noted(self: TableStep, *arguments: object, **options: object) -> None:
        begin(self, *arguments, **options)  # type: ignore[arg-type]
        ends.append(max(ends[-1], time.monotonic()) + PASS)
        ended[id(self)] = ends[-1]

    monkeypatch.setattr(TableStep, "__init__", noted)
    monkeypatch.setattr(TableStep, "ended", lambda self: time.monotonic() >= ended[id(self)])


@pytest.mark.usefixtures("clock", "slow_passes")
@pytest.mark.parametrize(
    "known", [0.0, 0.9, 10.0], ids=["nobody knows its time", "its time is known", "it seems to take much longer"]
)
def test_what_comes_while_a_pass_runs_is_published_at_once(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, known: float, clock: VirtualClock
) -> None:
    wanted = request([5, 7, 9], 24)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(2, 0)
    steps = DeviceSteps(runner, max_sequences=2, max_rows=64, backend="torch")
    loop = EngineLoop(runner, engine_config(max_running=2), steps=steps)
    draft = LateDraft(loop.drafting, knowing_tree([truth], runner.vocabulary_size, 3, right=1.0))
    clock.watchers.append(draft.answer)
    loop.drafting.attach(draft)
    loop.drafting.listen()
    monkeypatch.setattr(PassEnds, "earliest", lambda *_: known * PASS)
    live = loop.make(1, wanted)
    loop.add(live)
    tables, launch, feed = steps.tables, EngineLoop._launch_behind, EngineLoop._feed
    assert tables is not None
    node_tables.warm_up()
    # Of every pass that another was launched behind: whether something came for that one, and what it took.
    begun: list[tuple[list[int], float]] = []
    fed: list[tuple[bool, float]] = []

    def launched(self: EngineLoop, step: Step) -> int:
        begun.append((tables.mail.newest.tolist(), time.monotonic()))
        return launch(self, step)

    def noted(self: EngineLoop, step: Step) -> None:
        feed(self, step)
        before, at = begun.pop()
        if self._ahead is not None:
            fed.append((tables.mail.newest.tolist() != before, time.monotonic() - at))

    monkeypatch.setattr(EngineLoop, "_launch_behind", launched)
    monkeypatch.setattr(EngineLoop, "_feed", noted)
    while loop.live:
        loop.step()
    assert tuple(live.sequence.token_ids) == truth and live.sequence.totals.accepted_tokens
    # All but the first, of whose prompt the draft is still to hear.
    assert len(fed) > 5 and sum(came for came, _ in fed) >= 0.7 * len(fed)
    # And nobody listens for longer than a pass, once one was seen to end.
    assert sorted(seconds for _, seconds in fed)[len(fed) // 2] < 1.2 * PASS


@pytest.mark.usefixtures("clock")
def test_a_launch_is_held_without_a_look_at_every_moment(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a draft sends growth of a sequence that has ended, and the others have none."""
    wanted = request([5, 7, 9], 24, speculate=False)
    runner = make_runner(tiny_model)
    runner.enable_device_row_selection(2, 0)
    loop = EngineLoop(
        runner,
        engine_config(max_running=2),
        steps=DeviceSteps(runner, max_sequences=2, max_rows=64, backend="torch"),
    )
    monkeypatch.setattr(PassEnds, "earliest", lambda *_: PASS)
    monkeypatch.setattr(CopiedLater, "ended", lambda _: False)
    waits, wait_until = [0], DraftInbox.wait_until

    def counted(inbox: DraftInbox, deadline: float) -> bool:
        waits[-1] += 1
        return wait_until(inbox, deadline)

    monkeypatch.setattr(DraftInbox, "wait_until", counted)
    loop.add(loop.make(1, wanted))
    node_tables.warm_up()
    while loop.live:
        loop.drafting.receive(Grown([SequenceGrowth(99, 0, 1, (0,), (1,), (0.5,))]))
        loop.step()
        waits.append(0)
    # Some, and none that ends at once.
    assert 0 < max(waits) <= 1e3 * PASS + 1


def test_the_earliest_end_is_near_the_end_and_not_behind_it() -> None:
    """Whoever is away until then sees a pass end when it ends, or comes back a little late."""
    dice, ends, late = random.Random(1), PassEnds(), []
    for number in range(3000):
        # Passes grow with their contexts; one in fifty is held up.
        takes = 5e-3 * (1 + number / 3000) * dice.uniform(0.99, 1.01) * (3.0 if dice.random() < 0.02 else 1.0)
        away = ends.earliest(1, 16)
        ends.observe_end(1, 16, max(away, takes), running=away < takes)
        late.append(max(0.0, away - takes) / takes)
        if number > 100:
            assert away > 0.9 * takes or takes > 11e-3
    assert sum(late) / len(late) < 0.01 and max(late) < 0.05
    # Other sizes are others' matter.
    assert ends.earliest(1, 64) == ends.earliest(2, 16) == 0.0


def test_a_time_that_is_much_too_long_is_found_out() -> None:
    ends = PassEnds()
    ends.observe_end(8, 64, 0.5, running=True)
    passes = 0
    while (away := ends.earliest(8, 64)) > 7e-3:
        ends.observe_end(8, 64, away, running=False)
        passes += 1
    assert passes < 250
    # And at once by a host that was not away for so long.
    ends.observe_end(8, 64, 6e-3, running=False)
    ends.observe_end(8, 128, 0.5, running=True)
    ends.observe_end(8, 128, 8e-3, running=False)
    assert (ends.earliest(8, 64), ends.earliest(8, 128)) == (6e-3, 8e-3)
