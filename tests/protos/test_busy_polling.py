"""A loop polls for as long as it should after a start, and sleeps otherwise; with few cores it never polls."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from outrider import busy_polling
from outrider.busy_polling import LEAST_CORES, BusyPolling, allowed_seconds, usable_cores


class Counted(BusyPolling):
    """Counts polls, by a clock that the test moves."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, clock=lambda: self.now)
        self.now = 100.0
        self.polls = 0

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        self.polls += 1
        super()._poll(loop)

    async def polls_in(self, turns: int) -> int:
        """Polls in so many turns of the loop."""
        before = self.polls
        for _ in range(turns):
            await asyncio.sleep(0)
        return self.polls - before


async def test_the_loop_polls_after_a_start_and_then_sleeps() -> None:
    polling = Counted(0.05)
    polling.start()
    assert await polling.polls_in(5) == 5
    polling.now += 0.04
    assert await polling.polls_in(5) == 5
    polling.now += 0.02
    # The poll that finds the time over is the last.
    assert await polling.polls_in(5) == 1
    assert await polling.polls_in(5) == 0


async def test_it_starts_again_once_the_loop_has_slept() -> None:
    polling = Counted(0.01)
    polling.start()
    polling.now += 0.02
    assert await polling.polls_in(5) == 1
    polling.start()
    assert await polling.polls_in(5) == 5


async def test_a_second_start_polls_for_longer_and_not_more_often() -> None:
    polling = Counted(0.2)
    for _ in range(10):
        polling.start()
    polling.now += 0.15
    polling.start()
    polling.now += 0.15
    assert await polling.polls_in(5) == 5


async def test_a_loop_sleeps_after_a_stop() -> None:
    polling = Counted(1.0)
    polling.start()
    assert await polling.polls_in(5) == 5
    polling.stop()
    assert await polling.polls_in(5) == 1
    assert await polling.polls_in(5) == 0


async def test_nothing_polls_for_no_time() -> None:
    polling = Counted(0.0)
    polling.start()
    assert await polling.polls_in(5) == 0


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "nonsense\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
    ids=["none", "no limit", "limit", "unreadable", "no limit of old", "limit of old"],
)
def test_cores_are_those_of_the_process_and_its_container(
    files: dict[str, str], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == min(32.0, share)


@pytest.mark.parametrize(("cores", "seconds"), [(LEAST_CORES - 0.5, 0.0), (LEAST_CORES, 0.01)])
def test_no_loop_polls_where_cores_are_few(cores: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_polling, "usable_cores", lambda: cores)
    assert allowed_seconds(0.01) == seconds
