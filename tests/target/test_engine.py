"""The engine's thread: requests from anywhere, events once per step, nothing left behind."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import ScriptedDraft, engine_config, make_runner, random_tree, request
from transformers import PreTrainedModel
from waits import HUNG_SECONDS, wait_until

from outrider.errors import Draining, EngineDead, PositionOutOfRange, QuotaExceeded, UnknownSequence, WrongRoot
from outrider.tree import TokenTree
from target_service.core.sequence import SequenceEvent, SequenceFailed, SequenceFinished, StepVerdict
from target_service.engine.engine import Engine
from target_service.model.runner import ModelRunner

Started = Callable[..., tuple[Engine, "queue.Queue[SequenceEvent]"]]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Passes of the model begin while it is set, and whoever clears it sets it before an engine is stopped."""
    gate, forward = threading.Event(), ModelRunner.forward

    def waiting(self: ModelRunner, *arguments: Any, **options: Any) -> Any:
        assert gate.wait(HUNG_SECONDS)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(ModelRunner, "forward", waiting)
    gate.set()
    yield gate
    gate.set()


@pytest.fixture
def start(tiny_model: PreTrainedModel) -> Iterator[Started]:
    engines: list[Engine] = []

    def make(*, draft: bool = False, **changes: object) -> tuple[Engine, queue.Queue[SequenceEvent]]:
        config = replace(engine_config(), **changes)  # type: ignore[arg-type]
        engine = Engine(make_runner(tiny_model), config)
        if draft:
            engine.drafting.attach(ScriptedDraft(engine.drafting, random_tree(211, 16)))
        events: queue.Queue[SequenceEvent] = queue.Queue()
        engine.start(lambda batch: [events.put(event) for event in batch] and None)
        engines.append(engine)
        return engine, events

    yield make
    for engine in engines:
        engine.stop()


def until_last(events: queue.Queue[SequenceEvent], sequence_id: int) -> list[SequenceEvent]:
    seen: list[SequenceEvent] = []
    while True:
        event = events.get(timeout=HUNG_SECONDS)
        if event.sequence_id == sequence_id:
            seen.append(event)
            if not isinstance(event, StepVerdict):
                return seen


def settle(engine: Engine) -> None:
    wait_until(lambda: not engine.snapshot().sequences)


def test_a_request_runs_to_its_end(start: Started) -> None:
    engine, events = start()
    sequence_id = engine.submit(request([5, 6, 7], 10))
    *verdicts, last = until_last(events, sequence_id)
    assert isinstance(last, SequenceFinished)
    assert sum(len(v.token_ids) for v in verdicts if isinstance(v, StepVerdict)) == 10
    assert engine.snapshot().pages_used == 0


def test_a_thousand_cancelled_requests_leave_nothing(start: Started) -> None:
    engine, _ = start(draft=True, max_waiting=2000)
    rng = random.Random(3)
    for _ in range(1000):
        sequence_id = engine.submit(request([5] * rng.randrange(1, 60), 64))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        engine.cancel(sequence_id)
    settle(engine)
    snapshot = engine.snapshot()
    assert (snapshot.sequences, snapshot.running, snapshot.waiting, snapshot.pages_used) == (0, 0, 0, 0)


def test_cancelling_twice_or_the_unknown_is_nothing(start: Started) -> None:
    engine, events = start()
    sequence_id = engine.submit(request([5], 400))
    engine.cancel(sequence_id)
    engine.cancel(sequence_id)
    engine.cancel(999)
    other = engine.submit(request([5], 3))
    assert isinstance(until_last(events, other)[-1], SequenceFinished)


def test_a_full_queue_refuses(start: Started, gate: threading.Event) -> None:
    engine, _ = start(max_waiting=2, max_running=1)
    gate.clear()
    with pytest.raises(QuotaExceeded):
        for _ in range(6):
            engine.submit(request([5], 400))


