"""Shares of places: nobody takes the last ones, whatever others did before."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.admission.shares import PEER_FACTOR, TENANT_FACTOR, OwnCounts, Shares
from outrider.errors import QuotaExceeded

FACTORS = {"tenant": TENANT_FACTOR, "peer": PEER_FACTOR}


def take_all(shares: Shares, **holders: str) -> int:
    """What a holder gets that asks until it is refused."""
    taken = 0
    with contextlib.suppress(QuotaExceeded):
        while True:
            shares.reserve(**holders)
            taken += 1
    return taken


def test_one_holder_gets_three_quarters_and_others_still_get_some() -> None:
    shares = Shares("answers", 256, FACTORS)
    assert take_all(shares, tenant="a", peer="here") == 192
    # From the same peer, as behind a proxy.
    assert take_all(shares, tenant="b", peer="here") > 16
    assert take_all(shares, tenant="c", peer="there") >= 8
    assert shares.taken < 256


@pytest.mark.parametrize("tenants", [2, 5])
def test_many_holders_leave_some_too(tenants: int) -> None:
    """Once places come back, however those who came first had filled them."""
    shares = Shares("answers", 256, {"tenant": TENANT_FACTOR})
    for _ in range(20):
        for name in map(str, range(tenants)):
            shares.give_back((shares.held("tenant", name) + 1) // 2, tenant=name)
            take_all(shares, tenant=name)
    assert shares.total - shares.taken >= 256 // (2 * (1 + TENANT_FACTOR * tenants))
    assert take_all(shares, tenant="late") > 0


def test_names_that_a_peer_invents_get_it_no_more_than_its_share() -> None:
    shares = Shares("answers", 256, FACTORS)
    for number in range(1000):
        take_all(shares, tenant=str(number), peer="here")
    assert shares.held("peer", "here") <= 256 * PEER_FACTOR / (1 + PEER_FACTOR) + 1
    shares.reserve(tenant="other", peer="there")


def test_a_few_places_are_all_of_use() -> None:
    for total in (1, 2, 3):
        assert take_all(Shares("answers", total, FACTORS), tenant="a", peer="here") == total
    assert take_all(Shares("answers", 4, FACTORS), tenant="a", peer="here") == 3


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 9)), max_size=60), st.data())
def test_what_is_given_back_is_free_again(asked: list[tuple[str, str, int]], data: st.DataObject) -> None:
    counts = OwnCounts()
    shares, held = Shares("answers", 40, FACTORS, counts), []
    for tenant, peer, count in asked:
        if held and data.draw(st.booleans()):
            given_tenant, given_peer, given_count = held.pop(data.draw(st.integers(0, len(held) - 1)))
            shares.give_back(given_count, tenant=given_tenant, peer=given_peer)
        before = shares.taken
        try:
            shares.reserve(count, tenant=tenant, peer=peer)
        except QuotaExceeded:
            assert shares.taken == before
        else:
            held.append((tenant, peer, count))
        assert shares.taken == sum(count for *_, count in held) <= shares.total
    for tenant, peer, count in held:
        shares.give_back(count, tenant=tenant, peer=peer)
    assert shares.taken == 0
    assert not counts._held
