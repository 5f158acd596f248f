"""When the engine waits for drafts, by what whole steps took."""

from __future__ import annotations

from itertools import groupby

import pytest

from target_service.draft_switch import DraftSwitch


def play(switch: DraftSwitch, steps: int, *, plain: float, drafted: float, gain: float, load: int = 1) -> list[bool]:
    """Which steps waited for drafts, on a machine where steps of either kind take that long."""
    chosen = []
    for _ in range(steps):
        waits = switch.drafts(load, gain * load)
        if waits:
            switch.observe_drafted(load, drafted, row_cost=1.0)
        else:
            switch.observe_plain(load, plain)
        chosen.append(waits)
    return chosen


def runs(chosen: list[bool]) -> list[tuple[bool, int]]:
    return [(waits, len(list(group))) for waits, group in groupby(chosen)]


def test_plain_steps_are_timed_before_any_draft() -> None:
    assert runs(play(DraftSwitch(), 100, plain=1.0, drafted=1.2, gain=2.0)) == [(False, 8), (True, 92)]


@pytest.mark.parametrize("load", [1, 7, 200])
@pytest.mark.parametrize("overhead", [0.1, 1.0], ids=["cheap", "dear"])
def test_tries_of_drafts_that_do_not_pay_cost_little(load: int, overhead: float) -> None:
    chosen = play(DraftSwitch(), 8000, plain=1.0, drafted=1 + overhead, gain=1.05, load=load)
    pauses = [length for waits, length in runs(chosen)[2:-1] if not waits]
    assert pauses[:4] == sorted(pauses[:4]) and pauses[0] <= 8
    assert overhead * sum(chosen) < 0.025 * len(chosen)
    # The cheaper a try, the sooner the next.
    assert max(pauses) < 300 * overhead


def test_rows_are_not_what_drafting_costs() -> None:
    """Steps whose rows take twice a plain step's time, and nothing beyond."""
    switch = DraftSwitch()
    for _ in range(60):
        if switch.drafts(1, 1.1):
            switch.observe_drafted(1, 2.0, row_cost=2.0)
        else:
            switch.observe_plain(1, 1.0)
    assert switch.drafts(1, 1.1)


def test_drafts_that_begin_to_pay_are_found_by_a_try() -> None:
    switch = DraftSwitch()
    play(switch, 600, plain=1.0, drafted=2.0, gain=1.5)
    chosen = play(switch, 1200, plain=1.0, drafted=2.0, gain=2.5)
    assert chosen[-1] and sum(chosen) > 100


def test_a_pause_is_short_again_once_drafts_have_paid() -> None:
    switch = DraftSwitch()
    play(switch, 3000, plain=1.0, drafted=2.0, gain=1.5)
    play(switch, 1500, plain=1.0, drafted=2.0, gain=3.0)
    chosen = play(switch, 60, plain=1.0, drafted=2.0, gain=1.5)
    pauses = [length for waits, length in runs(chosen) if not waits]
    assert pauses[0] <= 8


def test_loads_are_told_apart() -> None:
    switch = DraftSwitch()
    assert play(switch, 50, plain=1.0, drafted=1.1, gain=1.5, load=1)[-1]
    assert sum(play(switch, 200, plain=1.0, drafted=3.0, gain=1.5, load=64)[16:]) < 30
    assert play(switch, 2, plain=1.0, drafted=1.1, gain=1.5, load=1)[-1]


def test_a_pause_of_the_machine_does_not_count_as_what_drafts_cost() -> None:
    switch = DraftSwitch()
    play(switch, 100, plain=1.0, drafted=1.2, gain=1.6)
    switch.observe_drafted(1, 500.0, row_cost=1.0)
    assert play(switch, 20, plain=1.0, drafted=1.2, gain=1.6) == [True] * 20


def test_a_draft_is_left_alone_between_tries() -> None:
    switch = DraftSwitch()
    play(switch, 4000, plain=1.0, drafted=4.0, gain=1.5)
    near = []
    for _ in range(2200):
        near.append(switch.drafts_are_near(32))
        play(switch, 1, plain=1.0, drafted=4.0, gain=1.5)
    assert 0 < sum(near) < 0.3 * len(near)


def test_a_draft_that_takes_many_steps_is_known_for_that() -> None:
    """Tries stay rare even where waiting takes twenty times as long as a step, and promises cannot hide it."""
    switch = DraftSwitch()
    chosen = play(switch, 60_000, plain=1.0, drafted=21.0, gain=5.0)
    tries = sum(chosen[1000:])
    assert 0 < 20 * tries < 0.05 * 59_000
    assert not switch.pays(1, 5.0)


def test_a_step_that_reads_prompts_is_no_try() -> None:
    switch = DraftSwitch()
    assert not switch.pays(1, 9.0)
    play(switch, 40, plain=1.0, drafted=1.2, gain=2.0)
    assert switch.pays(1, 2.0) and not switch.pays(1, 1.1)


def test_patience_is_worth_a_few_plain_steps() -> None:
    switch = DraftSwitch()
    assert switch.patience(1) == float("inf")
    play(switch, 40, plain=0.5, drafted=0.6, gain=2.0)
    assert switch.patience(1) == pytest.approx(8 * 0.5)
