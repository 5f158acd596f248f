"""Captured passes on two ranks, as threads and without a GPU: a graph is a launch that is run again. And on one whose
sizes are captured in part before the first request, and in part in pauses.

What a GPU would do by itself is done here by the plain forms of its kernels, over the very buffers of a captured step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch
from captured_ranks import (
    DRAFT_TOKENS,
    FEW_OUTPUTS,
    PAGE_SIZE,
    Rehearsed,
    ThreadLink,
    captured_rank,
    leading_rank,
)
from conftest import make_tiny
from engine_harness import engine_config, knowing_tree, plain, plain_each, request, run
from in_pass_heads import in_pass_head
from rerun_graphs import ROWS, SEQUENCES, RerunRunner, without_gpu
from transformers import PreTrainedModel

from benchmarks.shared.virtual_clock import VirtualClock
from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceRequest
from target_service.engine import common_pages
from target_service.execution import device_executor
from target_service.execution.device_executor import DeviceSteps
from target_service.model.cuda_graphs import capturing, sizes
from target_service.model.cuda_graphs.capturing import capture_steps
from target_service.model.cuda_graphs.pass_graphs import PassGraphs
from target_service.model.cuda_graphs.sizes import Bucket, buckets_up_to
from target_service.model.forward import ForwardInput
from tree_kernels.attention import AttentionBatch
from tree_kernels.verification import parameter_count
from tree_models.in_pass import InPassDrafter

__all__ = ["without_gpu"]

VOCABULARY, RANKS, MAX_TOKENS = 211, 2, 14
WHAT_IS_COMPILED = {"fused layers", "steps", "what follows steps"}
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny(num_hidden_layers=2)


@pytest.fixture(params=["drafts elsewhere", "drafts by its first rank", "drafts in its passes"])
def leading(without_gpu: None, model: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[RerunRunner]:
    """The first rank, which has rehearsed alone what it captured."""
    del without_gpu

    def drafter_of(link: ThreadLink) -> InPassDrafter | None:
        if request.param == "drafts in its passes":
            return in_pass_head(model, link, DRAFT_TOKENS)
        return in_pass_head(model) if request.param == "drafts by its first rank" and link.leads else None

    with leading_rank(model, RANKS, drafter_of, common=request.param == "pages in common") as runner:
        yield runner


def requests(sampling: SamplingParams) -> list[SequenceRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17, 40)]
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in prompts]


def test_captured_passes_of_ranks(leading: RerunRunner, model: PreTrainedModel) -> None:
    """Prompts, some of them eager for their length; trees of the host and of the device; several passes in a launch."""
    steps = DeviceSteps(leading, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
    count = len(buckets_up_to(ROWS, SEQUENCES))
    assert leading.captured_steps == (count, count), "ranks capture nothing in pauses"
    # In which the buffers of captured steps are made: PyTorch does not let others write them, as a GPU's kernels do.
    with torch.inference_mode():
        steps.warm_up()
        assert isinstance(leading.ahead, Rehearsed)
        assert leading.ahead.rehearsed["steps"] == count and leading.ahead.rehearsed.keys() == WHAT_IS_COMPILED
        # As where the time for capturing was over: the others are eager.
        leading.buckets = tuple(bucket for bucket in leading.buckets if bucket.rows <= ROWS // 2)
        config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS)
        # Each way of sampling has two of four ways to launch, with drafts and without.
        for turn, sampling in enumerate(SAMPLINGS.values()):
            wanted = requests(sampling)
            expected = plain_each(model, wanted)
            whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
            predicted = [replace(one, prediction=output) for one, output in zip(wanted, expected, strict=True)]
            for each, propose, passes in (
                (wanted, None, 1),
                (wanted, None, 4),
                (wanted, knowing_tree(whole, VOCABULARY, 12, right=0.8), 1),
                (predicted, knowing_tree(whole, VOCABULARY, 12, right=0.8), 2),
            )[turn::2]:
                outcomes = run(leading, each, propose=propose, launch=steps, passes=passes, stagger=2, config=config)
                assert [outcome.token_ids for outcome in outcomes] == expected
            assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 10


@pytest.fixture
def few_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are read once that two sequences have in common."""
    monkeypatch.setattr(sizes, "FEWEST_IN_COMMON", 2)
    monkeypatch.setattr(common_pages, "_WORTH_KEYS", 1)


