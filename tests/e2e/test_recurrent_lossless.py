"""Targets with recurrent layers say what transformers' own model says, whatever drafts, preempts or cancels (fp32)."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conftest import make_tiny
from engine_harness import (
    DEVICE_SEQUENCES,
    Outcome,
    engine_config,
    knowing_tree,
    make_runner,
    plain,
    plain_each,
    random_tree,
    real_drafter,
    request,
    run,
)
from kernel_worker import INTERPRETED, work
from recurrent_models import ALIKE, RECURRENT
from running_engine import Running
from transformers import PreTrainedModel
from usual_models import USUAL_RECURRENT, usual

from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from target_service.core.sequence import SequenceRequest

pytestmark = pytest.mark.values

VOCABULARY = 211
GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
MAX_TOKENS = 14


@cache
def made(name: str) -> PreTrainedModel:
    model_type, settings = RECURRENT[name]
    return make_tiny(model_type, **settings)


def requests(sampling: SamplingParams) -> list[SequenceRequest]:
    """The second is longer than a tree's window, and the last repeats itself."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 75)]
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in (*prompts, prompts[0] * 6)]


def accepted(outcomes: list[Outcome]) -> int:
    return sum(outcome.finished.totals.accepted_tokens for outcome in outcomes)


@pytest.mark.values
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", usual((name for name in RECURRENT if name not in ALIKE), USUAL_RECURRENT))
def test_trees_change_nothing(name: str, sampling: SamplingParams) -> None:
    """Trees that are often right, verified by what a device runs, with prompts in parts, and by the host with whole
    prompts; then without drafts."""
    model, wanted = made(name), requests(sampling)
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    drafts = knowing_tree(whole, VOCABULARY, 24, right=0.8)
    parts: dict[str, Any] = {"config": engine_config(prefill_chunk=7), "stagger": 1}
    for settings in ({"on_device": True, **parts}, {"config": engine_config(prefill_chunk=128)}):
        outcomes = run(make_runner(model, 4), wanted, propose=drafts, **settings)
        assert [outcome.token_ids for outcome in outcomes] == expected
        assert accepted(outcomes) > 10
    assert [outcome.token_ids for outcome in run(make_runner(model), wanted, **parts)] == expected


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "olmo_hybrid", "zaya"])
def test_rows_of_the_device_and_of_tries_change_nothing(name: str) -> None:
    """Rows that the device chooses, of lookup and of predictions, four passes at once; then trees of a trie, which are
    merged with predictions too."""
    model, wanted = made(name), requests(GREEDY)
    expected = plain_each(model, wanted)
    predicted = [replace(one, prediction=output) for one, output in zip(wanted, expected, strict=True)]
    runner = make_runner(model)
    runner.enable_device_row_selection(DEVICE_SEQUENCES, 7)
    looked_up = run(runner, predicted, config=engine_config(prefill_chunk=16), on_device=True, passes=4)
    assert [outcome.token_ids for outcome in looked_up] == expected
    with real_drafter("trie", VOCABULARY) as connect:
        tried = run(make_runner(model), [*wanted, *predicted], connect=connect, stagger=24)
    assert [outcome.token_ids for outcome in tried] == [*expected, *expected]
    assert accepted(looked_up) > 10 and accepted(tried) > 10


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "zaya, windows"])
@pytest.mark.parametrize("scarce", [{"kv_tokens": 140}, {"state_slots": 2}], ids=["pages", "slots"])
@pytest.mark.parametrize("on_device", [False, True])
def test_preempted_sequences_are_read_again(name: str, scarce: dict[str, int], *, on_device: bool) -> None:
    model, wanted = made(name), requests(GREEDY)
    expected = plain_each(model, wanted)
    runner = make_runner(model, page_size=4, **scarce)
    settings: dict[str, Any] = {"on_device": True} if on_device else {"can_launch_before_results": True}
    outcomes = run(runner, [*wanted, *wanted], propose=random_tree(VOCABULARY, 9), late=1, stagger=2, **settings)
    assert [outcome.token_ids for outcome in outcomes] == [*expected, *expected]
    assert sum(outcome.finished.totals.preemptions for outcome in outcomes) > 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "zaya"])
def test_a_clients_trees_beside_cancelled_requests_change_nothing(name: str) -> None:
    """A `Verify` sequence, whose slot's neighbours come and go between its trees."""
    model, wanted = made(name), requests(GREEDY)[0]
    expected = plain(model, wanted)
    running = Running(model, max_running=3)
    try:
        held, other = (running.engine.submit(replace(wanted, external=external)) for external in (True, False))
        heard, accepted_rows = list[int](), 0
        while len(heard) < MAX_TOKENS:
            root, right = (*wanted.token_ids, *heard)[-1], expected[len(heard) : len(heard) + 3]
            # The right path behind a wrong sibling.
            tokens = (root, (right[0] + 1) % VOCABULARY, *right)
            parents = (0, 0, 0, *range(2, len(tokens) - 1))
            running.engine.verify(held, TokenTree(tokens, parents, (1.0,) * len(tokens)))
            running.wait_said(held, len(heard) + 1)
            heard, accepted_rows = running.said(held), accepted_rows + len(running.verdicts(held)[-1].accepted_rows)
            running.engine.cancel(other)
            other = running.engine.submit(wanted)
        running.wait_last(other)
        assert tuple(heard) == expected and tuple(running.said(other)) == expected
        assert accepted_rows >= 6
    finally:
        running.engine.stop()


def test_padded_steps_of_a_device_compute_the_same() -> None:
    """As captured steps are laid out, with rows and sequences that are absent; interpreted."""
    pytest.importorskip("triton")
    found = work("../recurrent_steps_worker.py", **INTERPRETED)
    # Written so that NaN fails.
    assert len(found) == 3 and all(error < 1e-5 for errors in found.values() for error in errors)
