"""Models with recurrent layers share pages where a state is kept behind them: answers do not depend on it (fp32)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conftest import make_tiny
from engine_harness import DEVICE_SEQUENCES, engine_config, knowing_tree, make_runner, plain, plain_each, request, run
from lasting_engine import Engine
from recurrent_models import RECURRENT
from transformers import PreTrainedModel

from target_service.core import sequence_pages

SHARED = [(7 * i) % 200 + 3 for i in range(40)]
# Longer than what is kept of nodes, so that it becomes part of the state at once.
LONG = [(11 * i) % 190 + 5 for i in range(80)]


@cache
def made(name: str) -> PreTrainedModel:
    model_type, settings = RECURRENT[name]
    return make_tiny(model_type, **settings)


def engine_of(name: str = "lfm2", config: Any = None, **sizes: int) -> Engine:
    return Engine(make_runner(made(name), **sizes), config)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("lfm2", 4), ("lfm2", 16), ("qwen3_next", 4), ("jamba", 16), ("minimax", 16), ("kimi_linear", 16), ("zaya", 4)],
)
def test_the_third_of_those_that_begin_alike_goes_on_from_where_they_part(name: str, page_size: int) -> None:
    """The second shows where that is, and reads it once more."""
    engine, shared = engine_of(name, page_size=page_size), len(SHARED) // page_size * page_size
    for place, expected in enumerate((0, 0, shared, shared)):
        wanted = request([*SHARED, *LONG[place:]], 3)
        assert engine.answer(wanted) == ([plain(made(name), wanted)], [expected])


def test_those_that_begin_together_read_it_once() -> None:
    for chunk in (7, 128):
        engine = engine_of(config=engine_config(prefill_chunk=chunk))
        requests = [request([*LONG, *tail], 10) for tail in ([1], [1], [2, 3])]
        said, cached = engine.answer(*requests)
        assert said == plain_each(made("lfm2"), requests) and cached == [0, 80, 80]


def test_a_long_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_pages, "_LONG_PROMPT", len(LONG) - 16)
    engine, wanted = engine_of(), request(LONG, 3)
    expected = plain(made("lfm2"), wanted)
    assert [engine.answer(wanted) for _ in range(2)] == [([expected], [0]), ([expected], [64])]


def test_tenants_share_what_the_operator_lists() -> None:
    engine = engine_of()
    engine.loop.scheduler.pages.share_between_tenants(SHARED)
    # Who comes again has its own text too: its state is kept then.
    for tenant, expected in (("one", 0), ("two", 32), ("one", 32), ("three", 32), ("one", 64)):
        wanted = request([*SHARED, *LONG[:30]], 20, tenant=tenant)
        assert engine.answer(wanted) == ([plain(made("lfm2"), wanted)], [expected])


def test_the_least_recently_used_state_goes_and_shared_ones_last() -> None:
    """Of more texts than states are kept, the beginning that all have stays."""
    engine = engine_of(kept_states=4)
    texts = [[*SHARED, *[place + 5] * 20] for place in range(8)]
    found = [engine.answer(request(text, 5))[1][0] for text in (*texts, texts[-1], texts[-1], texts[0])]
    assert found == [0, 0, 32, 32, 32, 32, 32, 32, 32, 48, 32]
    kept = engine.loop.scheduler.pages.kept
    assert kept is not None and len(kept) == 4


def test_half_of_the_states_follow_sequences_that_generate() -> None:
    """The others stay for what earlier ones left, however many generate."""
    engine = engine_of(kept_states=6)
    engine.answer(request(SHARED, 20))
    others = [request([place + 5] * 20, 20) for place in range(5)]
    assert engine.answer(*others) == (plain_each(made("lfm2"), others), [0] * 5)
    kept = engine.loop.scheduler.pages.kept
    assert kept is not None and len(kept) == 4
    following = request([*SHARED, *plain(made("lfm2"), request(SHARED, 20)), 4], 3)
    assert engine.answer(following) == ([plain(made("lfm2"), following)], [48])


@pytest.mark.parametrize("broken", [False, True])
def test_behind_a_pass_that_ended_in_its_middle_no_state_is_kept(broken: bool) -> None:
    """Some layers may have taken its tokens into their states, and others not."""
    engine, wanted = engine_of(), request(SHARED, 40)
    running, scheduler = engine.add(wanted), engine.loop.scheduler
    # Past a page end.
    for _ in range(15):
        engine.loop.step()
    if broken:
        scheduler.restart_states()
    else:
        scheduler.preempt(engine.loop.live[running].sequence)
    engine.check()
    assert scheduler.pages.kept is not None and len(scheduler.pages.kept) == (not broken)


def test_without_kept_states_nothing_is_shared() -> None:
    engine = engine_of(kept_states=0)
    assert [engine.answer(request(SHARED, 20))[1] for _ in range(2)] == [[0], [0]]
    assert engine.runner.cache.spare_pages == 0


def test_pages_that_are_needed_go_with_their_states() -> None:
    engine = engine_of(kv_tokens=192)
    for place in range(6):
        engine.answer(request([(place + 11 * i) % 200 + 3 for i in range(40)], 12))
    kept = engine.loop.scheduler.pages.kept
    assert kept is not None and 0 < len(kept) < 6


def test_other_weights_find_nothing() -> None:
    engine = engine_of()
    engine.answer(request(SHARED, 20))
    engine.loop.exchanged(version=2)
    engine.check()
    assert engine.answer(request(SHARED, 3))[1] == [0]


def test_what_a_cancelled_request_had_computed_stays() -> None:
    engine = engine_of()
    cancelled = engine.add(request(SHARED, 50))
    for _ in range(20):
        engine.loop.step()
    engine.loop.end(cancelled, "cancelled")
    engine.check()
    wanted = request([*SHARED, 1], 3)
    # Its output left behind the beginning that both have.
    assert [engine.answer(wanted) for _ in range(2)] == [([plain(made("lfm2"), wanted)], [each]) for each in (0, 32)]


def test_preempted_sequences_go_on_from_what_is_kept() -> None:
    requests = [request([5 + place] * 20, 40) for place in range(2)]
    outcomes = run(make_runner(made("lfm2"), kv_tokens=96), requests, config=engine_config(max_running=2))
    assert [one.token_ids for one in outcomes] == plain_each(made("lfm2"), requests)
    assert any(one.finished.totals.preemptions for one in outcomes)


@pytest.mark.parametrize("way", ["host", "device", "ahead", "device rows"])
def test_drafts_behind_a_hit_are_verified_as_ever(way: str) -> None:
    """Right paths among wrong siblings, of sequences that come one after the other."""
    model = made("qwen3_next")
    requests = [request([*SHARED, *LONG[place % 3 :]], 20) for place in range(6)]
    expected = plain_each(model, requests)
    whole = [(*one.token_ids, *output) for one, output in zip(requests, expected, strict=True)]
    settings: dict[str, Any] = {
        "host": {},
        "device": {"on_device": True},
        "ahead": {"can_launch_before_results": True},
        "device rows": {"on_device": True, "passes": 2},
    }[way]
    runner = make_runner(model, 4)
    if way == "device rows":
        runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
        requests = [replace(one, prediction=output) for one, output in zip(requests, expected, strict=True)]
    drafts = None if way == "device rows" else knowing_tree(whole, 211, 12, right=0.8)
    outcomes = run(runner, requests, propose=drafts, stagger=9, config=engine_config(prefill_chunk=128), **settings)
    assert [outcome.token_ids for outcome in outcomes] == expected
    totals = [outcome.finished.totals for outcome in outcomes]
    assert sum(one.cached_tokens for one in totals) > 0 and sum(one.accepted_tokens for one in totals) > 0
