"""Limits that several processes hold together: one decision, whoever takes a place, and nothing left by the dead."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.admission.pacing import OwnRefusalTimes, RefusalPace
from outrider.admission.shares import OwnCounts, Shares
from outrider.errors import QuotaExceeded
from outrider_gateway.config import GatewayConfig
from outrider_gateway.workers.places import PlacesInMemory, memory_bytes
from outrider_gateway.workers.shared_counts import SharedCounts, region_words
from outrider_gateway.workers.shared_memory import WORD_BYTES, SharedMemory
from outrider_gateway.workers.shared_refusals import TABLE_WORDS, SharedRefusalTimes

FACTORS = {"tenant": 3, "peer": 7}
WORKERS, SECRET = 3, b"secret"


def counts_of(workers: int, most_holders: int) -> list[SharedCounts]:
    """The counts of each process over the same memory."""
    memory = SharedMemory.create(WORD_BYTES * workers * region_words(most_holders))
    views = [SharedMemory(memory.descriptor, memory.size) for _ in range(workers)]
    return [SharedCounts(view, workers, own, most_holders, SECRET) for own, view in enumerate(views)]


@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 9), st.integers(0, 5)), max_size=80), st.data())
def test_processes_decide_as_one_does(asked: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Whoever asks, it is what a single process would have answered; and a dead one's places are free again."""
    one = Shares("answers", 24, FACTORS)
    views = counts_of(WORKERS, 60)
    several = [Shares("answers", 24, FACTORS, counts) for counts in views]
    held: list[tuple[int, str, str, int]] = []
    for worker, holder, count in asked:
        tenant, peer = f"tenant {holder}", f"peer {holder % 3}"
        if held and not count:
            worker, tenant, peer, count = held.pop(data.draw(st.integers(0, len(held) - 1)))
            for shares in (one, several[worker]):
                shares.give_back(count, tenant=tenant, peer=peer)
        else:
            refusals = []
            for shares in (one, several[worker]):
                try:
                    shares.reserve(count or 1, tenant=tenant, peer=peer)
                    refusals.append("")
                except QuotaExceeded as error:
                    refusals.append(error.message)
            assert refusals[0] == refusals[1]
            if not refusals[0]:
                held.append((worker, tenant, peer, count or 1))
        for shares in several:
            assert shares.taken == one.taken
            assert shares.held("tenant", tenant) == one.held("tenant", tenant)
    views[0].clear(1)
    left = Counter({tenant: 0 for _, tenant, _, _ in held})
    for worker, tenant, _, count in held:
        left[tenant] += count * (worker != 1)
    assert several[0].taken == left.total() and views[2].taken_by(1) == 0
    assert all(several[2].held("tenant", tenant) == count for tenant, count in left.items())


def test_more_holders_than_there_is_room_for_are_an_error_and_no_loop() -> None:
    (counts,) = counts_of(1, 1)
    with pytest.raises(ValueError, match="more holders"):
        for number in range(100):
            counts.add(1, {"tenant": str(number)})


def test_the_worker_with_most_of_a_holder_is_found() -> None:
    first, second, _ = counts_of(WORKERS, 8)
    first.add(2, {"peer": "a"})
    second.add(3, {"peer": "a"})
    second.add(9, {"peer": "b"})
    assert first.most_held_by("peer", "a") == (1, 3)
    assert first.most_held_by("peer", "nobody")[1] == 0


@pytest.mark.parametrize("workers", [1, 4])
def test_the_memory_of_a_gateway_is_as_large_as_its_parts(workers: int) -> None:
    config = GatewayConfig(max_running=5, max_connections=7)
    memory = SharedMemory.create(memory_bytes(config, workers))
    places = PlacesInMemory.of(config, workers, 0, memory, SECRET)
    places.places.answers.reserve(3, tenant="a", peer="b")
    places.adopted.integers[0] = 2
    with pytest.raises(ValueError, match="are wanted"):
        memory.part(1)
    places.clear(0)
    assert places.places.answers.taken == 0 and not any(places.adopted.integers)


def test_refusals_have_one_pace_in_all_processes() -> None:
    memory = SharedMemory.create(WORD_BYTES * TABLE_WORDS)
    views = [SharedMemory(memory.descriptor, memory.size) for _ in range(2)]
    several = [RefusalPace(8, SharedRefusalTimes(view, SECRET)) for view in views]
    one = RefusalPace(8, OwnRefusalTimes())
    for number in range(200):
        now = 1000.0 + number / 100
        assert several[number % 2]._delay("loud", 1.0, now) == one._delay("loud", 1.0, now)
    # Others are refused at once.
    assert several[0]._delay("quiet", 1.0, 1002.0) <= 0 < several[1]._delay("loud", 1.0, 1002.0)


def test_times_of_refusals_take_no_more_memory_for_more_callers() -> None:
    times = SharedRefusalTimes(SharedMemory.create(WORD_BYTES * TABLE_WORDS), SECRET)
    for number in range(3 * TABLE_WORDS):
        times.put(str(number), 100.0 + number)
    # What is forgotten is what is past soonest.
    assert times.get(str(3 * TABLE_WORDS - 1), 0.0) == 100.0 + 3 * TABLE_WORDS - 1
    assert times.get("0", 7.0) == 7.0


_PROCESS = """
import sys
from outrider.admission.shares import Shares
from outrider.errors import QuotaExceeded
from outrider_gateway.workers.shared_counts import SharedCounts
from outrider_gateway.workers.shared_memory import SharedMemory
descriptor, size, own = map(int, sys.argv[1:])
shares = Shares("answers", 3, {"tenant": 3}, SharedCounts(SharedMemory(descriptor, size), 2, own, 4, b"secret"))
taken = 0
for turn in range(4000):
    try:
        shares.reserve(tenant="a")
    except QuotaExceeded:
        continue
    taken += 1
    assert shares.taken <= 3, shares.taken
    if taken % 2 == 0:
        shares.give_back(2, tenant="a")
if taken % 2:
    shares.give_back(tenant="a")
print(taken)
"""


def test_places_are_never_given_twice_by_processes_at_the_same_time() -> None:
    memory = SharedMemory.create(WORD_BYTES * 2 * region_words(4))
    command = [sys.executable, "-c", _PROCESS, str(memory.descriptor), str(memory.size)]
    running = [
        subprocess.Popen([*command, str(own)], stdout=subprocess.PIPE, pass_fds=(memory.descriptor,), text=True)
        for own in range(2)
    ]
    taken = [int(one.communicate()[0]) for one in running]
    assert [one.returncode for one in running] == [0, 0] and min(taken) > 0
    after = SharedCounts(memory, 2, None, 4, SECRET)
    assert (after.taken, after.held("tenant", "a")) == (0, 0)


def test_own_counts_forget_holders_without_places() -> None:
    counts = OwnCounts()
    counts.add(2, {"tenant": "a"})
    counts.add(-2, {"tenant": "a"})
    assert (counts.taken, counts.held("tenant", "a"), len(counts._held)) == (0, 0, 0)
