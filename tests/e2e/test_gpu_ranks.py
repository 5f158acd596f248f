"""A model that two GPUs share, over captured steps: the answers of one GPU, whatever drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny
from engine_harness import engine_config, knowing_tree, random_tree, request, run
from rank_processes import end_by_a_rank_that_hangs
from scripted_service import byte_tokenizer
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest
from target_service.execution.device_executor import DeviceSteps
from target_service.model.loading.loader import load_runner
from target_service.model.ranks.leading import load_ranks
from target_service.model.runner import ModelRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
VOCABULARY, ROWS, SEQUENCES = 211, 64, 4
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True),
}


def requests(sampling: SamplingParams) -> list[SequenceRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 17, 40, 90)]
    return [request(prompt, 24, sampling=sampling) for prompt in prompts]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # Of heads that layers in fused form take.
    return make_tiny(num_hidden_layers=3, hidden_size=64)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def config_for(folder: Path, dtype: str) -> TargetConfig:
    sizes = {
        "kv_tokens": 4096,
        "max_step_rows": ROWS,
        "max_running": SEQUENCES,
        "lookup_tokens": 7,
        "capture_seconds": 30.0,
    }
    return TargetConfig(model=str(folder), dtype=dtype, device="cuda", tensor_parallel=2, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def ranks(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[ModelRunner, DeviceSteps]]:
    runner, link = load_ranks(config_for(folder, request.param))
    assert runner.ranks == 2 and runner.captured_steps[0] > 1
    # Not warmed up, which would compile far more than what is used.
    yield runner, DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS)
    link.close()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_nothing(ranks: tuple[ModelRunner, DeviceSteps], folder: Path, sampling: SamplingParams) -> None:
    """In fp32, where the answers are those of one GPU too; in bf16 it runs, and most of them are."""
    runner, steps = ranks
    whole = replace(config_for(folder, str(runner.dtype).removeprefix("torch.")), tensor_parallel=1, lockstep=True)
    wanted, exact = requests(sampling), runner.dtype == torch.float32
    expected = [one.token_ids for one in run(load_runner(whole), wanted)]
    texts = [(*one.token_ids, *output) for one, output in zip(wanted, expected, strict=True)]
    config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES)
    for propose, passes in (
        (None, 1),
        (None, 4),
        (random_tree(VOCABULARY, 24), 1),
        (knowing_tree(texts, VOCABULARY, 24, right=0.8), 1),
        (knowing_tree(texts, VOCABULARY, 24, right=0.8), 2),
    ):
        outcomes = run(runner, wanted, propose=propose, launch=steps, passes=passes, stagger=2, config=config)
        alike = [one.token_ids == other for one, other in zip(outcomes, expected, strict=True)]
        assert all(alike) if exact else [len(one.token_ids) for one in outcomes] == [24] * len(wanted)
    accepted = sum(one.finished.totals.accepted_tokens for one in outcomes)
    assert accepted > 10 if exact else accepted >= 0


def test_a_rank_that_hangs_ends_the_others(folder: Path) -> None:
    end_by_a_rank_that_hangs(replace(config_for(folder, "bfloat16"), capture_seconds=1.0))
