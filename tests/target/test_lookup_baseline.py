"""What a pass would have made by its own text: the device's rule, found out once the text is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain, request
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from benchmarks.shared.virtual_clock import VirtualClock
from target_service.core.sequence import Sequence, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution.device_executor import DeviceSteps
from target_service.speculation.policy.draft_gate import DraftGate
from target_service.speculation.policy.lookup_baseline import ComparedSequence, LookupBaseline, predicted_tokens
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.node_table import longest_run


def sequence(token_ids: list[int]) -> Any:
    return SimpleNamespace(token_ids=token_ids, totals=SimpleNamespace(finished_ns=0))


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


@pytest.mark.parametrize(
    ("rows", "by_lookup"),
    [
        # The chain is 3 4 1 2 3 4 ...; of the text it holds four tokens before the 9.
        (15, 5),
        (2, 3),
        (1, 2),
        (0, 1),
    ],
)
def test_a_pass_is_compared_with_a_chain_of_as_many_rows(rows: int, by_lookup: int) -> None:
    text, compared = [1, 2, 3, 4, 1, 2], LookupBaseline(lookup_tokens=15)
    own = sequence([*text, 3, 4])
    compared.start_comparison(3, [ComparedSequence(cast(Sequence, own), start=6, made=2, rows=rows)])
    own.token_ids += [1, 2, 9]
    own.token_ids += [7] * 20
    assert compared.finished_comparison() == (3, 2, by_lookup, True)
    assert compared.finished_comparison() is None


def test_a_comparison_waits_for_the_text_to_go_on() -> None:
    compared, own = LookupBaseline(lookup_tokens=4), sequence([5, 6, 5, 6])
    compared.start_comparison(1, [ComparedSequence(cast(Sequence, own), start=3, made=1, rows=15)])
    # One at a time.
    compared.start_comparison(1, [ComparedSequence(cast(Sequence, sequence([8, 8])), start=1, made=1, rows=15)])
    for token in (5, 6, 5):
        assert compared.finished_comparison() is None
        own.token_ids.append(token)
    assert compared.finished_comparison() is None
    own.token_ids.append(6)
    assert compared.finished_comparison() == (1, 1, 5, True)


def test_a_text_that_has_ended_is_compared_as_it_is() -> None:
    compared, own = LookupBaseline(lookup_tokens=15), sequence([5, 6, 5, 6, 5])
    compared.start_comparison(1, [ComparedSequence(cast(Sequence, own), start=3, made=2, rows=15)])
    own.totals.finished_ns = 1
    # Two tokens were left to say, whoever had known more.
    assert compared.finished_comparison() == (1, 2, 2, True)


def test_several_sequences_of_a_pass_are_compared_as_one() -> None:
    """By the mean of each, once the texts of all are there."""
    compared, texts = LookupBaseline(lookup_tokens=15), [sequence([5, 6, 5, 6, 5]), sequence([7, 8, 9, 9, 9])]
    both = zip(texts, (2, 3), strict=True)
    several = [ComparedSequence(cast(Sequence, own), start=3, made=made, rows=1) for own, made in both]
    compared.start_comparison(32, several)
    assert compared.is_busy
    texts[0].token_ids.append(6)
    texts[1].totals.finished_ns = 1
    assert compared.finished_comparison() == (32, 2.5, 1.5, True)
    assert not compared.is_busy
    compared.start_comparison(32, [])
    assert not compared.is_busy


def test_without_lookup_a_pass_would_make_one_token() -> None:
    compared, own = LookupBaseline(lookup_tokens=0), sequence([5, 6, 5, 6, 5])
    compared.start_comparison(1, [ComparedSequence(cast(Sequence, own), start=2, made=3, rows=15)])
    assert compared.finished_comparison() == (1, 3, 1, True)
    compared.start_comparison(1, [ComparedSequence(cast(Sequence, own), start=2, made=3, rows=15)], with_draft=False)
    assert compared.finished_comparison() == (1, 3, 1, False)


@pytest.mark.parametrize("passes", [1, 2], ids=["pass by pass", "two passes at once"])
def test_the_engine_compares_what_a_draft_brings(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """One that knows the truth makes more than the texts of a random model, which hardly repeat themselves."""
    # What policies choose goes by what passes take.
    VirtualClock(1e-5).install(monkeypatch)
    wanted = [request([5, 7, 9 + place], 90) for place in range(3)]
    truth = [(*one.token_ids, *plain(tiny_model, one)) for one in wanted]
    runner = make_runner(tiny_model)
    # Recycled tokens would say more of a small model's loops than lookup does.
    runner.enable_device_row_selection(1, 15, recycles=False)
    steps = DeviceSteps(runner, max_sequences=1, max_rows=64, backend="torch")
    costs = StepCost([(1, 1e-3), (64, 1.1e-3)])
    launched = Counter[int]()
    loop = EngineLoop(runner, engine_config(max_running=1), steps=steps, step_cost=costs, passes=passes)
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
    assert sum(made for _, made, _ in compared) > 1.3 * sum(by_lookup for *_, by_lookup in compared)
