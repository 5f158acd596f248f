"""Targets with windows, capped scores and sinks say what transformers' own model says, whatever drafts (fp32)."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import (
    DEVICE_SEQUENCES,
    Outcome,
    engine_config,
    knowing_tree,
    make_runner,
    plain_each,
    random_tree,
    real_drafter,
    run,
)
from usual_models import USUAL_WINDOWED, usual
from windowed_models import GREEDY, SEEDED, VOCABULARY, WINDOWED, windowed_model, windowed_requests

from outrider.sampling import SamplingParams

pytestmark = pytest.mark.values

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}


def accepted(outcomes: list[Outcome]) -> int:
    return sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", usual(WINDOWED, USUAL_WINDOWED))
def test_trees_change_nothing(name: str, sampling: SamplingParams) -> None:
    """Trees that are often right, verified by what a device runs, with prompts in parts; then without drafts."""
    model, wanted = windowed_model(name), windowed_requests(sampling)
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    drafts = knowing_tree(whole, VOCABULARY, 24, right=0.8)
    settings: dict[str, Any] = {"config": engine_config(prefill_chunk=7), "stagger": 1}
    outcomes = run(make_runner(model, 4), wanted, propose=drafts, on_device=True, **settings)
    assert [outcome.token_ids for outcome in outcomes] == expected
    assert accepted(outcomes) > 10
    assert [outcome.token_ids for outcome in run(make_runner(model), wanted, **settings)] == expected


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "gpt_oss", "granite_swa", "exaone4"])
def test_lookup_tries_and_preemption_change_nothing(name: str) -> None:
    model, wanted = windowed_model(name), windowed_requests(GREEDY)
    expected = plain_each(model, wanted)
    runner = make_runner(model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    looked_up = run(runner, wanted, config=engine_config(prefill_chunk=16), on_device=True, passes=4)
    assert [outcome.token_ids for outcome in looked_up] == expected
    with real_drafter("trie", VOCABULARY) as connect:
        tried = run(make_runner(model), [*wanted, *wanted], connect=connect, stagger=24)
    assert [outcome.token_ids for outcome in tried] == [*expected, *expected]
    # Of its random weights, Gemma 4's texts repeat nothing that is looked up.
    assert (name == "gemma4" or accepted(looked_up) > 0) and accepted(tried) > 10
    scarce = make_runner(model, page_size=4, kv_tokens=72)
    outcomes = run(scarce, [*wanted, *wanted], propose=random_tree(VOCABULARY, 9), late=1, stagger=2)
    assert [outcome.token_ids for outcome in outcomes] == [*expected, *expected]
    assert sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0
