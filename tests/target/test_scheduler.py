"""Which sequences run: fairness, chunks, pages, preemption."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.limits import TenantLimits
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from target_service.config import TargetConfig
from target_service.core import scheduler as scheduler_module
from target_service.core.kv_cache import KVCache
from target_service.core.schedule import Schedule
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence, SequenceRequest, SequenceState, SequenceTotals
from target_service.core.sequence_pages import order_of_preemption


def cache(pages: int = 64, page_size: int = 16) -> KVCache:
    return KVCache(pages, page_size, [(1, 4, 4)], torch.float32, torch.device("cpu"))


def scheduler(pages: KVCache, running: int = 8, rows: int = 64, chunk: int = 32) -> Scheduler:
    return Scheduler(TargetConfig(max_running=running, max_step_rows=rows, prefill_chunk=chunk), pages)


def sequence(
    number: int, prompt: int = 8, tenant: str = "default", external: bool = False, limits: TenantLimits | None = None
) -> Sequence:
    # Nothing in common, so that no page is shared.
    tokens = tuple(range(1_000 * number, 1_000 * number + prompt))
    wanted = SequenceRequest(
        tokens,
        SamplingParams(),
        VerificationMode.GREEDY,
        0,
        16,
        tenant=tenant,
        limits=limits or TenantLimits(),
        external=external,
    )
    return Sequence(number, wanted, list(tokens), SequenceTotals(prompt_tokens=prompt))


def play(plan: Schedule, scheduled: Scheduler) -> list[tuple[int, int]]:
    """Do what the engine would with a step, and return (sequence, rows)."""
    played = []
    for chunk in plan.chunks:
        one = chunk.sequence
        played.append((one.sequence_id, chunk.count))
        reaches = chunk.reaches_root
        one.kv_length += chunk.count
        if reaches:
            one.token_ids.append(1)
            one.totals.completion_tokens += 1
            one.state = SequenceState.RUNNING
            one.external_tree = None
        scheduled.pages.trim(one)
    return played


def test_a_prompt_is_read_in_chunks_and_its_last_chunk_yields_a_token() -> None:
    scheduled = scheduler(cache(), chunk=32)
    one = sequence(1, prompt=70)
    scheduled.add(one)
    assert [play(scheduled.schedule(), scheduled) for _ in range(4)] == [[(1, 32)], [(1, 32)], [(1, 6)], [(1, 1)]]


def test_sequences_with_pages_in_common_stand_side_by_side() -> None:
    """In a step, and behind those that read: who comes first when rows are too few stays as it is."""
    scheduled = scheduler(cache(), running=6)
    for number in range(1, 6):
        scheduled.add(sequence(number))
    play(scheduled.schedule(), scheduled)
    for one in scheduled.running:
        one.common_page = (-1, 30, 20, 30, 20)[one.sequence_id - 1]
    late = sequence(6, prompt=3)
    late.common_page = 20
    scheduled.add(late)
    assert play(scheduled.schedule(), scheduled) == [(6, 3), (1, 1), (3, 1), (5, 1), (2, 1), (4, 1)]
    scheduled.max_step_rows = 3
    assert [number for number, _ in play(scheduled.schedule(), scheduled)] == [1, 3, 2]
    # One that gives its pages back has none in common with others.
    scheduled.preempt(scheduled.running[1])
    assert [one.common_page for one in scheduled.sequences()] == [-1, 20, 30, 20, 20, -1]


@pytest.mark.parametrize("slower", [1.0, 20.0])
def test_prompts_have_half_of_the_time_however_dear_rows_seem(slower: float) -> None:
    """Costs that were measured while the machine was busy do not keep prompts to crumbs, nor do steps that take long
    without prompts."""
    config = TargetConfig(device="cuda", max_running=8, max_step_rows=512, prefill_chunk=256, prompt_wait_ms=24)
    scheduled = Scheduler(config, cache(), cost=lambda rows: slower * (5e-3 + 5e-5 * rows))
    scheduled.add(sequence(1))
    for _ in range(4):
        play(scheduled.schedule(), scheduled)
    scheduled.times.observe_step(1, 0, 5e-3)
    scheduled.add(sequence(2, prompt=700))
    # Of 24 ms, or of two steps of 101 ms: nearly as many rows as take as long as the step without them.
    assert play(scheduled.schedule(), scheduled)[0] == (2, 256 if slower == 1.0 else 100)


@pytest.mark.parametrize(("decoding", "read"), [(2, 1100), (8, 860), (16, 380), (32, 380)])
def test_few_sequences_wait_longer_than_many_for_a_step_that_reads(decoding: int, read: int) -> None:
    """All together as long as 16 for 24 ms, each at most 60; a row takes 0.05 ms, and steps 5 besides."""
    config = TargetConfig(device="cuda", max_running=64, max_step_rows=2048)
    scheduled = Scheduler(config, cache(256), cost=lambda rows: 5e-3 + 5e-5 * rows)
    for number in range(decoding):
        scheduled.add(sequence(number))
    for _ in range(2):
        play(scheduled.schedule(), scheduled)
    scheduled.add(sequence(decoding, prompt=2000))
    assert dict(play(scheduled.schedule(), scheduled))[decoding] == pytest.approx(read, abs=decoding)


def test_who_is_read_again_behind_a_stride_feeds_the_tokens_that_are_known() -> None:
    """Preempted while several passes of its own are under way, whose tokens nobody knows yet."""
    scheduled, one = scheduler(cache()), sequence(1, prompt=20)
    one.pending, one.pending_tokens = 0, 4
    scheduled.add(one)
    [chunk] = scheduled.schedule().chunks
    assert chunk.count == len(one.feed(one.kv_length, chunk.count)) == 20


def test_decoding_goes_before_prompts() -> None:
    scheduled = scheduler(cache(), rows=33, chunk=32)
    one, two = sequence(1, prompt=3), sequence(2, prompt=90)
    scheduled.add(two)
    play(scheduled.schedule(), scheduled)
    scheduled.add(one)
    play(scheduled.schedule(), scheduled)
    assert play(scheduled.schedule(), scheduled)[0] == (1, 1) or one.state is SequenceState.RUNNING
    steps = [play(scheduled.schedule(), scheduled) for _ in range(2)]
    assert all((1, 1) in step for step in steps)


def test_a_step_says_how_much_of_all_prompts_it_leaves_unread() -> None:
    scheduled = scheduler(cache(), running=2, rows=40, chunk=32)
    for number, prompt in ((1, 50), (2, 20), (3, 7)):
        scheduled.add(sequence(number, prompt))
    steps = [scheduled.schedule()]
    play(steps[0], scheduled)
    steps.append(scheduled.schedule())
    # The second is read first and decodes beside the first; the third waits for a place.
    assert [sum(chunk.count for chunk in step.chunks) for step in steps] == [40, 31]
    assert [step.unread for step in steps] == [37, 7]


def test_a_short_prompt_goes_before_a_long_one_that_came_before() -> None:
    scheduled = scheduler(cache(), rows=32)
    scheduled.add(sequence(1, prompt=300))
    plan = scheduled.schedule()
    scheduled.count_launched(plan)
    play(plan, scheduled)
    scheduled.add(sequence(2, prompt=20))
    assert play(scheduled.schedule(), scheduled) == [(2, 20), (1, 12)]


def test_a_long_prompt_waits_for_others_that_come_for_as_long_as_it_takes_itself() -> None:
    """New short ones in every step: until as many rows were read as it has, and then it is read alone."""
    scheduled, long = scheduler(cache(512), running=64, rows=32), sequence(1, prompt=320)
    scheduled.add(long)
    read = []
    for number in range(2, 40):
        scheduled.add(sequence(number, prompt=31))
        plan = scheduled.schedule()
        scheduled.count_launched(plan)
        before = long.kv_length
        # Those that were read end at once, so that each step has all its rows for prompts.
        for one, _ in play(plan, scheduled):
            found = next(chunk.sequence for chunk in plan.chunks if chunk.sequence.sequence_id == one)
            if found is not long and found.state is SequenceState.RUNNING:
                scheduled.remove(found)
        read.append(long.kv_length - before)
        if long.state is SequenceState.RUNNING:
            break
    assert long.state is SequenceState.RUNNING
    # At most as many rows of others before it, and one step more.
    assert len(read) * 32 <= 2 * 320 + 32
    assert sum(read[:5]) <= 5 and sum(read) == 320


def test_tenants_take_turns() -> None:
    scheduled = scheduler(cache(), running=4)
    for number in (1, 2, 3):
        scheduled.add(sequence(number, tenant="loud"))
    scheduled.add(sequence(4, tenant="quiet"))
    assert [chunk.sequence.sequence_id for chunk in scheduled.schedule().chunks] == [1, 4, 2, 3]


def test_no_more_run_than_may() -> None:
    scheduled = scheduler(cache(), running=2)
    for number in range(1, 5):
        scheduled.add(sequence(number))
    assert len(scheduled.schedule().chunks) == 2
    assert scheduled.waiting == 2


def test_an_arrival_waits_for_pages() -> None:
    scheduled = scheduler(cache(pages=4))
    scheduled.add(sequence(1, prompt=40))
    play(scheduled.schedule(), scheduled)
    scheduled.add(sequence(2, prompt=40))
    assert [chunk.sequence.sequence_id for chunk in scheduled.schedule().chunks] == [1]


def test_the_youngest_gives_way_and_keeps_its_tokens() -> None:
    pages = cache(pages=4, page_size=16)
    scheduled = scheduler(pages)
    old, young = sequence(1, prompt=15), sequence(2, prompt=15)
    scheduled.add(old)
    scheduled.add(young)
    for _ in range(40):
        play(scheduled.schedule(), scheduled)
        scheduled.pages.check_integrity([old, young])
        if young.totals.preemptions:
            break
    assert young.totals.preemptions == 1
    assert young.state is SequenceState.WAITING
    assert not young.pages
    assert young.kv_length == 0
    assert young.totals.completion_tokens > 0
    assert old.totals.preemptions == 0


def test_removal_frees_pages_in_every_state() -> None:
    pages = cache()
    scheduled = scheduler(pages, running=1)
    running, waiting = sequence(1), sequence(2)
    scheduled.add(running)
    scheduled.add(waiting)
    play(scheduled.schedule(), scheduled)
    scheduled.remove(waiting)
    scheduled.remove(running)
    assert pages.used_pages == 0
    assert not list(scheduled.sequences())


def test_a_client_that_drafts_runs_only_with_a_tree() -> None:
    scheduled = scheduler(cache())
    one = sequence(1, prompt=8, external=True)
    scheduled.add(one)
    assert play(scheduled.schedule(), scheduled) == [(1, 7)]
    assert not scheduled.schedule().chunks
    one.external_tree = TokenTree.root_only(8)
    assert play(scheduled.schedule(), scheduled) == [(1, 1)]
    assert not scheduled.schedule().chunks


def test_idle_clients_take_nobodys_place() -> None:
    scheduled = scheduler(cache(), running=1)
    idle = sequence(1, external=True)
    scheduled.add(idle)
    play(scheduled.schedule(), scheduled)
    scheduled.add(sequence(2))
    assert play(scheduled.schedule(), scheduled) == [(2, 8)]


def test_idle_clients_give_way_first() -> None:
    pages = cache(pages=4, page_size=16)
    scheduled = scheduler(pages)
    busy, idle = sequence(1, prompt=15), sequence(2, prompt=30, external=True)
    scheduled.add(busy)
    scheduled.add(idle)
    for _ in range(36):
        play(scheduled.schedule(), scheduled)
        scheduled.pages.check_integrity([busy, idle])
    assert idle.totals.preemptions > 0
    assert busy.totals.preemptions == 0
    assert busy.totals.completion_tokens > 30


@pytest.mark.parametrize("tokens", [1, 16, 17, 63])
def test_spare_rows_counts_own_and_free_pages(tokens: int) -> None:
    scheduled = scheduler(cache(pages=4, page_size=16), chunk=64)
    one = sequence(1, prompt=tokens)
    scheduled.add(one)
    scheduled.schedule()
    assert scheduled.pages.spare_rows(one) == 64 - tokens


def test_only_a_free_place_admits() -> None:
    scheduled = scheduler(cache(), running=1)
    assert not scheduled.admits
    scheduled.add(sequence(1))
    assert scheduled.admits
    play(scheduled.schedule(), scheduled)
    scheduled.add(sequence(2))
    assert scheduled.waiting and not scheduled.admits


def test_pages_for_what_a_step_may_accept_are_held_before_the_next_is_launched_behind_it() -> None:
    pages = cache(pages=3, page_size=4)
    scheduled = scheduler(pages)
    one = sequence(1, prompt=8)
    scheduled.add(one)
    play(scheduled.schedule(), scheduled)
    one.kv_length, one.pending, one.pending_tokens, one.pending_drafts = 9, 0, 1, 2
    plan = scheduled.schedule()
    assert scheduled.pages.reserve_behind_trees(plan, max_context=12) and len(one.pages) == 3
    # One key more has no page, and one token more no position.
    one.pending_drafts = 3
    assert not scheduled.pages.reserve_behind_trees(plan, max_context=100)
    assert not scheduled.pages.reserve_behind_trees(plan, max_context=11)


class TestTenants:
    def test_a_short_request_does_not_wait_for_anothers_long_ones(self) -> None:
        scheduled = scheduler(cache(pages=400), running=8)
        for number in range(1, 41):
            scheduled.add(sequence(number, tenant="loud"))
        for _ in range(10):
            play(scheduled.schedule(), scheduled)
        scheduled.add(sequence(99, tenant="quiet"))
        for _ in range(5):
            assert 99 in {number for number, _ in play(scheduled.schedule(), scheduled)}
        # Whoever lost a place meanwhile kept its pages, and goes on.
        scheduled.remove(next(one for one in scheduled.running if one.sequence_id == 99))
        assert {number for number, _ in play(scheduled.schedule(), scheduled)} == set(range(1, 9))
        assert not any(one.totals.preemptions for one in scheduled.sequences())

    def test_who_waits_for_a_place_is_not_part_of_the_load(self) -> None:
        """Drafts were off for everybody while one tenant held all places, and another's sequence came beside them."""
        scheduled = scheduler(cache(pages=400), running=8)
        for number in range(1, 41):
            scheduled.add(sequence(number, tenant="loud"))
        play(scheduled.schedule(), scheduled)
        scheduled.add(sequence(99, tenant="quiet"))
        play(scheduled.schedule(), scheduled)
        assert len(scheduled.running) == 9 and scheduled.load == 8
        for one in scheduled.running[2:]:
            scheduled.remove(one)
        assert scheduled.load == 8
        for one in [one for one in scheduled.sequences() if one not in scheduled.running]:
            scheduled.remove(one)
        assert scheduled.load == 2

    @pytest.mark.parametrize("weight", [1.0, 3.0])
    def test_places_are_shared_by_weight_while_running(self, weight: float) -> None:
        scheduled = scheduler(cache(pages=2000), running=8)
        for number in range(1, 33):
            scheduled.add(sequence(number, tenant="first"))
        for _ in range(3):
            play(scheduled.schedule(), scheduled)
        for number in range(33, 65):
            scheduled.add(sequence(number, tenant="second", limits=TenantLimits(weight)))
        served = Counter[str]()
        for _ in range(50):
            served.update("second" if number > 32 else "first" for number, _ in play(scheduled.schedule(), scheduled))
        assert served["second"] / served.total() == pytest.approx(weight / (1 + weight), abs=0.03)
        assert served.total() == 50 * 8

    def test_a_tenant_runs_no_more_than_it_may_even_alone(self) -> None:
        scheduled = scheduler(cache(), running=8)
        for number in range(1, 6):
            scheduled.add(sequence(number, limits=TenantLimits(running=2)))
        for _ in range(3):
            assert len(play(scheduled.schedule(), scheduled)) == 2

    def test_a_short_prompt_is_read_beside_anothers_long_ones(self) -> None:
        scheduled = scheduler(cache(pages=1000), running=8, rows=64, chunk=32)
        for number in range(1, 5):
            scheduled.add(sequence(number, prompt=1000, tenant="loud"))
        for _ in range(4):
            play(scheduled.schedule(), scheduled)
        scheduled.add(sequence(9, prompt=30, tenant="quiet"))
        read = [count for _ in range(2) for number, count in play(scheduled.schedule(), scheduled) if number == 9]
        assert sum(read) >= 30

    def test_a_tenants_pages_are_bounded(self) -> None:
        pages = cache(pages=64, page_size=16)
        scheduled = scheduler(pages, running=8)
        bound = TenantLimits(kv_tokens=160)
        for number in range(1, 6):
            scheduled.add(sequence(number, prompt=40, limits=bound))
        for _ in range(60):
            play(scheduled.schedule(), scheduled)
            assert pages.used_pages <= 10
        # One alone still goes on to its end.
        assert max(one.totals.completion_tokens for one in scheduled.sequences()) > 40

    def test_pages_held_by_one_tenant_go_to_another_by_share(self) -> None:
        pages = cache(pages=16, page_size=16)
        scheduled = scheduler(pages, running=8)
        for number in range(1, 5):
            scheduled.add(sequence(number, prompt=50, tenant="loud"))
        for _ in range(8):
            play(scheduled.schedule(), scheduled)
        assert pages.free_pages < 3
        scheduled.add(sequence(9, prompt=40, tenant="quiet"))
        play(scheduled.schedule(), scheduled)
        assert any(one.sequence_id == 9 for one in scheduled.running)
        preempted = [one.sequence_id for one in scheduled.sequences() if one.totals.preemptions]
        assert preempted == [4]

    @pytest.mark.parametrize("seed", range(12))
    def test_everything_ends_and_no_page_is_lost(self, seed: int) -> None:
        """Random loads of three tenants that want more than there is."""
        chance = random.Random(seed)
        pages = cache(pages=24, page_size=8)
        scheduled = scheduler(pages, running=4, rows=24, chunk=16)
        shares = [TenantLimits(), TenantLimits(weight=4.0), TenantLimits(running=2, kv_tokens=96)]
        left = {}
        for number in range(1, 31):
            tenant = chance.randrange(3)
            external = chance.random() < 0.3
            one = sequence(number, chance.randint(2, 80), str(tenant), external, shares[tenant])
            left[number] = one
            scheduled.add(one)
        for _ in range(4000):
            play(scheduled.schedule(), scheduled)
            scheduled.pages.check_integrity(scheduled.sequences())
            for number, one in list(left.items()):
                if one.totals.completion_tokens >= 8:
                    scheduled.remove(left.pop(number))
                elif one.request.external and one.external_tree is None and chance.random() < 0.5:
                    scheduled.verify(one, TokenTree.root_only(one.root))
            if not left:
                break
        assert not left
        assert pages.used_pages == 0


