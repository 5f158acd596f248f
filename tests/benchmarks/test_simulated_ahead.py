"""The default GPU path runs on a simulated device: texts as recorded, and drafts make more of a pass."""

from __future__ import annotations

import argparse
import random

import pytest
from scripted_drafter import Listener, opening, step

from benchmarks.engine import simulated_ahead
from benchmarks.engine.simulated_ahead import RecordedDraft, RecordedTexts, run_mode
from benchmarks.running_ahead.recording import Recording
from benchmarks.running_ahead.walk import Table
from benchmarks.shared.virtual_clock import VirtualClock

OPTIONS = argparse.Namespace(
    concurrency=1, laps=2, pass_ms=12.0, row_ms=0.02, early=0.2, whole=0.4, opening=1,
)  # fmt: skip


def recordings(count: int = 3, length: int = 70) -> list[Recording]:
    dice = random.Random(5)
    return [Recording("chat", [dice.randrange(90) for _ in range(length)], 9) for _ in range(count)]


def knowing(recording: Recording, depth: int) -> dict[int, Table]:
    """At every root what follows, beside what does not."""
    found: dict[int, Table] = {}
    for root in range(len(recording.token_ids) - 1):
        table, node = found.setdefault(root, Table()), 0
        for token in recording.token_ids[root + 1 : root + 1 + depth]:
            table.add(node, token + 1, 0.1)
            node = table.add(node, token, 0.8)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The host takes a fiftieth of a millisecond between two looks at it; trees come while a pass is waited for."""
    clock = VirtualClock(2e-5).install(monkeypatch)

    class TimedDraft(RecordedDraft):
        def _start(self) -> None:
            clock.watchers.append(self.deliver_due)

    monkeypatch.setattr(simulated_ahead, "RecordedDraft", TimedDraft)
    clock.deliver_while_waiting(monkeypatch)
    return clock


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_drafts_make_more_of_a_pass(concurrency: int) -> None:
    own = recordings()
    texts = RecordedTexts(own)
    tables = [{"early": knowing(one, 3), "whole": knowing(one, 8)} for one in own]
    for token in range(91):
        texts.id_of(token)
    OPTIONS.concurrency = concurrency
    # What is said is held to the texts there.
    plain, drafted = (run_mode(mode, texts, tables, OPTIONS) for mode in ("plain", "drafted"))
    assert 0.9 < plain["tokens_per_pass"] < 1.1 and plain["followed_share"] == 0.0
    # Half of the passes are those that go without a draft at first.
    assert drafted["tokens"] == plain["tokens"] and drafted["followed_share"] > 0.3
    assert drafted["tokens_per_pass"] > 1.3


def test_a_recorded_tree_comes_in_two_parts_and_late() -> None:
    own = recordings(1)
    texts, heard = RecordedTexts(own), Listener()
    tables = [{"early": knowing(own[0], 2), "whole": knowing(own[0], 5)}]
    draft = RecordedDraft(heard, tables, texts, one_pass=0.05, early=0.2, whole=0.6, opening=0)
    prompt = texts.prompts[0]
    draft.open(opening(1, token_ids=tuple(prompt)))
    draft.advance([step(1, texts.texts[0][len(prompt)])])
    heard.until(lambda it: len(it.growths) == 3)
    first, early, whole = sorted(heard.growths, key=lambda growth: (growth.base_step, len(growth.token_ids)))
    assert (first.base_step, early.base_step, whole.base_step) == (0, 1, 1)
    # Nobody refuses them, in whatever order they come.
    ends = [growth.first_node_id + len(growth.token_ids) for growth in heard.growths]
    assert [growth.first_node_id for growth in heard.growths] == [1, *ends[:-1]]
    assert (len(early.token_ids), len(whole.token_ids)) == (4, 10) and whole.replaces
    assert texts.texts[0][len(prompt) + 1] in early.token_ids[:2]
