"""When the engine waits for drafts whose trees the host cuts, by one estimate of times and one of tokens: how soon the
best is found, and what looking costs."""

from __future__ import annotations

from math import inf

import pytest

from target_service.speculation.policy.controller import SpeculationController
from target_service.speculation.policy.launch_mode import LaunchMode
from target_service.speculation.policy.step_cost import StepCost

# Steps within which what is best has to be found, from the first and after a change.
FOUND, FOUND_AGAIN = 64, 800
# A plain pass takes 1, and rows nothing.
FREE_ROWS = StepCost([(1, 1.0), (1 << 14, 1.0)])


def controller_of(cost: StepCost = FREE_ROWS) -> SpeculationController:
    """Of an engine whose rows the host chooses."""
    return SpeculationController(0, cost, {})


def observe_plain(controller: SpeculationController, seconds: float, *, load: int = 1, fed: bool = False) -> None:
    assert controller.times is not None
    controller.times.observe_gap(load, seconds - 1, LaunchMode.RUN_AHEAD if fed else None)


def observe_waiting(
    controller: SpeculationController, seconds: float, gain: float, *, load: int = 1, rows: int = 1
) -> None:
    """A step that waited, with so many tokens and drafted rows of a sequence."""
    assert controller.times is not None
    controller.times.observe_gap(load, seconds - 1, LaunchMode.WAIT_FOR_DRAFT)
    controller.observe_cuts(load, load, rows * load, (gain - 1) * load)


