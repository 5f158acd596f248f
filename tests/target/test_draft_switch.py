"""When the engine waits for drafts, by what whole steps took."""

from __future__ import annotations

from itertools import groupby

import pytest

from target_service.draft_switch import DraftSwitch
from target_service.draft_times import Promise, Use


def play(switch: DraftSwitch, steps: int, *, plain: float, drafted: float, gain: float, load: int = 1) -> list[bool]:
    """Which steps waited for drafts, on a machine where steps of either kind take that long."""
    chosen = []
    for _ in range(steps):
        use = switch.choose(load, promise(gain * load), ahead=False, telling=0.0 if load < 9 else 10.0)
        if use is Use.AFTER:
            switch.observe_after(load, drafted, row_cost=1.0)
        else:
            switch.observe_plain(load, plain)
        chosen.append(use is Use.AFTER)
    return chosen


def promise(after: float, ahead: float = 0.0) -> Promise:
    return Promise(after, ahead)


def play_ahead(
    switch: DraftSwitch, steps: int, *, plain: float, drafted: float, pair: float, gains: Promise
) -> list[Use]:
    """The same where steps may be launched behind the one under way; each pair counts as one step."""
    chosen = []
    for _ in range(steps):
        use = switch.choose(1, gains, ahead=True)
        if use is Use.AFTER:
            switch.observe_after(1, drafted, row_cost=1.0)
        elif use is Use.AHEAD:
            switch.observe_ahead(1, pair)
        else:
            switch.observe_plain(1, plain)
        chosen.append(use)
    return chosen


def play_fed(switch: DraftSwitch, gains: Promise, *, plain: float, drafted: float, ahead: bool) -> None:
    """Steps that feed a head, until it is known what its drafts take and not what a plain step takes without it."""
    for _ in range(100):
        use = switch.choose(1, gains, ahead=ahead, guesses=False)
        if switch.to_be_unfed(1, ahead=ahead):
            return
        if use is Use.AFTER:
            switch.observe_after(1, drafted, row_cost=1.0)
        else:
            switch.observe_plain(1, plain, fed=True, ahead=ahead)
    pytest.fail("it never became known")


@pytest.mark.parametrize(
    ("drafted", "pair", "gains", "use"),
    [
        pytest.param(2.2, 2.05, Promise(2.6, 3.0), Use.AHEAD, id="the draft takes longer than a step"),
        pytest.param(1.2, 2.05, Promise(2.6, 3.0), Use.AFTER, id="the draft is quick"),
        pytest.param(3.0, 2.05, Promise(1.2, 2.05), Use.PLAIN, id="nothing is accepted"),
        pytest.param(3.0, 3.2, Promise(2.6, 3.0), Use.PLAIN, id="the host is in the way"),
    ],
)
def test_drafts_are_used_in_the_way_that_makes_most(drafted: float, pair: float, gains: Promise, use: Use) -> None:
    chosen = play_ahead(DraftSwitch(), 400, plain=1.0, drafted=drafted, pair=pair, gains=gains)
    assert max(Use, key=chosen[100:].count) is use
    # Each was tried.
    assert {Use.AFTER, Use.AHEAD} <= set(chosen)


def test_drafts_in_hand_have_to_be_worth_what_a_pair_takes_beyond_two_steps() -> None:
    switch = DraftSwitch()
    before = switch.premium(1)
    play_ahead(switch, 400, plain=1.0, drafted=2.0, pair=2.3, gains=Promise(1.0, 2.0))
    assert before > switch.premium(1) == pytest.approx(0.3, abs=0.01)


def test_behind_a_pass_a_draft_is_waited_for_until_another_would_be_as_good() -> None:
    switch, much, little = DraftSwitch(), Promise(1.0, 3.0), Promise(1.0, 2.0)
    play_ahead(switch, 200, plain=1.0, drafted=9.0, pair=2.2, gains=much)
    for _ in range(200):
        switch.observe_launching(0.25)
    assert switch.patience_ahead(1, much, left=0.8, answers_in=1.0) == pytest.approx(1.3, abs=0.05)
    assert switch.patience_ahead(1, much, left=-3.0, answers_in=0.0) == 0.0
    # Where it comes later than that, or makes little, the device is not kept waiting.
    assert switch.patience_ahead(1, much, left=0.8, answers_in=5.0) == pytest.approx(0.55, abs=0.05)
    assert switch.patience_ahead(1, little, left=0.8, answers_in=1.0) == pytest.approx(0.55, abs=0.05)


