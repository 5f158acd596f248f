"""Policies on a simulated device at changing loads: streams are the texts, and drafts that are good pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.loads.first_tokens import figures, load_of, run
from benchmarks.loads.shapes import HeadedShape
from benchmarks.loads.simulation import SHAPES, SimulatedEngine, long_prompts
from benchmarks.loads.texts import SimulatedDrafts, SimulatedText, ranked
from target_service.engine import launching

LENGTHS = 60, 128


def test_a_load_is_the_same_each_time() -> None:
    """No clock of the machine takes part."""
    found = [SimulatedEngine(SHAPES["8b"], "good").load(4, 6, seed=1) for _ in range(2)]
    assert found[0] == found[1]


def test_good_drafts_make_more_and_worthless_ones_cost_little() -> None:
    rates = {name: SimulatedEngine(SHAPES["8b"], name).load(8, 24, seed=1) for name in ("good", "worthless", "none")}
    speeds = {name: rate["tokens_per_second"] for name, rate in rates.items()}
    assert speeds["good"] > 1.4 * speeds["none"]
    assert speeds["worthless"] > 0.9 * speeds["none"]
    assert rates["worthless"]["followed"] < 0.5 < rates["good"]["followed"]


def test_a_draft_stays_followed_as_answers_end_and_others_begin() -> None:
    """A load of one less than there is room for is no other load."""
    engine = SimulatedEngine(SHAPES["8b"], "good")
    for seed in (1, 2):
        engine.load(8, 32, seed)
    # The first passes of every answer have no tree yet.
    assert engine.load(8, 16, seed=3)["followed"] > 0.9


def test_the_first_answers_of_a_load_lose_little_to_what_is_found_out_there() -> None:
    engine = SimulatedEngine(SHAPES["8b"], "good")
    engine.load(8, 24, seed=1)
    first, again = (engine.load(32, 40, seed=2)["first_eight_seconds"] for _ in range(2))
    assert again > 0.85 * first


def test_what_a_pass_accepts_grows_with_its_rows_and_is_the_texts() -> None:
    text = SimulatedText(3, *LENGTHS, SimulatedDrafts(quality=1.0, late_hits=1.0))
    accepted = []
    for place in range(LENGTHS[0], sum(LENGTHS)):
        both = ranked(*text.candidates(place, 0, looks_up=True), trust=1.0)
        counts = [both.accepted(rows)[0] for rows in (0, 1, 3, 7, 15, 63)]
        assert counts[0] == 0 and counts == sorted(counts)
        assert both.chances[:1] >= both.chances[-1:]
        accepted.append(counts[-1])
    assert sum(accepted) / len(accepted) > 1.0
    nothing = ranked(*text.candidates(LENGTHS[0], None, looks_up=False), trust=1.0)
    assert nothing.accepted(63) == (0, 0) and nothing.prospects(63) == (0.0,) * 6


def test_long_prompts_lose_little_to_drafts_beside_them() -> None:
    """Passes read prompts all the time, where a drafted row takes the place of one of theirs."""
    rates = {name: long_prompts(SHAPES["8b"], name, seed=1)["settled"] for name in ("good", "plain")}
    assert rates["good"] > 0.9 * rates["plain"]


def test_a_text_that_prompts_share_is_read_once() -> None:
    load = load_of("shared2", 1, SimulatedDrafts())
    engine = SimulatedEngine(HeadedShape(), "good", behind_passes=True, shares=True)
    served = run(engine, load)
    own = sum(text.prompt_tokens - 3000 for text in load.texts)
    # And of each other prompt what is behind its last shared page.
    assert 3000 + own <= sum(one.read for one in engine.device.timeline) <= 3000 + own + 16 * len(served)
    assert figures(served)["first_p50_ms"] < 30 < figures(served)["first_p99_ms"]


def test_nothing_is_drafted_where_the_host_has_no_time_for_it() -> None:
    """Its work for drafted rows takes longer than passes with them: always drafting makes two fifths of plain."""
    shape = replace(SHAPES["small"], host_drafted=3e-5)
    rates = [SimulatedEngine(shape, each).load(64, 320, seed=1)["settled"] for each in ("none", "good", "plain")]
    assert min(rates) > 0.85 * rates[2]


def test_few_passes_begin_that_no_answer_has_use_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stream the pass that probably ends an answer is waited for, so that the next prompt is read sooner."""
    found = []
    for most in (0.0, launching._LAST_PASSES):
        monkeypatch.setattr(launching, "_LAST_PASSES", most)
        engine = SimulatedEngine(SHAPES["8b"], "good", behind_passes=True)
        found.append((engine.load(1, 12, seed=1), len(engine.device.timeline)))
    (ahead, more), (waited, fewer) = found
    assert fewer < more
    assert waited["tokens_per_second"] > ahead["tokens_per_second"]
    assert waited["first_token_ms"] < ahead["first_token_ms"]
