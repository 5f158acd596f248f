"""Weighted fair queuing: who gets how much of what there is, step after step."""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random
from statistics import fmean

import pytest

from outrider.limits import TenantLimits
from target_service.core.fairness import FairShare, TimeShares


def served(fair: FairShare, wanted: dict[str, list[int]], weights: dict[str, float], room: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for tenant, amount in fair.divide(wanted, {name: TenantLimits(weights.get(name, 1.0)) for name in wanted}, room):
        total[tenant] += amount
    return total


def over_steps(wanted: dict[str, list[int]], weights: dict[str, float], room: int, steps: int) -> Counter[str]:
    fair, total = FairShare(), Counter[str]()
    for _ in range(steps):
        total += served(fair, wanted, weights, room)
    return total


def test_one_who_asks_for_little_gets_it_from_the_first_step_on() -> None:
    fair = FairShare()
    for _ in range(3):
        assert served(fair, {"loud": [1] * 300, "quiet": [1]}, {}, 64) == {"loud": 63, "quiet": 1}


@pytest.mark.parametrize("weights", [{}, {"a": 3.0}, {"a": 0.25, "b": 8.0}], ids=str)
def test_over_time_each_gets_by_its_weight(weights: dict[str, float]) -> None:
    total = over_steps({"a": [1] * 64, "b": [1] * 64, "c": [1] * 64}, weights, 7, 600)
    whole = sum(weights.get(name, 1.0) for name in "abc")
    for name in "abc":
        assert total[name] == pytest.approx(600 * 7 * weights.get(name, 1.0) / whole, abs=8)


def test_more_tenants_than_places_take_turns() -> None:
    wanted = {str(number): [1] * 8 for number in range(100)}
    total = over_steps(wanted, {"0": 100.0}, 4, 1000)
    assert min(total[str(number)] for number in range(1, 100)) >= 15


def test_items_of_many_sizes_are_shared_by_size() -> None:
    total = over_steps({"long": [256] * 10, "short": [10] * 60}, {}, 512, 50)
    assert total["long"] == pytest.approx(total["short"], rel=0.05)


def test_who_waits_for_nothing_saves_nothing_up() -> None:
    fair = FairShare()
    for _ in range(100):
        served(fair, {"steady": [1] * 8, "rare": [1]}, {}, 4)
    # A burst after a modest time gets its half, and not the whole for a hundred steps.
    total = Counter[str]()
    for _ in range(10):
        total += served(fair, {"steady": [1] * 8, "rare": [1] * 8}, {}, 4)
    assert total["steady"] >= 19


def test_an_arrival_begins_level() -> None:
    fair = FairShare()
    for _ in range(100):
        served(fair, {"old": [1] * 8, "other": [1] * 8}, {}, 4)
    total = Counter[str]()
    for _ in range(30):
        total += served(fair, {"old": [1] * 8, "other": [1] * 8, "new": [1] * 8}, {}, 3)
    assert {name: count for name, count in total.items() if not 28 <= count <= 32} == {}


def request_times(steps: int, weight: float, requests: int = 400) -> list[float]:
    """Seconds of requests of `steps` steps of one second that come one after the other, at any time of a step, while
    another tenant uses all the time that steps may take."""
    shares = {"crowd": TenantLimits(1.0), "few": TenantLimits(weight)}
    times, random, found = TimeShares(), Random(steps), list[float]()
    for _ in range(requests):
        between = times.longest_step({"crowd": 20.0}, shares)
        between = 20.0 if between == inf else between
        times.count_step({"crowd"}, between)
        spent = between * random.random()
        for _ in range(steps):
            step = times.longest_step({"crowd": 20.0, "few": 1.0}, shares)
            times.count_step({"crowd", "few"}, step)
            spent += step
        found.append(spent)
    # The first one finds a step that began before anybody knew of it.
    return found[1:]


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("steps", [2, 3, 16])
def test_a_request_takes_at_most_as_much_longer_as_its_tenants_share_says(steps: int, weight: float) -> None:
    longest = max(request_times(steps, weight))
    bound = steps * (1.0 + weight) / weight
    # Less is not owed: the others have most of their part in steps.
    assert 0.75 * bound <= longest <= bound


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_request_of_one_step_waits_for_one_of_the_others(weight: float) -> None:
    found = request_times(1, weight)
    assert fmean(found) <= 1.15 * (1.0 + weight) / weight
    assert max(found) <= 1.0 + (1.0 + weight) / weight


CROWD_AND_FEW = {"crowd": 20.0, "few": 1.0}
EQUAL = {"crowd": TenantLimits(), "few": TenantLimits()}


def interrupted(seconds: float) -> TimeShares:
    """One tenant's step of so many seconds, during which another's request arrives."""
    times = TimeShares()
    times.longest_step({"crowd": 20.0}, EQUAL)
    times.count_step({"crowd"}, seconds)
    return times


def test_an_owed_wait_is_made_up_for_once() -> None:
    times, steps = interrupted(20.0), list[float]()
    for _ in range(8):
        steps.append(times.longest_step(CROWD_AND_FEW, EQUAL))
        times.count_step(CROWD_AND_FEW, steps[-1])
    # It arrived during a step of 20 seconds, and is owed no more than one step of its share.
    assert steps == [1.25, 1.25, 1.25, 1.5, *[1.75] * 4]


def test_a_step_that_does_not_begin_makes_up_for_nothing() -> None:
    times = interrupted(1.0)
    # Its schedule is dropped, as where pages are short.
    assert [times.longest_step(CROWD_AND_FEW, EQUAL) for _ in range(3)] == [1.25] * 3
    times.count_step(CROWD_AND_FEW, 1.25)
    assert times.longest_step(CROWD_AND_FEW, EQUAL) == 1.25
    times.count_step(CROWD_AND_FEW, 1.25)
    assert times.longest_step(CROWD_AND_FEW, EQUAL) == 1.75


def test_a_bound_of_a_dropped_step_is_not_the_next_ones() -> None:
    times = interrupted(1.0)
    times.longest_step(CROWD_AND_FEW, EQUAL)
    # The request is cancelled before its step begins.
    times.unbounded()
    times.count_step({"crowd"}, 1.0)
    assert not times.shared


def test_who_ran_by_itself_did_not_wait_for_its_own_step() -> None:
    times = TimeShares()
    # As long as there is no other tenant, nothing is bounded.
    times.count_step({"few"}, 1.0)
    assert times.longest_step(CROWD_AND_FEW, EQUAL) == 1.75 * 1.0


def test_who_has_no_part_in_a_step_is_owed_it() -> None:
    times = interrupted(0.0)
    times.longest_step(CROWD_AND_FEW, EQUAL)
    # As where a tenant gets one alone.
    times.count_step({"crowd"}, 0.5)
    assert times.longest_step(CROWD_AND_FEW, EQUAL) == 1.25
    times.count_step(CROWD_AND_FEW, 1.25)
    assert times.longest_step(CROWD_AND_FEW, EQUAL) == 1.75
