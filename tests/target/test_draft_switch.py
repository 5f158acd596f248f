"""When the engine waits for drafts, by what whole steps took: how soon the best is found, and what looking costs."""

from __future__ import annotations

import pytest

from target_service.speculation.policy.draft_switch import DraftSwitch
from target_service.speculation.policy.launch_mode import LaunchMode

# Steps within which what is best has to be found, from the first and after a change.
FOUND, FOUND_AGAIN = 64, 800


def play(
    switch: DraftSwitch,
    steps: int,
    *,
    plain: float = 1.0,
    drafted: float,
    gain: float,
    load: int = 1,
    ahead: bool = False,
) -> list[bool]:
    """Which steps waited for drafts, on a machine where steps of either kind take that long, and waiting for a draft
    makes `gain` tokens of a sequence; plain steps may be launched `ahead`."""
    chosen = []
    for _ in range(steps):
        use = switch.choose(load, gain * load, ahead=ahead, sending=0.0 if load < 9 else 10.0)
        if use is LaunchMode.WAIT_FOR_DRAFT:
            switch.observe_after(load, drafted, row_cost=1.0)
        else:
            switch.observe_plain(load, plain, ahead=ahead)
        chosen.append(use is LaunchMode.WAIT_FOR_DRAFT)
    return chosen


def play_fed(switch: DraftSwitch, gain: float, *, plain: float, drafted: float, ahead: bool) -> None:
    """Steps that feed a head, until it is known what its drafts take and not what a plain step takes without it."""
    for _ in range(100):
        use = switch.choose(1, gain, ahead=ahead)
        if switch.needs_unfed(1, ahead=ahead):
            return
        if use is LaunchMode.WAIT_FOR_DRAFT:
            switch.observe_after(1, drafted, row_cost=1.0)
        else:
            switch.observe_plain(1, plain, fed=True, ahead=ahead)
    pytest.fail("it never became known")


def pays(switch: DraftSwitch, gain: float) -> bool:
    return switch.best(1, gain) is LaunchMode.WAIT_FOR_DRAFT


def share(chosen: list[bool]) -> float:
    return sum(chosen) / len(chosen)


def lost(chosen: list[bool], drafted: float, gain: float) -> float:
    """The share of the time that is lost to the better of waiting always and never, where a plain step takes 1."""
    took = sum(drafted if waits else 1.0 for waits in chosen)
    made = sum(gain if waits else 1.0 for waits in chosen)
    return 1 - made / (took * max(1.0, gain / drafted))


@pytest.mark.parametrize("ahead", [True, False], ids=["steps ahead", "one by one"])
@pytest.mark.parametrize(
    ("drafted", "gain"),
    [
        pytest.param(1.2, 2.6, id="much is accepted"),
        pytest.param(2.2, 2.6, id="the draft takes longer than a step"),
        pytest.param(3.0, 1.2, id="hardly anything is accepted"),
        pytest.param(1.1, 1.0, id="nothing is"),
    ],
)
@pytest.mark.parametrize("load", [1, 7])
def test_what_makes_most_is_found_and_kept(drafted: float, gain: float, ahead: bool, load: int) -> None:
    switch = DraftSwitch()
    play(switch, FOUND, drafted=drafted, gain=gain, load=load, ahead=ahead)
    chosen = play(switch, 4000, drafted=drafted, gain=gain, load=load, ahead=ahead)
    assert lost(chosen, drafted, gain) < 0.03


@pytest.mark.parametrize("ahead", [True, False], ids=["steps ahead", "one by one"])
def test_a_plain_step_that_feeds_a_head_is_not_what_drafts_have_to_beat(ahead: bool) -> None:
    """Fed, a plain step takes 1.6: drafts seem to pay. Without, 1.0: they do not."""
    switch = DraftSwitch()
    play_fed(switch, 1.8, plain=1.6, drafted=2.0, ahead=ahead)
    assert pays(switch, 1.8)
    while switch.needs_unfed(1, ahead=ahead):
        switch.observe_plain(1, 1.0, ahead=ahead)
    assert not pays(switch, 1.8) and pays(switch, 2.4)
    # What is fed later says nothing.
    switch.observe_plain(1, 50.0, fed=True, ahead=ahead)
    assert not pays(switch, 1.8) and pays(switch, 2.4)