def play(
    controller: SpeculationController,
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
        use = controller.choose_wait(load, load, ahead=ahead, sending=0.0 if load < 9 else 10.0)
        if use is LaunchMode.WAIT_FOR_DRAFT:
            observe_waiting(controller, drafted, gain, load=load)
        else:
            observe_plain(controller, plain, load=load)
        chosen.append(use is LaunchMode.WAIT_FOR_DRAFT)
    return chosen


def pays(controller: SpeculationController, load: int = 1) -> bool:
    return controller.choose_wait(load, load, ahead=False, timed=False) is LaunchMode.WAIT_FOR_DRAFT


def share(chosen: list[bool]) -> float:
    return sum(chosen) / len(chosen)


def lost(chosen: list[bool], drafted: float, gain: float) -> float:
    """The share of the time that is lost to the better of waiting always and never, where a plain step takes 1."""
    took = sum(drafted if waits else 1.0 for waits in chosen)
    made = sum(gain if waits else 1.0 for waits in chosen)
    return 1 - made / (took * max(1.0, gain / drafted))


@pytest.mark.pairs
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
    controller = controller_of()
    play(controller, FOUND, drafted=drafted, gain=gain, load=load, ahead=ahead)
    chosen = play(controller, 4000, drafted=drafted, gain=gain, load=load, ahead=ahead)
    assert lost(chosen, drafted, gain) < 0.03


def test_a_plain_step_that_feeds_a_head_is_not_what_drafts_have_to_beat() -> None:
    """Fed, a plain step takes 1.6: drafts seem to pay. Without, 1.0: they do not."""
    controller = controller_of()
    for _ in range(100):
        use = controller.choose_wait(1, 1, ahead=False)
        if controller.needs_unfed(1):
            break
        if use is LaunchMode.WAIT_FOR_DRAFT:
            observe_waiting(controller, 2.0, 1.8)
        else:
            observe_plain(controller, 1.6, fed=True)
    assert controller.needs_unfed(1) and pays(controller)
    while controller.needs_unfed(1):
        observe_plain(controller, 1.0)
    assert not pays(controller)
    # What is fed later says nothing.
    observe_plain(controller, 50.0, fed=True)
    assert not pays(controller)
    for _ in range(60):
        observe_waiting(controller, 2.0, 2.4)
    assert pays(controller)


def test_first_steps_that_wait_for_kernels_to_be_compiled_decide_nothing() -> None:
    controller, seen = controller_of(), 0
    for _ in range(150):
        use = controller.choose_wait(1, 1, ahead=True)
        if use is LaunchMode.RUN_AHEAD:
            observe_plain(controller, 1.0)
            continue
        seen += 1
        # Every other one of the first few.
        observe_waiting(controller, 200.0 if seen <= 6 and seen % 2 else 1.2, 3.0)
    assert share(play(controller, 40, drafted=1.2, gain=3.0, ahead=True)) == 1.0


def test_a_few_short_steps_in_a_row_are_believed_after_long_ones() -> None:
    controller = controller_of()
    play(controller, 200, drafted=9.0, gain=2.0)
    assert not pays(controller)
    for _ in range(4):
        observe_waiting(controller, 1.2, 2.0)
    assert pays(controller)


def test_drafts_that_often_come_too_late_are_worth_less() -> None:
    """Answered they make 2.0 in the time of 1.6; every other step waits in vain."""
    controller = controller_of()
    play(controller, FOUND, drafted=1.6, gain=2.0)
    assert pays(controller)
    for step in range(60):
        observe_waiting(controller, 1.6, 2.0 if step % 2 else 1.0)
    assert not pays(controller)
    for step in range(60):
        observe_waiting(controller, 1.6, 2.8 if step % 2 else 1.0)
    assert pays(controller)


def test_plain_steps_are_timed_before_any_draft() -> None:
    chosen = play(controller_of(), FOUND, drafted=1.2, gain=2.0)
    first = chosen.index(True)
    assert 4 <= first <= 16 and all(chosen[first:])


@pytest.mark.values
@pytest.mark.parametrize("load", [1, 7, 200])
@pytest.mark.parametrize("overhead", [0.1, 1.0, 20.0], ids=["cheap", "dear", "endless"])
def test_tries_of_drafts_that_do_not_pay_cost_little(load: int, overhead: float) -> None:
    controller = controller_of()
    chosen = play(controller, 24_000, drafted=1 + overhead, gain=1.05, load=load)
    assert lost(chosen[:8000], 1 + overhead, 1.05) < (0.025 if overhead < 2 else 0.1)
    # And they go on.
    assert 0 < lost(chosen[8000:], 1 + overhead, 1.05) < 0.02


def test_the_cheaper_a_try_the_more_there_are() -> None:
    cheap, dear = (play(controller_of(), 8000, drafted=1 + overhead, gain=1.0) for overhead in (0.1, 1.0))
    assert sum(cheap) > 3 * sum(dear)
    # Where many sequences have to be told of, none is cheap.
    assert sum(cheap) > 3 * sum(play(controller_of(), 8000, drafted=1.1, gain=1.0, load=200))


def test_promises_do_not_hide_what_waiting_takes() -> None:
    controller = controller_of()
    chosen = play(controller, 8000, drafted=21.0, gain=5.0)
    assert lost(chosen, 21.0, 5.0) < 0.1 and not pays(controller)


def test_rows_are_paid_for_by_what_they_bring() -> None:
    """A step with its best rows takes as long as its tokens are worth, and nothing beyond: what is dear is not waiting,
    and with rows twice as dear nothing is worth its time."""
    for price, waits in ((0.4, True), (0.8, False)):
        controller = controller_of(StepCost([(1, 1.0), (2, 1.0 + price), (64, 1.0 + 63 * price)]))
        chosen = []
        for _ in range(4 * FOUND):
            chosen.append(controller.choose_wait(1, 1, ahead=False) is LaunchMode.WAIT_FOR_DRAFT)
            if chosen[-1]:
                observe_waiting(controller, 1.0, 1.6)
            else:
                observe_plain(controller, 1.0)
        assert (share(chosen[FOUND:]) == 1.0) if waits else (share(chosen[FOUND:]) < 0.3)


# Most of a second row is paid for by the first: as fp32 products do without AVX-512.
DEAR_SECOND_ROW = StepCost([(1, 1.0), (2, 1.75), (8, 2.1), (64, 4.5)])


def wait_for_every(controller: SpeculationController, steps: int, nth: int, *, seconds: float = 1.0) -> list[bool]:
    """Which steps waited for drafts: every `nth` tree has seven right rows, the others nothing that is verified, and
    an answer takes a twelfth of a plain step of so many seconds."""
    times, chosen = controller.times, list[bool]()
    assert times is not None
    for step in range(steps):
        chosen.append(controller.choose_wait(1, 1, ahead=False) is LaunchMode.WAIT_FOR_DRAFT)
        if chosen[-1]:
            times.observe_gap(1, seconds / 12, LaunchMode.WAIT_FOR_DRAFT)
            rows = 7 if step % nth == 0 else 0
            controller.observe_cuts(1, 1, rows, rows)
        else:
            times.observe_gap(1, 0.0, None)
    return chosen


def test_a_few_trees_that_pay_for_the_others_are_waited_for() -> None:
    """One in six makes eight tokens in 2.1 steps. The mean tree, of one token more, would pay for no row."""
    chosen = wait_for_every(controller_of(DEAR_SECOND_ROW), 400, 6)
    assert share(chosen[FOUND:]) == 1.0


def test_a_draft_that_had_nothing_to_draft_from_is_followed_once_it_has() -> None:
    """What is lost by a try that finds nothing to verify is the wait alone, so tries are frequent."""
    controller = controller_of(DEAR_SECOND_ROW)
    chosen = wait_for_every(controller, 600, 1_000_000)
    # A wait is a twelfth of a step, and tries take a hundredth of the time.
    assert 0.08 < share(chosen[200:]) < 0.13
    assert any(wait_for_every(controller, 10, 1)) and share(wait_for_every(controller, 50, 1)) == 1.0


def test_a_draft_is_not_left_for_what_its_first_steps_make() -> None:
    """Of a head: a try takes the time of a dozen steps, and would come after more than a thousand."""
    controller, waited, chosen = controller_of(), 0, list[bool]()
    for _ in range(FOUND):
        chosen.append(controller.choose_wait(1, 1, ahead=False, sending=12.0) is LaunchMode.WAIT_FOR_DRAFT)
        if chosen[-1]:
            waited += 1
            observe_waiting(controller, 1.3, 1.0 if waited <= 6 else 2.5)
        else:
            observe_plain(controller, 1.0)
    assert all(chosen[chosen.index(True) :])


def test_steps_of_any_length_are_tried_as_often() -> None:
    found = []
    for seconds in (1.0, 0.03):
        controller = controller_of(StepCost([(1, seconds), (64, 64 * seconds)]))
        assert controller.times is not None
        chosen = []
        for _ in range(4000):
            use = controller.choose_wait(2, 2, ahead=False, sending=1.0)
            chosen.append(use is LaunchMode.WAIT_FOR_DRAFT)
            mode = LaunchMode.WAIT_FOR_DRAFT if chosen[-1] else None
            controller.times.observe_gap(2, 2 * seconds if chosen[-1] else 0.0, mode)
            if chosen[-1]:
                controller.observe_cuts(2, 2, 0, 0)
        found.append(chosen)
    assert found[0] == found[1] and 0.003 < share(found[0][100:]) < 0.01


def test_a_sequence_without_a_draft_makes_no_more_while_others_are_waited_for() -> None:
    controller = controller_of()
    play(controller, FOUND, drafted=1.5, gain=2.0, load=8)
    waits = [controller.choose_wait(8, drafted, ahead=False, timed=False) for drafted in (8, 6, 2)]
    assert waits == [LaunchMode.WAIT_FOR_DRAFT, LaunchMode.WAIT_FOR_DRAFT, LaunchMode.RUN_AHEAD]


def test_rows_are_priced_by_what_the_better_kind_of_step_makes() -> None:
    controller = controller_of()
    play(controller, FOUND, drafted=1.25, gain=2.5, load=4)
    assert controller.cut_rate(4, 4) == pytest.approx(4 * 2.5 / 1.25, rel=0.05)
    # Nothing is drafted there.
    assert controller.cut_rate(4, 0) == pytest.approx(4.0, rel=0.05)
    play(controller, 200, drafted=1.25, gain=1.0, load=4)
    assert controller.cut_rate(4, 4) == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("before", [600, 3000])
def test_drafts_that_begin_to_pay_are_found_by_a_try(before: int) -> None:
    controller = controller_of()
    play(controller, before, drafted=2.0, gain=1.5)
    play(controller, FOUND_AGAIN, drafted=2.0, gain=2.5)
    assert share(play(controller, 100, drafted=2.0, gain=2.5)) == 1.0


@pytest.mark.parametrize("drafted", [1.1, 1.5, 2.0, 4.0])
def test_drafts_that_no_longer_pay_are_left(drafted: float) -> None:
    """The dearer waiting is, the sooner: what a few dozen steps lose is bounded."""
    controller = controller_of()
    play(controller, 1000, drafted=drafted, gain=2 * drafted)
    chosen = play(controller, 400, drafted=drafted, gain=1.0)
    assert lost(chosen[:100], drafted, 1.0) < 0.4 and share(chosen[100:]) < 0.15


def test_a_pause_is_short_again_once_drafts_have_paid() -> None:
    controller = controller_of()
    play(controller, 20_000, drafted=2.0, gain=1.5)
    play(controller, 1500, drafted=2.0, gain=3.0)
    play(controller, 100, drafted=2.0, gain=1.5)
    # Sooner than after a pause that had grown for ever.
    assert play(controller, 400, drafted=2.0, gain=2.5)[-1]


def test_a_higher_load_begins_with_what_a_lower_one_has_shown() -> None:
    """Nothing is explored again, and a few steps outweigh what was inherited."""
    controller = controller_of()
    play(controller, 400, drafted=3.0, gain=1.5, load=8)
    assert share(play(controller, 200, drafted=3.0, gain=1.5, load=64)) < 0.025
    controller = controller_of()
    play(controller, 400, drafted=1.1, gain=1.5, load=8)
    chosen = play(controller, 400, drafted=5.0, gain=1.5, load=64)
    assert 0 < sum(chosen) < 20 and not any(chosen[FOUND : 2 * FOUND])


def test_loads_are_told_apart() -> None:
    controller = controller_of()
    assert play(controller, FOUND, drafted=1.1, gain=1.5, load=1)[-1]
    assert share(play(controller, 400, drafted=3.0, gain=1.5, load=64)[FOUND:]) < 0.1
    assert share(play(controller, 10, drafted=1.1, gain=1.5, load=1)) == 1.0


def test_a_pause_of_the_machine_does_not_count_as_what_drafts_cost() -> None:
    controller = controller_of()
    play(controller, 100, drafted=1.2, gain=1.6)
    observe_waiting(controller, 500.0, 1.6)
    assert share(play(controller, 50, drafted=1.2, gain=1.6)) == 1.0


def test_a_draft_is_left_alone_between_tries() -> None:
    controller = controller_of()
    play(controller, 4000, drafted=4.0, gain=1.5)
    near = []
    for _ in range(4000):
        near.append(controller.keeps_cuts(32))
        waits = play(controller, 1, drafted=4.0, gain=1.5)[0]
        # Whoever waits for it finds that it has followed.
        assert near[-1] or not waits
    assert 0 < share(near) < 0.3


def test_a_step_that_reads_prompts_is_no_try() -> None:
    controller = controller_of()
    assert not pays(controller)
    play(controller, 80, drafted=1.2, gain=2.0)
    assert pays(controller)
    play(controller, 80, drafted=1.2, gain=1.1)
    assert not any(pays(controller) for _ in range(4000))


def test_another_draft_begins_without_what_was_observed_of_the_last() -> None:
    controller = controller_of()
    play(controller, 2000, drafted=1.5, gain=1.0)
    assert not pays(controller)
    controller.forget_draft()
    assert share(play(controller, FOUND, drafted=1.5, gain=2.0)) == 1.0


def test_waits_are_bounded_by_a_few_plain_steps() -> None:
    controller = controller_of(StepCost([(1, 0.4)]))
    assert controller.longest_wait(1) == inf
    assert controller.times is not None
    for _ in range(8):
        controller.times.observe_gap(1, 0.1, None)
    assert 2 * 0.5 < controller.longest_wait(1) < 20 * 0.5


def test_without_costs_every_step_waits() -> None:
    controller = SpeculationController(0, None, {})
    assert all(controller.choose_wait(1, 1, ahead=True) is LaunchMode.WAIT_FOR_DRAFT for _ in range(50))
    assert controller.longest_wait(1) == inf and controller.cut_rate(1, 1) == 0.0