def test_drafts_in_hand_are_looked_at_unless_waiting_for_all_makes_more() -> None:
    switch, gains = DraftSwitch(), Promise(2.5, 2.6)
    play_ahead(switch, 200, plain=1.0, drafted=1.1, pair=2.2, gains=gains)
    assert switch.choose_in_hand(1, gains) is Use.AFTER
    # As when texts seldom repeat themselves.
    assert switch.choose_in_hand(1, Promise(1.05, 2.0)) is Use.AHEAD
    assert switch.choose_in_hand(2, gains) is Use.AHEAD


@pytest.mark.parametrize("ahead", [True, False], ids=["steps ahead", "one by one"])
def test_a_plain_step_that_feeds_a_head_is_not_what_drafts_have_to_beat(ahead: bool) -> None:
    """Fed, a plain step takes 1.6: drafts seem to pay. Without, 1.0: they do not."""
    switch, gains = DraftSwitch(), promise(1.8)
    play_fed(switch, gains, plain=1.6, drafted=2.0, ahead=ahead)
    assert switch.best(1, gains, ahead=False) is Use.AFTER
    while switch.to_be_unfed(1, ahead=ahead):
        switch.observe_plain(1, 1.0, ahead=ahead)
    assert switch.best(1, gains, ahead=False) is Use.PLAIN
    assert switch.best(1, promise(2.4), ahead=False) is Use.AFTER
    # What is fed later says nothing.
    switch.observe_plain(1, 50.0, fed=True, ahead=ahead)
    assert switch.plain_seconds(1) == pytest.approx(1.0)


def test_a_draft_whose_answers_never_come_while_a_step_runs_is_waited_for() -> None:
    switch, gains, chosen = DraftSwitch(), Promise(3.5, 3.6), []
    for _ in range(200):
        use = switch.choose(1, gains, ahead=True)
        if use is Use.AFTER:
            switch.observe_after(1, 2.0, row_cost=1.0)
        elif use is Use.AHEAD:
            switch.observe_missed(1)
        else:
            switch.observe_plain(1, 1.0)
        chosen.append(use)
    assert chosen.count(Use.AHEAD) == 32
    assert set(chosen[100:]) == {Use.AFTER}


def test_guesses_are_worth_less_the_seldomer_there_is_a_tree_in_time() -> None:
    switch, gains = DraftSwitch(), Promise(1.0, 2.6)
    play_ahead(switch, 200, plain=1.0, drafted=9.0, pair=2.2, gains=gains)
    times = switch._at(1)
    always = times.gain(Use.AHEAD, 1, gains)
    for _ in range(3):
        switch.observe_missed(1)
    seldom = times.gain(Use.AHEAD, 1, gains)
    assert always > seldom > 1.0
    # It is the pair that says whether a tree is worth waiting for.
    assert times.gain_of_pair(1, gains) == pytest.approx(always, abs=0.01)


@pytest.mark.parametrize("way", [Use.AFTER, Use.AHEAD])
def test_first_steps_that_wait_for_kernels_to_be_compiled_decide_nothing(way: Use) -> None:
    switch, seen = DraftSwitch(), 0
    gains = Promise(3.0, 2.0) if way is Use.AFTER else Promise(1.0, 3.0)
    for _ in range(150):
        use = switch.choose(1, gains, ahead=True)
        if use is Use.PLAIN:
            switch.observe_plain(1, 1.0)
            continue
        # Every other one of the first few.
        seen += use is way
        slow = 200.0 if use is way and seen <= 6 and seen % 2 else 1.2
        if use is Use.AFTER:
            switch.observe_after(1, slow, row_cost=1.0)
        else:
            switch.observe_ahead(1, 1.0 + slow)
    assert switch.choose(1, gains, ahead=True) is way


def test_a_few_short_steps_in_a_row_are_believed_after_long_ones() -> None:
    switch, gains = DraftSwitch(), Promise(2.0, 2.0)
    play_ahead(switch, 60, plain=1.0, drafted=9.0, pair=2.5, gains=gains)
    times = switch._at(1)
    assert times.overhead.value == pytest.approx(8.0)
    for _ in range(4):
        switch.observe_after(1, 1.2, row_cost=1.0)
    assert times.overhead.value == pytest.approx(0.2)


def test_drafts_that_often_come_too_late_are_worth_less() -> None:
    """Answered they make 2.0 in the time of 1.6; every other step waits in vain."""
    switch = DraftSwitch()
    play(switch, 50, plain=1.0, drafted=1.6, gain=2.0)
    assert pays(switch, 2.0)
    for step in range(60):
        switch.observe_after(1, 1.6, row_cost=1.0, answered=bool(step % 2))
    assert not pays(switch, 2.0) and pays(switch, 2.8)


