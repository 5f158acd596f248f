"""A model that two processes share says what transformers' own model says, whatever drafts (fp32)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import make_tiny
from engine_harness import (
    DEVICE_SEQUENCES,
    engine_config,
    knowing_tree,
    plain,
    plain_each,
    random_tree,
    real_drafter,
    request,
    run,
)
from other_weights import other_weights
from rank_processes import end_by_a_lost_rank, end_by_a_rank_that_hangs
from running_engine import Running
from scripted_service import byte_tokenizer
from transformers import PreTrainedModel
from waits import HUNG_SECONDS
from warm_python import shared_python, warm_executable

from outrider.errors import OutriderError
from outrider.sampling import SamplingParams
from outrider.weight_updates import RunningRequests, WeightsUpdated
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest
from target_service.core.weights import WeightUpdate
from target_service.engine.exchange import WeightExchange
from target_service.engine.loop import EngineLoop
from target_service.execution.host_executor import HostSteps
from target_service.model.forward import ForwardInput
from target_service.model.ranks.leading import LeadingLink, load_ranks
from target_service.model.runner import ModelRunner
from target_service.model.support import ModelRefused
from tree_kernels.attention import AttentionBatch

VOCABULARY = 211
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}
MAX_TOKENS = 14


@pytest.fixture(scope="module", autouse=True)
def started_in_a_moment() -> Iterator[None]:
    with warm_executable(shared_python("services")):
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # Three layers, and a vocabulary that two ranks cannot divide evenly.
    return make_tiny(num_hidden_layers=3)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[ModelRunner]:
    """Over few pages, so that sequences are preempted."""
    config = TargetConfig(model=str(folder), dtype="float32", tensor_parallel=2, kv_tokens=80, page_size=4)
    leading, link = load_ranks(config)
    yield leading
    link.close()


def requests(sampling: SamplingParams) -> list[SequenceRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17)]
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in (*prompts, prompts[0] * 6)]


def test_the_model_is_divided(runner: ModelRunner) -> None:
    assert runner.ranks == 2
    assert runner.network.vocabulary_size == VOCABULARY
    assert runner.cache.keys[0].shape[2] == 1, "one of the model's two key heads"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_trees_change_nothing(runner: ModelRunner, model: PreTrainedModel, sampling: SamplingParams) -> None:
    """Trees that are often right, whose accepted rows move in every rank's cache; prompts in parts; preemption."""
    wanted = requests(sampling)
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    settings: dict[str, Any] = {"config": engine_config(prefill_chunk=7), "stagger": 1}
    drafted = run(runner, wanted, propose=knowing_tree(whole, VOCABULARY, 24, right=0.8), **settings)
    assert [outcome.token_ids for outcome in drafted] == expected
    assert sum(outcome.finished.totals.accepted_tokens for outcome in drafted) > 10
    assert [outcome.token_ids for outcome in run(runner, wanted, **settings)] == expected
    late = run(runner, wanted * 2, propose=random_tree(VOCABULARY, 9), late=1, stagger=2)
    assert [outcome.token_ids for outcome in late] == expected * 2
    assert sum(outcome.finished.totals.preemptions for outcome in late) > 0


def test_what_the_first_rank_does_alone_reaches_no_other(runner: ModelRunner, model: PreTrainedModel) -> None:
    """As when it compiles what all will launch: a pass of its parts alone, for which no process waits."""
    link, part, numbers = runner.link, torch.arange(6.0).view(2, 3), torch.arange(4)
    assert isinstance(link, LeadingLink)
    attention = AttentionBatch((0, 3), (0,), ((0,),), 4, (None,))
    with link.alone():
        assert torch.equal(link.summed(part.clone()), part)
        assert torch.equal(link.joined(part), torch.cat([part, part], dim=-1))
        link.share(numbers)
        assert torch.equal(numbers, torch.arange(4)) and link.least(7) == 7
        logits = runner.forward(ForwardInput((5, 6, 7), (0, 1, 2), (0, 1, 2), attention, (2,)))
    assert logits.shape == (1, VOCABULARY) and logits.isfinite().all()
    wanted = requests(SAMPLINGS["greedy"])
    assert [outcome.token_ids for outcome in run(runner, wanted)] == plain_each(model, wanted)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_rows_that_the_device_chooses_change_nothing(
    runner: ModelRunner, model: PreTrainedModel, sampling: SamplingParams
) -> None:
    """Drafted by the host or looked up, several passes in a launch: accepted rows move by the first rank's verdicts."""
    wanted = requests(sampling)
    expected = plain_each(model, wanted)
    whole = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    propose = knowing_tree(whole, VOCABULARY, 24, right=0.8)
    predicted = [replace(one, prediction=output) for one, output in zip(wanted, expected, strict=True)]
    runner.enable_device_row_selection(DEVICE_SEQUENCES, 3)
    try:
        chosen = run(runner, predicted, propose=propose, on_device=True, passes=2, stagger=9)
    finally:
        runner.node_table = None
    laid_out = run(runner, wanted, propose=propose, on_device=True, stagger=2)
    for outcomes in (chosen, laid_out):
        assert [outcome.token_ids for outcome in outcomes] == expected
        assert sum(outcome.finished.totals.accepted_tokens for outcome in outcomes) > 5