def test_first_steps_that_wait_for_kernels_to_be_compiled_decide_nothing() -> None:
    switch, seen = DraftSwitch(), 0
    for _ in range(150):
        use = switch.choose(1, 3.0, ahead=True)
        if use is LaunchMode.RUN_AHEAD:
            switch.observe_plain(1, 1.0)
            continue
        seen += 1
        # Every other one of the first few.
        switch.observe_after(1, 200.0 if seen <= 6 and seen % 2 else 1.2, row_cost=1.0)
    assert share(play(switch, 40, drafted=1.2, gain=3.0, ahead=True)) == 1.0


def test_a_few_short_steps_in_a_row_are_believed_after_long_ones() -> None:
    switch = DraftSwitch()
    play(switch, 200, drafted=9.0, gain=2.0)
    assert not pays(switch, 2.0)
    for _ in range(4):
        switch.observe_after(1, 1.2, row_cost=1.0)
    assert pays(switch, 2.0)


def test_drafts_that_often_come_too_late_are_worth_less() -> None:
    """Answered they make 2.0 in the time of 1.6; every other step waits in vain."""
    switch = DraftSwitch()
    play(switch, FOUND, drafted=1.6, gain=2.0)
    assert pays(switch, 2.0)
    for step in range(60):
        switch.observe_after(1, 1.6, row_cost=1.0, answered=bool(step % 2))
    assert not pays(switch, 2.0) and pays(switch, 2.8)


def test_plain_steps_are_timed_before_any_draft() -> None:
    chosen = play(DraftSwitch(), FOUND, drafted=1.2, gain=2.0)
    first = chosen.index(True)
    assert 4 <= first <= 16 and all(chosen[first:])


@pytest.mark.parametrize("load", [1, 7, 200])
@pytest.mark.parametrize("overhead", [0.1, 1.0, 20.0], ids=["cheap", "dear", "endless"])
def test_tries_of_drafts_that_do_not_pay_cost_little(load: int, overhead: float) -> None:
    switch = DraftSwitch()
    chosen = play(switch, 60_000, drafted=1 + overhead, gain=1.05, load=load)
    assert lost(chosen[:8000], 1 + overhead, 1.05) < (0.025 if overhead < 2 else 0.1)
    # And they go on.
    assert 0 < lost(chosen[8000:], 1 + overhead, 1.05) < 0.02


def test_the_cheaper_a_try_the_more_there_are() -> None:
    cheap, dear = (play(DraftSwitch(), 8000, drafted=1 + overhead, gain=1.0) for overhead in (0.1, 1.0))
    assert sum(cheap) > 3 * sum(dear)
    # Where many sequences have to be told of, none is cheap.
    assert sum(cheap) > 3 * sum(play(DraftSwitch(), 8000, drafted=1.1, gain=1.0, load=200))


def test_promises_do_not_hide_what_waiting_takes() -> None:
    switch = DraftSwitch()
    chosen = play(switch, 8000, drafted=21.0, gain=5.0)
    assert lost(chosen, 21.0, 5.0) < 0.1 and not pays(switch, 5.0)


def test_rows_are_not_what_drafting_costs() -> None:
    """Steps whose rows take twice a plain step's time, and nothing beyond."""
    switch, chosen = DraftSwitch(), []
    for _ in range(2 * FOUND):
        chosen.append(switch.choose(1, 1.1, ahead=False))
        if chosen[-1] is LaunchMode.WAIT_FOR_DRAFT:
            switch.observe_after(1, 2.0, row_cost=2.0)
        else:
            switch.observe_plain(1, 1.0)
    assert set(chosen[FOUND:]) == {LaunchMode.WAIT_FOR_DRAFT}


