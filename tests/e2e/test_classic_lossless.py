"""Targets by the plan of GPT say what transformers' own model says, whatever drafts (fp32)."""

from __future__ import annotations

from typing import Any

import pytest
from classic_models import CLASSIC
from conftest import make_tiny
from engine_harness import engine_config, knowing_tree, make_runner, plain_each, run
from windowed_models import GREEDY, SEEDED, VOCABULARY, windowed_requests

from outrider.sampling import SamplingParams


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neo", "gpt_neox", "gptj", "falcon, groups", "falcon, falling", "bloom, twelve heads", "dbrx"]
)
def test_trees_change_nothing(name: str, sampling: SamplingParams) -> None:
    """Trees that are often right, verified by what a device runs, with prompts in parts; then without drafts."""
    model_type, own = CLASSIC[name]
    model, wanted = make_tiny(model_type, **own), windowed_requests(sampling)
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    drafts = knowing_tree(whole, VOCABULARY, 24, right=0.8)
    settings: dict[str, Any] = {"config": engine_config(prefill_chunk=7), "stagger": 1}
    outcomes = run(make_runner(model, 4), wanted, propose=drafts, on_device=True, **settings)
    assert [outcome.token_ids for outcome in outcomes] == expected
    assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 10
    assert [outcome.token_ids for outcome in run(make_runner(model), wanted, **settings)] == expected