def test_a_trie_changes_nothing(runner: ModelRunner, model: PreTrainedModel) -> None:
    wanted = requests(SAMPLINGS["greedy"])
    expected = plain_each(model, wanted)
    with real_drafter("trie", VOCABULARY) as connect:
        tried = run(runner, [*wanted, *wanted], connect=connect, stagger=24)
    assert [outcome.token_ids for outcome in tried] == [*expected, *expected]
    assert sum(outcome.finished.totals.accepted_tokens for outcome in tried) > 10


def test_weights_are_exchanged_on_every_rank(
    runner: ModelRunner, model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    """For others, and back."""
    wanted, changed = requests(SAMPLINGS["greedy"]), other_weights(model)
    changed.save_pretrained(tmp_path)
    for version, (source, served) in enumerate([(tmp_path, changed), (folder, model)], start=2):
        loop = EngineLoop(runner, engine_config(), steps=HostSteps(runner))
        loop.exchanged(version=version - 1)
        read = threading.Event()
        exchange = WeightExchange(runner, loop, read.set, lambda: None)
        results: list[WeightsUpdated | OutriderError] = []
        exchange.start_reading(1, WeightUpdate(str(source)), results.append)
        assert read.wait(HUNG_SECONDS)
        assert exchange.exchange_when_ready() == []
        (done,) = results
        assert isinstance(done, WeightsUpdated) and done.model_version == version
        assert done.bytes == 4 * sum(weight.numel() for weight in model.parameters())
        expected = plain_each(served, wanted)
        assert [outcome.token_ids for outcome in run(runner, wanted)] == expected


def test_cancelled_requests_and_weights_between_steps(
    runner: ModelRunner, model: PreTrainedModel, folder: Path
) -> None:
    """Through the engine's own thread: what one request holds is freed, and the others go on."""
    cancelled, wanted, _ = requests(SAMPLINGS["greedy"])
    running = Running(model, runner=runner)
    try:
        first = running.engine.submit(replace(cancelled, max_tokens=40))
        second = running.engine.submit(wanted)
        running.wait_said(first, 3)
        running.engine.cancel(first)
        running.update(folder, RunningRequests.CONTINUE)
        assert running.result().model_version == 2
        assert isinstance(running.wait_last(second), SequenceFinished)
        assert tuple(running.said(second)) == plain(model, wanted)
    finally:
        running.engine.stop()
    assert runner.cache.used_pages == 0


def test_a_model_that_cannot_be_divided_is_refused(folder: Path) -> None:
    config = TargetConfig(model=str(folder), dtype="float32", tensor_parallel=3)
    with pytest.raises(ModelRefused, match="3 ranks: 4 attention heads cannot be divided"):
        load_ranks(config)
    with pytest.raises(ModelRefused, match="--tensor-parallel 2: device cuda:1: "):
        load_ranks(TargetConfig(model=str(folder), device="cuda", tensor_parallel=2))


def test_a_lost_rank_ends_the_service(folder: Path, tmp_path: Path) -> None:
    """It says which, and leaves no process behind."""
    said = end_by_a_lost_rank(folder, tmp_path, psutil.Process.kill, "--dtype", "float32")
    assert said is not None and "rank 1 has ended with status -9: the model is not whole any more" in said


def test_a_rank_that_hangs_ends_the_service(folder: Path, tmp_path: Path) -> None:
    end_by_a_rank_that_hangs(folder, tmp_path, "--dtype", "float32")