@pytest.mark.parametrize("before", [600, 3000])
def test_drafts_that_begin_to_pay_are_found_by_a_try(before: int) -> None:
    switch = DraftSwitch()
    play(switch, before, drafted=2.0, gain=1.5)
    play(switch, FOUND_AGAIN, drafted=2.0, gain=2.5)
    assert share(play(switch, 100, drafted=2.0, gain=2.5)) == 1.0


@pytest.mark.parametrize("drafted", [1.1, 1.5, 2.0, 4.0])
def test_drafts_that_no_longer_pay_are_left_at_once(drafted: float) -> None:
    switch = DraftSwitch()
    play(switch, 1000, drafted=drafted, gain=2 * drafted)
    chosen = play(switch, 400, drafted=drafted, gain=1.0)
    assert sum(chosen[:50]) < 16 and share(chosen) < 0.15


def test_a_pause_is_short_again_once_drafts_have_paid() -> None:
    switch = DraftSwitch()
    play(switch, 20_000, drafted=2.0, gain=1.5)
    play(switch, 1500, drafted=2.0, gain=3.0)
    play(switch, 100, drafted=2.0, gain=1.5)
    # Sooner than after a pause that had grown for ever.
    assert play(switch, 400, drafted=2.0, gain=2.5)[-1]


def test_a_higher_load_begins_with_what_a_lower_one_has_shown() -> None:
    """Nothing is explored again, and a few steps outweigh what was inherited."""
    switch = DraftSwitch()
    play(switch, 400, drafted=3.0, gain=1.5, load=8)
    assert share(play(switch, 200, drafted=3.0, gain=1.5, load=64)) < 0.025
    switch = DraftSwitch()
    play(switch, 400, drafted=1.1, gain=1.5, load=8)
    chosen = play(switch, 400, drafted=5.0, gain=1.5, load=64)
    assert 0 < sum(chosen) < 20 and not any(chosen[FOUND : 2 * FOUND])


def test_loads_are_told_apart() -> None:
    switch = DraftSwitch()
    assert play(switch, FOUND, drafted=1.1, gain=1.5, load=1)[-1]
    assert share(play(switch, 400, drafted=3.0, gain=1.5, load=64)[FOUND:]) < 0.1
    assert share(play(switch, 10, drafted=1.1, gain=1.5, load=1)) == 1.0


def test_a_pause_of_the_machine_does_not_count_as_what_drafts_cost() -> None:
    switch = DraftSwitch()
    play(switch, 100, drafted=1.2, gain=1.6)
    switch.observe_after(1, 500.0, row_cost=1.0)
    assert share(play(switch, 50, drafted=1.2, gain=1.6)) == 1.0


def test_a_draft_is_left_alone_between_tries() -> None:
    switch = DraftSwitch()
    play(switch, 4000, drafted=4.0, gain=1.5)
    near = []
    for _ in range(4000):
        near.append(switch.drafts_within(32))
        waits = play(switch, 1, drafted=4.0, gain=1.5)[0]
        # Whoever waits for it finds that it has followed.
        assert near[-1] or not waits
    assert 0 < share(near) < 0.3


def test_a_step_that_reads_prompts_is_no_try() -> None:
    switch = DraftSwitch()
    assert not pays(switch, 9.0)
    play(switch, 80, drafted=1.2, gain=2.0)
    assert pays(switch, 2.0) and not pays(switch, 1.1)


def test_waits_are_bounded_by_a_few_plain_steps() -> None:
    switch = DraftSwitch()
    assert switch.max_wait(1) == float("inf")
    play(switch, 80, plain=0.5, drafted=0.6, gain=2.0)
    assert 2 * 0.5 < switch.max_wait(1) < 20 * 0.5