def test_half_of_the_queue_is_out_of_reach_for_callers_who_draft(start: Started, gate: threading.Event) -> None:
    """Their sequences wait for a tree as long as they like: other tenants' requests were refused meanwhile."""
    engine, events = start(max_waiting=8, max_running=1)
    engine.submit(request([5], 400))
    # It runs, and all others wait.
    events.get(timeout=HUNG_SECONDS)
    gate.clear()
    for _ in range(4):
        engine.submit(request([5] * 20, 400, external=True))
    with pytest.raises(QuotaExceeded):
        engine.submit(request([5] * 20, 400, external=True))
    engine.submit(request([5], 4))


def test_what_can_never_fit_is_refused(start: Started) -> None:
    engine, _ = start()
    with pytest.raises(PositionOutOfRange):
        engine.submit(request([5] * 500, 100))


def test_draining_refuses_arrivals_and_lets_the_others_end(start: Started) -> None:
    engine, events = start()
    sequence_id = engine.submit(request([5, 6], 40))
    engine.drain()
    with pytest.raises(Draining):
        engine.submit(request([5], 1))
    assert isinstance(until_last(events, sequence_id)[-1], SequenceFinished)


def test_stopping_without_grace_fails_what_is_left(start: Started, gate: threading.Event) -> None:
    engine, events = start()
    gate.clear()
    sequence_id = engine.submit(request([5, 6], 480))
    # It waits for the step under way.
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    wait_until(lambda: engine._stopping)
    gate.set()
    stopping.join()
    last = until_last(events, sequence_id)[-1]
    assert isinstance(last, SequenceFailed)
    assert isinstance(last.error, Draining)


def test_a_failing_step_kills_the_engine_and_says_so(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = start()

    def fail(_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine._runner, "forward", fail)
    sequence_id = engine.submit(request([5], 10))
    last = until_last(events, sequence_id)[-1]
    assert isinstance(last, SequenceFailed)
    assert isinstance(last.error, EngineDead)
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(EngineDead):
        engine.submit(request([5], 1))


def test_an_idle_engine_beats(start: Started) -> None:
    engine, _ = start()
    before = engine.last_beat_ns
    wait_until(lambda: engine.last_beat_ns > before)


def test_a_client_that_drafts_gets_what_generate_says(start: Started) -> None:
    engine, events = start()
    plain = until_last(events, engine.submit(request([5, 6, 7], 12)))
    said = [token for event in plain if isinstance(event, StepVerdict) for token in event.token_ids]
    sequence_id = engine.submit(request([5, 6, 7], 12, external=True))
    root, heard, accepted = 7, [], 0
    while len(heard) < 12:
        ahead = said[len(heard) : len(heard) + 3]
        tokens = (root, *ahead[:2], (ahead[-1] + 1) % 211)
        engine.verify(sequence_id, TokenTree(tokens, tuple(max(0, i - 1) for i in range(len(tokens))), (1.0,) * 4))
        verdict = events.get(timeout=HUNG_SECONDS)
        assert isinstance(verdict, StepVerdict)
        accepted += len(verdict.accepted_rows)
        heard += verdict.token_ids
        root = heard[-1]
    assert heard == said
    assert accepted >= 6


def test_verify_names_what_is_wrong(start: Started) -> None:
    engine, _ = start()
    with pytest.raises(UnknownSequence):
        engine.verify(77, TokenTree.root_only(1))
    sequence_id = engine.submit(request([5, 6], 4, external=True))
    with pytest.raises(WrongRoot):
        engine.verify(sequence_id, TokenTree.root_only(5))


def test_many_threads_submit_and_cancel(start: Started) -> None:
    engine, _ = start(draft=True, max_waiting=1000)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            sequence_id = engine.submit(request([5 + seed], rng.randrange(1, 12)))
            if rng.random() < 0.5:
                engine.cancel(sequence_id)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(engine)
    assert engine.snapshot().pages_used == 0
    assert engine.failure is None
