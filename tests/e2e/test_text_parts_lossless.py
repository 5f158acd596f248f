"""The text of models that read images too says what transformers' own model says, whatever drafts (fp32)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import make_tiny
from engine_harness import (
    DEVICE_SEQUENCES,
    Outcome,
    engine_config,
    knowing_tree,
    make_runner,
    plain_each,
    real_drafter,
    run,
)
from text_parts import TEXT_PARTS
from usual_models import USUAL_TEXT_PARTS, usual
from windowed_models import GREEDY, SEEDED, VOCABULARY, windowed_requests

from outrider.sampling import SamplingParams

pytestmark = pytest.mark.values

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}


def accepted(outcomes: list[Outcome]) -> int:
    return sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", usual(TEXT_PARTS, USUAL_TEXT_PARTS))
def test_drafts_change_nothing(name: str, sampling: SamplingParams) -> None:
    """Trees that are often right, rows of lookup and of predictions that a device chooses, and trees of a trie."""
    model_type, settings = TEXT_PARTS[name]
    model, wanted = make_tiny(model_type, **settings), windowed_requests(sampling)
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    drafts = knowing_tree(whole, VOCABULARY, 24, right=0.8)
    config = engine_config(prefill_chunk=7)
    outcomes = run(make_runner(model, 4), wanted, propose=drafts, on_device=True, config=config, stagger=1)
    assert [outcome.token_ids for outcome in outcomes] == expected and accepted(outcomes) > 10
    predicted = [replace(one, prediction=output) for one, output in zip(wanted, expected, strict=True)]
    runner = make_runner(model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    looked_up = run(runner, predicted, config=engine_config(prefill_chunk=16), on_device=True, passes=4)
    assert [outcome.token_ids for outcome in looked_up] == expected and accepted(looked_up) > 10
    with real_drafter("trie", VOCABULARY) as connect:
        tried = run(make_runner(model), [*wanted, *predicted], connect=connect, stagger=24)
    assert [outcome.token_ids for outcome in tried] == [*expected, *expected] and accepted(tried) > 10
