"""Passes that a text would have needed by lookup alone: the device's rule, found out once the text is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain_each, request
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from benchmarks.shared.virtual_clock import VirtualClock
from target_service.core.sequence import StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution.device_executor import DeviceSteps
from target_service.speculation.policy.draft_gate import DraftGate
from target_service.speculation.policy.lookup_baseline import (
    LookupBaseline,
    lookup_passes,
    predicted_tokens,
)
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table import longest_run


def sequence(token_ids: list[int]) -> Any:
    return SimpleNamespace(token_ids=token_ids, totals=SimpleNamespace(finished_ns=0, steps=0))


def counting(observe: Callable[..., None], launched: Counter[int]) -> Callable[..., None]:
    """Counts launches by their passes."""

    def outer(step: Step, *arguments: object) -> None:
        launched[step.passes] += 1
        observe(step, *arguments)

    return outer


def by_the_rule(text: list[int], known: int) -> int:
    """As `tree_kernels.node_table` has it, token by token."""
    run = longest_run(text[:known])
    if not run.length:
        return 0
    behind, count = text[run.end : known], 0
    while known + count < len(text) and text[known + count] == behind[count % len(behind)]:
        count += 1
    return count


@examples(300)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.data())
def test_a_chain_is_followed_as_far_as_the_text_says_it(text: list[int], data: st.DataObject) -> None:
    known = data.draw(st.integers(1, len(text)))
    assert predicted_tokens(np.array(text, np.int32), known) == by_the_rule(text, known)


@examples(100)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(0, 15), st.data())
def test_passes_of_lookup_follow_each_other(text: list[int], rows: int, data: st.DataObject) -> None:
    known = at = data.draw(st.integers(1, len(text)))
    ended, cut = 0, 0.0
    while at < len(text):
        made = 1 + min(rows, by_the_rule(text[: at + rows], at))
        ended, cut = ended + 1, cut + min(1.0, (len(text) - at) / made)
        at += made
    own = np.array(text, np.int32)
    assert lookup_passes(own, known, rows, True) == ended
    assert lookup_passes(own, known, rows, False) == pytest.approx(cut)


def passed(own: Any, *tokens: int) -> None:
    """A pass makes these tokens."""
    own.token_ids += tokens
    own.totals.steps += 1


@pytest.mark.parametrize(
    ("rows", "by_lookup"),
    [
        # The chain is 3 4 1 2 3 4 ..., of which the text has four tokens before the 9. It says nothing behind the 9 and
        # the first 7; then nine 7s are left.
        (15, 1 + 2 + 9 / 10),
        (2, 2 + 2 + 3),
        (1, 3 + 2 + 9 / 2),
        (0, 16),
    ],
)
def test_a_text_is_compared_with_chains_of_as_many_rows(rows: int, by_lookup: float) -> None:
    own, compared = sequence([1, 2, 3, 4, 1, 2]), LookupBaseline(lookup_tokens=rows)
    compared.start_comparison(3, [own])
    for token in (3, 4, 1, 2, 9, *[7] * 10):
        passed(own, token)
        assert compared.follow(3, with_draft=True) == []
    passed(own, 7)
    (found,) = compared.follow(3, with_draft=True)
    assert found.passes == 16 and found.by_lookup == pytest.approx(by_lookup)
    assert (found.load, found.with_draft) == (3, True)
    assert compared.follow(3, with_draft=True) == []


def test_one_comparison_runs_at_a_time() -> None:
    own, other, compared = sequence([5, 6]), sequence([8, 8]), LookupBaseline(lookup_tokens=4)
    compared.start_comparison(1, [own])
    assert compared.is_busy
    compared.start_comparison(1, [other])
    passed(own, *[7] * 16)
    assert compared.follow(1, with_draft=True) != []
    assert not compared.is_busy


def test_a_text_that_has_ended_is_compared_as_it_is() -> None:
    """Two tokens were left to say, whoever had known more."""
    compared, own = LookupBaseline(lookup_tokens=15), sequence([5, 6, 5, 6])
    compared.start_comparison(1, [own])
    passed(own, 5, 6)
    own.totals.finished_ns = 1
    assert compared.follow(1, with_draft=True) == [(1, 1, 1, True)]


def test_several_sequences_are_compared_each_for_itself() -> None:
    """Once the texts of all are there."""
    compared, texts = LookupBaseline(lookup_tokens=15), [sequence([5, 6, 5]), sequence([7, 8, 9])]
    compared.start_comparison(32, texts)
    passed(texts[0], 6, 5)
    passed(texts[1], 9)
    passed(texts[1], 1)
    texts[0].totals.finished_ns = 1
    assert compared.follow(32, with_draft=True) == []
    texts[1].totals.finished_ns = 1
    assert compared.follow(32, with_draft=True) == [(32, 1, 1, True), (32, 2, 2, True)]


@pytest.mark.parametrize(("load", "with_draft"), [(8, True), (16, False), (32, True)])
def test_passes_of_another_kind_end_a_comparison(load: int, with_draft: bool) -> None:
    own, compared = sequence([5, 6]), LookupBaseline(lookup_tokens=15)
    compared.start_comparison(16, [own], with_draft=True)
    passed(own, 1, 2)
    assert compared.follow(15, with_draft=True) == [] and compared.is_busy
    assert compared.follow(load, with_draft=with_draft) == [] and not compared.is_busy


def test_a_sequence_that_made_nothing_tells_nothing() -> None:
    own, compared = sequence([5, 6]), LookupBaseline(lookup_tokens=15)
    compared.start_comparison(1, [own])
    own.totals.finished_ns = 1
    assert compared.follow(1, with_draft=True) == [] and not compared.is_busy


def test_without_lookup_a_pass_would_make_one_token() -> None:
    for with_draft in (True, False):
        compared, own = LookupBaseline(lookup_tokens=0), sequence([5, 6, 5, 6, 5])
        compared.start_comparison(1, [own], with_draft=with_draft)
        passed(own, *[6, 5] * 8)
        assert compared.follow(1, with_draft=with_draft) == [(1, 1, 16, with_draft)]


@pytest.mark.parametrize("passes", [1, 2], ids=["pass by pass", "two passes at once"])
def test_the_engine_compares_what_a_draft_brings(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """One that knows the truth makes more than the texts of a random model, which hardly repeat themselves."""
    # What policies choose goes by what passes take.
    VirtualClock(1e-5).install(monkeypatch)
    wanted = [request([5, 7, 9 + place], 90) for place in range(3)]
    truth = [(*one.token_ids, *said) for one, said in zip(wanted, plain_each(tiny_model, wanted), strict=True)]
    runner = make_runner(tiny_model)
    # Recycled tokens would say more of a small model's loops than lookup does.
    runner.enable_device_row_selection(1, 15, recycles=False)
    steps = DeviceSteps(runner, max_sequences=1, max_rows=64, backend="torch")
    costs = StepCost([(1, 1e-3), (64, 1.1e-3)])
    launched = Counter[int]()
    loop = EngineLoop(runner, engine_config(max_running=1), steps=steps, step_cost=costs)
    loop.speculation.updates.multi_step.passes = passes
    # As small models have it, whose host would hold their device up.
    monkeypatch.setattr(loop.speculation.updates.multi_step, "observe_launch", lambda *_: None)
    monkeypatch.setattr(loop, "_observe", counting(loop._observe, launched))
    loop.drafting.attach(ScriptedDraft(loop.drafting, knowing_tree(truth, runner.vocabulary_size, 12, right=1.0)))
    loop.drafting.listen()
    # As soon as it is there.
    monkeypatch.setattr(DraftGate, "uses_draft", lambda *_: True)
    compared: list[tuple[int, float, float]] = []
    monkeypatch.setattr(DraftGate, "compare", lambda _, *one, with_draft: compared.append(one) if with_draft else None)
    said: dict[int, list[int]] = {}
    for number, one in enumerate(wanted):
        loop.add(loop.make(number, one))
    while loop.live:
        for event in loop.step() or ():
            if isinstance(event, StepVerdict):
                said.setdefault(event.sequence_id, []).extend(event.token_ids)
    assert [tuple(said[number]) for number in range(3)] == [text[3:] for text in truth]
    assert launched[passes] > 10
    assert len(compared) > 3 and {load for load, _, _ in compared} == {1}
    assert 1.3 * sum(needed for _, needed, _ in compared) < sum(by_lookup for *_, by_lookup in compared)
