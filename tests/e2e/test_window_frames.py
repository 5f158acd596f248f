"""Layers with a window keep few pages: what is said stays plain decoding's, and memory is bounded by the window."""

from __future__ import annotations

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, plain, plain_each, random_tree, request, run
from lasting_engine import Engine
from windowed_models import GREEDY, SEEDED, VOCABULARY, windowed_model, windowed_requests

from benchmarks.shared.loaded_models import runner_for
from target_service.core.sequence import StepVerdict
from target_service.model.runner import ModelRunner

PAGE, CHUNK = 4, 7
SHARED = [(7 * i) % 200 + 3 for i in range(40)]


def scarce(name: str, pages: int = 512, share: float = 0.05) -> ModelRunner:
    """With hardly more frames than one sequence needs."""
    return runner_for(
        windowed_model(name), None, num_pages=pages, page_size=PAGE, window_share=share, window_rows=2 * CHUNK
    )


@pytest.mark.parametrize("name", ["mistral, window", "gemma3", "gemma2"])
@pytest.mark.parametrize("on_device", [False, True])
def test_few_frames_change_nothing(name: str, on_device: bool) -> None:
    """Trees that are often right, prompts in parts, and too few frames for all: sequences are preempted for them."""
    model, wanted = windowed_model(name), [*windowed_requests(GREEDY), *windowed_requests(SEEDED)]
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    runner = scarce(name, share=0.02)
    frames = runner.cache.frames
    assert frames is not None and frames.frames < 14
    drafts = knowing_tree(whole, VOCABULARY, 24, right=0.8)
    config = engine_config(prefill_chunk=CHUNK)
    outcomes = run(runner, [*wanted, *wanted], propose=drafts, on_device=on_device, config=config, stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == [*expected, *expected]
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 0
    assert frames.used_frames == 0


@pytest.mark.parametrize("name", ["mistral, window", "exaone4"])
def test_a_long_text_holds_no_more_frames_than_a_short_one(name: str) -> None:
    engine = Engine(scarce(name, share=1.0), engine_config(prefill_chunk=CHUNK))
    frames = engine.runner.cache.frames
    assert frames is not None
    nodes = 12
    engine.loop.drafting.attach(ScriptedDraft(engine.loop.drafting, random_tree(VOCABULARY, nodes)))
    engine.loop.drafting.listen()
    sequence_id = engine.add(request([*SHARED, *SHARED], 200))
    # What a pass reads and the next one may, or a tree with the rows that may follow; and the ends of pages.
    most = frames.pages_within(max(2 * CHUNK, 2 * (nodes + 1)))
    used, held = 0, 0
    while any(isinstance(event, StepVerdict) for event in engine.loop.step() or ()) or sequence_id in engine.loop.live:
        used = max(used, frames.used_frames)
        if (live := engine.loop.live.get(sequence_id)) is not None:
            held = max(held, len(live.sequence.pages))
        engine.check()
    assert held >= 280 // PAGE and 0 < used <= most < held // 4


@pytest.mark.parametrize("name", ["mistral, window", "gemma3"])
def test_a_hit_ends_where_the_window_allows(name: str) -> None:
    """Frames of a kept prefix are given to others; what is left of it is used."""
    model = windowed_model(name)
    engine = Engine(scarce(name, share=0.03), engine_config(prefill_chunk=CHUNK))
    frames = engine.runner.cache.frames
    assert frames is not None
    first = request([*SHARED, 1], 3)
    assert engine.answer(first) == ([plain(model, first)], [0])
    assert engine.answer(first) == ([plain(model, first)], [40])
    # Parts early: the window of the middle was left, but its frames are still there.
    branch = request([*SHARED[:22], 9, 9, 9], 3)
    assert engine.answer(branch) == ([plain(model, branch)], [20])
    # Other texts take most frames; those that were needed last stay longest.
    other = request([5 + i % 90 for i in range(60)], 3)
    assert engine.answer(other) == ([plain(model, other)], [0])
    assert engine.runner.cache.spare_pages >= (60 + 40) // PAGE
    shorter = 0
    for wanted, most in ((first, 40), (branch, 24), (other, 56)):
        said, cached = engine.answer(wanted)
        assert said == [plain(model, wanted)] and cached[0] <= most
        shorter += cached[0] < most
    assert shorter
    # Behind what was read again, all of it is found again.
    assert engine.answer(other) == ([plain(model, other)], [56])


def test_those_that_begin_together_share_frames() -> None:
    model = windowed_model("gemma3")
    engine = Engine(scarce("gemma3", share=0.1), engine_config(prefill_chunk=CHUNK))
    wanted = [request([*SHARED, *tail], 12) for tail in ([1], [1], [2, 3], [])]
    said, _ = engine.answer(*wanted)
    assert said == plain_each(model, wanted)
    assert engine.runner.cache.frames is not None and engine.runner.cache.frames.used_frames == 0


def test_other_weights_find_no_frame() -> None:
    engine = Engine(scarce("gemma3"))
    engine.answer(request(SHARED, 3))
    engine.loop.exchanged(version=2)
    frames = engine.runner.cache.frames
    assert frames is not None and frames.free_frames == frames.frames and not any(map(frames.has, range(512)))
    assert engine.answer(request(SHARED, 3))[1] == [0]
