"""A head that processes share drafts behind their captured passes over gloo, without a GPU: no token changes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import drafting_ranks_worker
import pytest
import torch
from captured_ranks import DRAFT_TOKENS
from conftest import make_tiny
from drafting_ranks_worker import load_rank
from engine_harness import engine_config, plain_each, request, run
from in_pass_heads import recorded
from rerun_graphs import ROWS, SEQUENCES, without_gpu

from draft_service.in_pass import InPassHead
from outrider.sampling import SamplingParams
from target_service.config import TargetConfig
from target_service.execution.device_executor import DeviceSteps
from target_service.model.ranks.leading import start_ranks

__all__ = ["without_gpu"]

GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_drafts_of_all_ranks_change_no_token(without_gpu: None, ranks: int) -> None:
    del without_gpu
    model, rng = make_tiny(), random.Random(5)
    prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(length)] for length in (5, 40)]
    wanted = [request(prompt, 10, sampling=one) for one, prompt in zip((SEEDED, GREEDY), prompts, strict=True)]
    command = sys.executable, str(Path(drafting_ranks_worker.__file__))
    runner, link = start_ranks(TargetConfig(model="tiny", dtype="float32", tensor_parallel=ranks), load_rank, command)
    try:
        drafter = runner.in_pass
        assert isinstance(drafter, InPassHead) and drafter.divided
        drafted = recorded(drafter)
        steps = DeviceSteps(runner, max_sequences=SEQUENCES, max_rows=ROWS, backend="torch")
        config = engine_config(max_step_rows=ROWS, max_running=SEQUENCES, prefill_chunk=ROWS // 2)
        with torch.inference_mode():
            outcomes = run(runner, wanted, launch=steps, passes=2, stagger=2, config=config)
        assert [outcome.token_ids for outcome in outcomes] == plain_each(model, wanted)
    finally:
        link.close()
    assert len(drafted) > 8 and max(max(path) for tree in drafted for path in tree.paths) < DRAFT_TOKENS
