"""What a draft says while a pass runs, for the one that is launched behind it already."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain, request
from transformers import PreTrainedModel

from outrider.wire.frames import SequenceGrowth
from target_service.engine.loop import EngineLoop
from target_service.execution import node_tables
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.device_rows import TableStep

# What a pass of the device takes that is not there, and when its draft answers.
PASS, ANSWER = 0.06, 0.02


class LateDraft(ScriptedDraft):
    """Answers from another thread, in order and some time after it was asked."""

    def connect(self) -> None:
        self._answers: queue.SimpleQueue[tuple[float, list[SequenceGrowth]]] = queue.SimpleQueue()
        threading.Thread(target=self._answer, daemon=True).start()
        super().connect()

    def _send(self, growths: list[SequenceGrowth]) -> None:
        self._answers.put((time.monotonic() + ANSWER, growths))

    def _answer(self) -> None:
        while True:
            due, growths = self._answers.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self.events.on_growth(growths)


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


@pytest.mark.usefixtures("slow_passes")
@pytest.mark.parametrize("known", [True, False], ids=["its time is known", "nobody knows its time"])
def test_what_comes_while_a_pass_runs_is_published_at_once(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    wanted = request([5, 7, 9], 24)
    truth = (*wanted.token_ids, *plain(tiny_model, wanted))
    runner = make_runner(tiny_model)
    runner.keep_tokens(2, 0)
    steps = DeviceSteps(runner, max_sequences=2, max_rows=64, backend="torch")
    loop = EngineLoop(runner, engine_config(max_running=2), steps=steps)
    loop.drafting.attach(LateDraft(loop.drafting, knowing_tree([truth], runner.vocabulary_size, 3, right=1.0)))
    loop.drafting.listen()
    monkeypatch.setattr(loop._policy, "seconds", lambda *_: PASS if known else 0.0)
    live = loop.make(1, wanted)
    loop.add(live)
    tables, feed = steps.tables, EngineLoop._feed
    assert tables is not None
    node_tables.warm_up()
    # Of every pass that another was launched behind: whether something came for that one, and what it took.
    fed: list[tuple[bool, float]] = []

    def noted(self: EngineLoop, step: object) -> None:
        before, begun = tables.mail.newest.tolist(), time.monotonic()
        feed(self, step)  # type: ignore[arg-type]
        if self._ahead is not None:
            fed.append((tables.mail.newest.tolist() != before, time.monotonic() - begun))

    monkeypatch.setattr(EngineLoop, "_feed", noted)
    while loop.live:
        loop.step()
    assert tuple(live.sequence.token_ids) == truth
    assert len(fed) > 5
    news = sum(came for came, _ in fed)
    if known:
        # All but the first, of whose prompt the draft is still to hear, and a few on a busy host.
        assert news >= 0.7 * len(fed) and sorted(seconds for _, seconds in fed)[len(fed) // 2] < PASS
        assert live.sequence.totals.accepted_tokens
    else:
        assert sorted(seconds for _, seconds in fed)[len(fed) // 2] < ANSWER / 2
