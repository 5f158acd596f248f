"""Rendezvous hashing with bounded load."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider_gateway.balancing import choose, ranked

ADDRESSES = [f"target-{i}:50051" for i in range(5)]


def test_ranking_is_stable_and_spreads() -> None:
    assert ranked("acme", ADDRESSES) == ranked("acme", reversed(ADDRESSES))
    firsts = Counter(ranked(f"tenant-{i}", ADDRESSES)[0] for i in range(2000))
    assert all(300 < firsts[address] < 500 for address in ADDRESSES)


def test_only_the_tenants_of_a_lost_target_move() -> None:
    left = ADDRESSES[1:]
    for i in range(200):
        before, after = ranked(f"tenant-{i}", ADDRESSES), ranked(f"tenant-{i}", left)
        assert after == [address for address in before if address != ADDRESSES[0]]


@pytest.mark.parametrize("tenants", [1, 3, 100])
@pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
def test_no_target_has_more_than_its_share(tenants: int, bound: float) -> None:
    loads = dict.fromkeys(ADDRESSES, 0)
    for i in range(400):
        loads[choose(f"tenant-{i % tenants}", loads, bound)] += 1
        assert max(loads.values()) <= bound * sum(loads.values()) / len(loads) + 1


def test_a_tenant_stays_where_it_was_while_load_allows() -> None:
    first = ranked("acme", ADDRESSES)[0]
    idle = dict.fromkeys(ADDRESSES, 0)
    assert choose("acme", idle, 1.25) == first
    busy = {**dict.fromkeys(ADDRESSES, 4), first: 5}
    assert choose("acme", busy, 1.25) == first
    assert choose("acme", {**busy, first: 9}, 1.25) == ranked("acme", ADDRESSES)[1]


def test_one_target_takes_everything() -> None:
    assert choose("acme", {"only:1": 1000}, 1.0) == "only:1"