class TestIdle:
    def fill(self, scheduled: Scheduler, count: int) -> list[Sequence]:
        idle = [sequence(number, prompt=30, tenant="idler", external=True) for number in range(1, count + 1)]
        for one in idle:
            scheduled.add(one)
        for _ in range(count):
            play(scheduled.schedule(), scheduled)
        return idle

    def test_idle_ones_that_hold_every_page_give_way_to_an_arrival(self) -> None:
        pages = cache(pages=9, page_size=16)
        scheduled = scheduler(pages)
        idle = self.fill(scheduled, 4)
        assert pages.free_pages <= 1
        scheduled.add(sequence(9, prompt=40))
        assert play(scheduled.schedule(), scheduled) == [(9, 32)]
        scheduled.pages.check_integrity(scheduled.sequences())
        assert scheduled.evicted >= 2 and not scheduled.waiting
        assert all(one.kv_length == 0 for one in idle if one.state is SequenceState.EVICTED)

    def test_an_evicted_one_wants_nothing_until_its_tree_comes(self) -> None:
        pages = cache(pages=4, page_size=16)
        scheduled = scheduler(pages)
        first, second = self.fill(scheduled, 2)
        assert first.state is SequenceState.EVICTED or second.state is SequenceState.EVICTED
        for _ in range(5):
            assert not scheduled.schedule().chunks
        gone = first if first.state is SequenceState.EVICTED else second
        scheduled.verify(gone, TokenTree.root_only(gone.root))
        assert play(scheduled.schedule(), scheduled) == [(gone.sequence_id, 29)]
        assert play(scheduled.schedule(), scheduled) == [(gone.sequence_id, 1)]
        assert gone.totals.completion_tokens == 1

    def test_an_evicted_one_can_be_removed(self) -> None:
        pages = cache(pages=4, page_size=16)
        scheduled = scheduler(pages)
        for one in self.fill(scheduled, 2):
            scheduled.remove(one)
        assert not list(scheduled.sequences()) and pages.used_pages == 0


def test_waiting_tenants_do_not_each_work_out_who_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sequence for each of many tenants that took 160 ms a step; without tokens a caller names its tenant."""
    scheduled = scheduler(cache(pages=24), running=8)
    for number in range(8):
        scheduled.add(sequence(number, prompt=33, tenant=f"running {number}"))
    for _ in range(12):
        play(scheduled.schedule(), scheduled)
    for number in range(100, 150):
        scheduled.add(sequence(number, prompt=33, tenant=f"waiting {number}"))
    worked_out = 0

    def counted(*given: Any) -> Iterator[tuple[Sequence, float]]:
        nonlocal worked_out
        worked_out += 1
        return order_of_preemption(*given)

    monkeypatch.setattr(scheduler_module, "order_of_preemption", counted)
    scheduled.schedule()
    assert 1 <= worked_out <= 4
