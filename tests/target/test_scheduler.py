"""Which sequences run: fairness, chunks, pages, preemption."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from target_service.core.kv_cache import KVCache
from target_service.core.scheduler import Schedule, Scheduler, SchedulerConfig
from target_service.core.sequence import Sequence, SequenceRequest, SequenceState, SequenceTotals


def cache(pages: int = 64, page_size: int = 16) -> KVCache:
    return KVCache(pages, page_size, 1, 1, 4, 4, torch.float32, torch.device("cpu"))


def scheduler(pages: KVCache, running: int = 8, rows: int = 64, chunk: int = 32) -> Scheduler:
    return Scheduler(SchedulerConfig(max_running=running, max_step_rows=rows, prefill_chunk=chunk), pages)


def sequence(number: int, prompt: int = 8, tenant: str = "default", external: bool = False) -> Sequence:
    tokens = tuple(range(1, prompt + 1))
    wanted = SequenceRequest(tokens, SamplingParams(), VerificationMode.GREEDY, 0, 16, tenant=tenant, external=external)
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
        scheduled.trim(one)
    return played


def test_a_prompt_is_read_in_chunks_and_its_last_chunk_yields_a_token() -> None:
    scheduled = scheduler(cache(), chunk=32)
    one = sequence(1, prompt=70)
    scheduled.add(one)
    assert [play(scheduled.schedule(), scheduled) for _ in range(4)] == [[(1, 32)], [(1, 32)], [(1, 6)], [(1, 1)]]


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


def test_a_newcomer_waits_for_pages() -> None:
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
        pages.check_integrity([old.pages, young.pages])
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
        pages.check_integrity([busy.pages, idle.pages])
    assert idle.totals.preemptions > 0
    assert busy.totals.preemptions == 0
    assert busy.totals.completion_tokens > 30


@pytest.mark.parametrize("tokens", [1, 16, 17, 63])
def test_spare_rows_counts_own_and_free_pages(tokens: int) -> None:
    scheduled = scheduler(cache(pages=4, page_size=16), chunk=64)
    one = sequence(1, prompt=tokens)
    scheduled.add(one)
    scheduled.schedule()
    assert scheduled.spare_rows(one) == 64 - tokens


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
    assert scheduled.reserve_behind_trees(plan, max_context=12) and len(one.pages) == 3
    # One key more has no page, and one token more no position.
    one.pending_drafts = 3
    assert not scheduled.reserve_behind_trees(plan, max_context=100)
    assert not scheduled.reserve_behind_trees(plan, max_context=11)