def pays(switch: DraftSwitch, after: float) -> bool:
    return switch.best(1, promise(after), ahead=False) is not Use.PLAIN


def runs(chosen: list[bool]) -> list[tuple[bool, int]]:
    return [(waits, len(list(group))) for waits, group in groupby(chosen)]


def test_plain_steps_are_timed_before_any_draft() -> None:
    assert runs(play(DraftSwitch(), 100, plain=1.0, drafted=1.2, gain=2.0)) == [(False, 8), (True, 92)]


@pytest.mark.parametrize("load", [1, 7, 200])
@pytest.mark.parametrize("overhead", [0.1, 1.0], ids=["cheap", "dear"])
def test_tries_of_drafts_that_do_not_pay_cost_little(load: int, overhead: float) -> None:
    chosen = play(DraftSwitch(), 8000, plain=1.0, drafted=1 + overhead, gain=1.05, load=load)
    pauses = [length for waits, length in runs(chosen)[2:-1] if not waits]
    assert pauses[0] < 0.6 * pauses[1]
    assert overhead * sum(chosen) < 0.025 * len(chosen)
    # The cheaper a try, the sooner the next; where many sequences have to be told of, it is not cheap.
    assert (max(pauses) < 450 * overhead + 20) is (load < 9)


def test_rows_are_not_what_drafting_costs() -> None:
    """Steps whose rows take twice a plain step's time, and nothing beyond."""
    switch = DraftSwitch()
    for _ in range(60):
        if switch.choose(1, promise(1.1), ahead=False) is Use.AFTER:
            switch.observe_after(1, 2.0, row_cost=2.0)
        else:
            switch.observe_plain(1, 1.0)
    assert switch.choose(1, promise(1.1), ahead=False) is Use.AFTER


def test_drafts_that_begin_to_pay_are_found_by_a_try() -> None:
    switch = DraftSwitch()
    play(switch, 600, plain=1.0, drafted=2.0, gain=1.5)
    chosen = play(switch, 1200, plain=1.0, drafted=2.0, gain=2.5)
    assert chosen[-1] and sum(chosen) > 100


def test_a_pause_is_short_again_once_drafts_have_paid() -> None:
    switch = DraftSwitch()
    play(switch, 3000, plain=1.0, drafted=2.0, gain=1.5)
    play(switch, 1500, plain=1.0, drafted=2.0, gain=3.0)
    chosen = play(switch, 600, plain=1.0, drafted=2.0, gain=1.5)
    pauses = [length for waits, length in runs(chosen) if not waits]
    assert pauses[0] < 0.6 * 400


def test_a_higher_load_begins_with_what_a_lower_one_has_shown() -> None:
    """Nothing is explored again, and a few steps outweigh what was inherited."""
    switch = DraftSwitch()
    play(switch, 400, plain=1.0, drafted=3.0, gain=1.5, load=8)
    assert sum(play(switch, 200, plain=1.0, drafted=3.0, gain=1.5, load=64)) < 5
    switch = DraftSwitch()
    play(switch, 400, plain=1.0, drafted=1.1, gain=1.5, load=8)
    chosen = play(switch, 400, plain=1.0, drafted=5.0, gain=1.5, load=64)
    assert chosen[60] is False and 0 < sum(chosen) < 20


def test_loads_are_told_apart() -> None:
    switch = DraftSwitch()
    assert play(switch, 50, plain=1.0, drafted=1.1, gain=1.5, load=1)[-1]
    assert sum(play(switch, 200, plain=1.0, drafted=3.0, gain=1.5, load=64)[16:]) < 30
    assert play(switch, 2, plain=1.0, drafted=1.1, gain=1.5, load=1)[-1]


def test_a_pause_of_the_machine_does_not_count_as_what_drafts_cost() -> None:
    switch = DraftSwitch()
    play(switch, 100, plain=1.0, drafted=1.2, gain=1.6)
    switch.observe_after(1, 500.0, row_cost=1.0)
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
    assert not pays(switch, 5.0)


def test_a_step_that_reads_prompts_is_no_try() -> None:
    switch = DraftSwitch()
    assert not pays(switch, 9.0)
    play(switch, 80, plain=1.0, drafted=1.2, gain=2.0)
    assert pays(switch, 2.0) and not pays(switch, 1.1)


def test_patience_is_worth_a_few_plain_steps() -> None:
    switch = DraftSwitch()
    assert switch.patience(1) == float("inf")
    play(switch, 80, plain=0.5, drafted=0.6, gain=2.0)
    assert switch.patience(1) == pytest.approx(8 * 0.5)
