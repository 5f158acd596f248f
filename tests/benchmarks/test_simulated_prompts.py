"""What streams wait for while prompts are read, on a simulated device with a clock of its own."""

from __future__ import annotations

import pytest

from benchmarks.host.simulated_prompts import SimulatedPrompts, at_rate, closed_loop, figures
from target_service.core.schedule import rows_that_fill
from target_service.model.cuda_graphs.sizes import row_sizes

# Without a bound, and the bound of a GPU.
UNBOUNDED, DEFAULT = 60_000.0, 0.0


@pytest.mark.parametrize(("streams", "gap"), [(32, 24.0), (64, 24.0)])
def test_streams_go_on_while_others_prompts_are_read(streams: int, gap: float) -> None:
    found = {}
    for wait in (UNBOUNDED, DEFAULT):
        played = SimulatedPrompts(wait)
        closed_loop(played, streams, 3 * streams)
        found[wait] = figures(played)
    assert found[UNBOUNDED]["gap_p99"] > 45
    assert found[DEFAULT]["gap_p99"] <= gap
    assert found[DEFAULT]["tokens_per_second"] > 0.98 * found[UNBOUNDED]["tokens_per_second"]


def test_an_arrival_takes_little_of_the_others_time() -> None:
    """Sixteen streams, and a prompt of 3,000 tokens."""
    played = SimulatedPrompts(DEFAULT)
    for _ in range(16):
        played.ask(20)
    for _ in range(10):
        played.run_pass()
    begun, late = len(played.timeline), played.ask(3000)
    while not late.times:
        played.run_pass()
    passes = played.timeline[begun:]
    # The one that runs, and the one that is launched behind it, do not know it.
    assert [one[2] for one in passes[:1]] == [0]
    reading = [one for one in passes if one[2]]
    assert sum(one[2] for one in reading) == 3000
    assert all(one[1] == 16 and one[4] <= 0.024 for one in reading)
    # No row is padded before the last.
    assert all(one[3] in row_sizes(2048) for one in reading)
    assert late.times[0] - late.arrived < 0.13


@pytest.mark.parametrize(("asked", "longest"), [(DEFAULT, 0.06), (24.0, 0.024)])
def test_few_wait_longer_for_prompts_unless_a_bound_is_set(asked: float, longest: float) -> None:
    """Two streams, and six prompts of 3,000 tokens."""
    played = SimulatedPrompts(asked)
    for _ in range(2):
        played.ask(20)
    for _ in range(5):
        played.run_pass()
    begun, long = len(played.timeline), [played.ask(3000) for _ in range(6)]
    while not long[-1].times:
        played.run_pass()
    reading = [one for one in played.timeline[begun:] if one[2] and one[1]]
    assert sum(one[2] for one in reading) == 18_000
    assert max(one[4] for one in reading[:5]) == pytest.approx(longest, rel=0.2)
    # Those whose prompts were read decode as well: together all wait for no longer than 16 for 24 ms each.
    assert all(one[1] * one[4] <= 16 * 0.024 for one in reading)


def test_prompts_that_arrive_together_are_read_together() -> None:
    played = SimulatedPrompts(DEFAULT)
    for _ in range(4):
        played.ask(20)
    for _ in range(5):
        played.run_pass()
    together = [played.ask(60) for _ in range(5)]
    while not together[0].times:
        played.run_pass()
    assert {one.times[0] for one in together} == {played.now}


def test_long_prompts_at_a_rate_hold_nobody_up() -> None:
    played = SimulatedPrompts(DEFAULT)
    at_rate(played, 16.0, 96)
    found = figures(played)
    # Few decode, so that they wait longer than where many do, and the prompts less.
    assert found["gap_p99"] <= 45 and found["first_p50"] < 35 and found["first_p99"] < 100


@pytest.mark.parametrize(
    ("read", "beside", "rows"),
    [
        (1024, 0, 1024),
        (1024, 40, 984),
        # As small a piece would not be worth a step.
        (200, 120, 136),
        (120, 250, 120),
        (5, 0, 4),
        (3000, 64, 1984),
    ],
)
def test_a_step_that_leaves_rows_unread_fills_its_pass(read: int, beside: int, rows: int) -> None:
    assert rows_that_fill(read, beside, row_sizes(2048)) == rows
    assert rows_that_fill(read, beside, ()) == read