@pytest.mark.usefixtures("few_in_common")
@pytest.mark.parametrize("leading", ["pages in common"], indirect=True)
def test_ranks_read_common_pages_once(leading: RerunRunner, model: PreTrainedModel) -> None:
    steps = DeviceSteps(leading, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
    shared = [(5 * i) % 190 + 5 for i in range(140)]
    wanted = [request([*shared, 7 + i, 9], 40, sampling=SAMPLINGS["seeded"]) for i in range(3)]
    expected = plain_each(model, wanted)
    config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS)
    buffers = {bucket: one.buffer for bucket, one in leading._captured.items() if bucket.common}
    assert buffers
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    propose = knowing_tree(whole, VOCABULARY, 12, right=0.9)
    with torch.inference_mode():
        # Of trees, accepted rows move in every rank's cache.
        for each in (propose, None):
            outcomes = run(leading, wanted, propose=each, launch=steps, stagger=1, config=config)
            assert [outcome.token_ids for outcome in outcomes] == expected
    # Left from the last pass of its size: 128 keys of two sequences or three.
    found = [buffer.plan.common.tolist() for buffer in buffers.values() if buffer.plan.common is not None]
    assert any(counts.count(128 // PAGE_SIZE) >= 2 for counts in found)


def step_of_prompt(rows: int) -> ForwardInput:
    """A pass that reads a prompt of so many tokens, with the logits of all."""
    tokens = tuple((7 * row * row + 11) % VOCABULARY for row in range(rows))
    pages = tuple(range(-(-rows // PAGE_SIZE)))
    attention = AttentionBatch((0, rows), (0,), (pages,), PAGE_SIZE, (None,))
    return ForwardInput(tokens, tuple(range(rows)), tuple(range(rows)), attention, tuple(range(rows)))


def test_a_pass_of_a_prompt_computes_the_logits_of_few_rows(
    without_gpu: None, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    del without_gpu
    runner = captured_rank(model)
    capture_steps(runner, seconds=60.0, memory_share=0.5)
    computed, usual = list[int](), runner.network.logits  # type: ignore[attr-defined]
    monkeypatch.setattr(runner.network, "logits", lambda rows: computed.append(len(rows)) or usual(rows))
    batch = step_of_prompt(ROWS)
    parameters = numpy.zeros(parameter_count(SEQUENCES, ROWS), numpy.int32)
    with torch.inference_mode():
        every = runner.run_pass(batch, parameters).logits.clone()
        for rows in ((ROWS - 1,), (), tuple(range(FEW_OUTPUTS)), (0, 7, 9), tuple(range(FEW_OUTPUTS + 1))):
            runner.pass_of(Bucket(ROWS, 1)).logits.zero_()
            computed.clear()
            found = runner.run_pass(replace(batch, logit_rows=rows), parameters).logits
            assert computed == [FEW_OUTPUTS if len(rows) <= FEW_OUTPUTS else ROWS]
            torch.testing.assert_close(found[list(rows)], every[list(rows)])
        # A prompt as a request has it.
        steps = DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
        config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS)
        wanted = requests(SAMPLINGS["greedy"])[2]
        computed.clear()
        assert run(runner, [wanted], launch=steps, config=config)[0].token_ids == plain(model, wanted)
        assert computed[0] == FEW_OUTPUTS


def test_sizes_are_captured_in_pauses(
    without_gpu: None, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del without_gpu
    time = VirtualClock()
    monkeypatch.setattr(device_executor, "time", SimpleNamespace(monotonic=time))
    runner = captured_rank(model)
    runner.compiled_ahead = True
    # Such small steps would all be captured first.
    monkeypatch.setattr(capturing, "_FEW_ROWS", 0)
    capture_steps(runner, seconds=60.0, memory_share=0.5)
    first, every = runner.captured_steps
    assert 0 < first < every == len(buckets_up_to(ROWS, SEQUENCES))
    with torch.inference_mode():
        # Every number of rows is there, for any number of sequences.
        assert runner.pass_sizes(SEQUENCES) == [4, 16, 32, ROWS] and runner.buckets[0] == Bucket(1, 1)
        steps = DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
        steps.warm_up()
        wanted = requests(SAMPLINGS["seeded"])
        expected = plain_each(model, wanted)
        config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS)

        def check() -> None:
            outcomes = run(runner, wanted, launch=steps, passes=2, stagger=2, config=config)
            assert [outcome.token_ids for outcome in outcomes] == expected

        check()
        # The next request may come at once, however long ago this one's last step was launched.
        time.now += 1.0
        assert steps.use_pause() and runner.captured_steps == (first, every)
        time.now += 1.0
        assert steps.use_pause() and runner.captured_steps == (first + 1, every)
        check()
        steps.use_pause()
        time.now += 1.0
        # Without memory no request fails, and the rest is left.
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_record", Mock(side_effect=torch.OutOfMemoryError("none is left")))
            steps.use_pause()
        assert runner.captured_steps == (first + 1, every) and "are not captured: none is left" in caplog.text
        assert runner.capture_later() is None
        runner.keep_to_captured(buckets_up_to(ROWS, SEQUENCES))
        while steps.use_pause():
            pass
        assert runner.captured_steps == (every, every)
        check()


def test_a_pause_is_used_once_it_has_lasted(
    without_gpu: None, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asks again some milliseconds behind its answer never waits for what is captured in pauses."""
    del without_gpu
    time, captured = VirtualClock(), list[object]()
    monkeypatch.setattr(device_executor, "time", SimpleNamespace(monotonic=time))
    runner = captured_rank(model)
    capture_steps(runner, seconds=60.0, memory_share=0.5)
    with torch.inference_mode():
        steps = DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
        steps.warm_up()
        capture = PassGraphs.capture

        def note(graphs: PassGraphs, buffers: object, work: Hashable, launch: Callable[[], object]) -> None:
            captured.append(work)
            capture(graphs, buffers, work, launch)

        wanted = requests(SAMPLINGS["greedy"])[:1]
        config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS)
        monkeypatch.setattr(PassGraphs, "capture", note)
        # The engine looks at once, and again when nothing came for so long.
        for wait in (0.0, 0.004, 0.04, 0.004):
            run(runner, wanted, launch=steps, config=config)
            # A step may take long.
            time.now += 0.1
            assert steps.use_pause()
            time.now += wait
            assert steps.use_pause() and not captured
        time.now += 0.05
        assert steps.use_pause() and captured
