"""What happens to a sequence between the launch of a pass and its outcome: cancelled, and trimmed."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import ScriptedDraft, engine_config, knowing_tree, make_runner, plain, plain_each, request
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from outrider.tree import TokenTree
from target_service.core.sequence import Sequence
from target_service.core.sequence_pages import SequencePages
from target_service.engine.engine import Engine
from target_service.engine.loop import EngineLoop
from target_service.execution.device_executor import DeviceSteps
from target_service.model.runner import ModelRunner


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, temperature=0.0, **fields)


def device_loop(runner: ModelRunner) -> EngineLoop:
    """The loop with the class that a GPU uses."""
    steps = DeviceSteps(runner, max_sequences=16, max_rows=256, backend="torch")
    return EngineLoop(runner, engine_config(), steps=steps)


def test_a_client_may_leave_while_its_tree_is_verified(tiny_model: PreTrainedModel) -> None:
    """Its second child is right, so that keys would move in pages that are gone."""
    right = plain(tiny_model, request([5, 7, 9], 1, sampling=greedy()))[0]
    engine = Engine(make_runner(tiny_model), engine_config())
    engine._loop = device_loop(engine._runner)
    other = request([11, 12], 200, sampling=greedy())
    engine.submit(other)
    # Log-probabilities: the host verifies.
    sequence_id = engine.submit(request([5, 7, 9], 40, external=True, sampling=greedy(logprobs=0)))
    for _ in range(6):
        engine._iterate()
    engine.verify(sequence_id, TokenTree((9, (right + 1) % 100, right), (0, 0, 0), (1.0, 0.5, 0.5)))
    engine._iterate()
    ahead = engine._loop._ahead
    assert ahead is not None and ahead.batch.drafted
    engine.cancel(sequence_id)
    for _ in range(10):
        engine._iterate()
    [live] = engine._loop.live.values()
    assert tuple(live.sequence.output) == plain(tiny_model, other)[: len(live.sequence.output)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_page_is_given_back_that_a_pass_under_way_writes_to(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """Where requests that need the host end beside ones that do not."""
    requests = [
        *(request([5 + i, 7, 9], 60, sampling=greedy()) for i in range(3)),
        *(request([50 + i, 3], 5 + 7 * i, sampling=greedy(logprobs=0)) for i in range(4)),
    ]
    texts = [(*one.token_ids, *said) for one, said in zip(requests, plain_each(tiny_model, requests), strict=True)]
    # So few that pages are given back.
    runner = make_runner(tiny_model, page_size=page_size, kv_tokens=576)
    runner.enable_device_row_selection(16, 0)
    loop = device_loop(runner)
    draft = ScriptedDraft(loop.drafting, knowing_tree(texts, runner.vocabulary_size, 12, right=0.9))
    loop.drafting.attach(draft)
    loop.drafting.listen()
    trim, lost, given_back = SequencePages.trim, set[int](), 0

    def trimmed(pages: SequencePages, sequence: Sequence, keys: int = 0) -> None:
        nonlocal given_back
        before = list(sequence.pages)
        trim(pages, sequence, keys)
        given_back += len(before) - len(sequence.pages)
        ahead = loop._ahead
        if ahead is not None and ahead.batch.device_rows is not None:
            for item, most in zip(ahead.batch.items, ahead.batch.device_rows.most, strict=True):
                if item.sequence is sequence:
                    # Each pass writes its root and its drafted rows, and accepts all of them at most.
                    written = len(sequence.token_ids) - 1 + ahead.passes * (1 + most)
                    lost.update(before[len(sequence.pages) : runner.cache.pages_for(written)])

    monkeypatch.setattr(SequencePages, "trim", trimmed)
    lives = [loop.make(number, one) for number, one in enumerate(requests, 1)]
    for live in lives:
        loop.add(live)
    while loop.live:
        loop.step()
    assert given_back > 20 and not lost
    assert [tuple(live.sequence.token_ids) for live in lives] == texts
