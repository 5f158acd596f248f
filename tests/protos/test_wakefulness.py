"""A loop stays awake for as long as it should after something came, and sleeps otherwise; with few cores, always."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from outrider import wakefulness
from outrider.wakefulness import LEAST_CORES, Wakefulness, awake_seconds, usable_cores


class Counting(Wakefulness):
    """Counts how often the loop turned for it."""

    turns = 0

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self.turns += 1
        super()._turn(loop)


async def test_the_loop_turns_after_a_stir_and_then_sleeps() -> None:
    awake = Counting(0.05)
    awake.stir()
    await asyncio.sleep(0.02)
    turns = awake.turns
    # A loop that sleeps turns once in this time.
    assert turns > 20
    await asyncio.sleep(0.1)
    assert awake.turns > turns
    turns = awake.turns
    await asyncio.sleep(0.05)
    assert awake.turns == turns


async def test_it_can_be_stirred_again_once_it_has_slept() -> None:
    awake = Counting(0.01)
    awake.stir()
    await asyncio.sleep(0.05)
    turns = awake.turns
    awake.stir()
    await asyncio.sleep(0.005)
    assert awake.turns > turns + 5


async def test_a_second_stir_makes_it_longer_and_not_busier() -> None:
    awake = Counting(0.2)
    for _ in range(10):
        awake.stir()
    begun = awake.turns
    for _ in range(20):
        await asyncio.sleep(0)
    assert awake.turns - begun <= 21


async def test_a_loop_that_is_let_rest_sleeps() -> None:
    awake = Counting(1.0)
    awake.stir()
    await asyncio.sleep(0.01)
    awake.rest()
    await asyncio.sleep(0.01)
    turns = awake.turns
    await asyncio.sleep(0.02)
    assert awake.turns == turns


async def test_nothing_turns_where_the_loop_may_sleep() -> None:
    awake = Counting(0.0)
    awake.stir()
    await asyncio.sleep(0.01)
    assert awake.turns == 0


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
def test_where_cores_are_few_nothing_stays_awake(cores: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakefulness, "usable_cores", lambda: cores)
    assert awake_seconds(0.01) == seconds
