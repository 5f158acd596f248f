"""A model that two GPUs share, over captured steps: the answers of one GPU, whatever drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from captured_ranks import DRAFT_TOKENS
from conftest import make_tiny
from gpu_ranks_worker import ROWS, SEQUENCES, TOKENS
from in_pass_heads import head_of
from rank_processes import end_by_a_rank_that_hangs
from scripted_service import byte_tokenizer

from draft_service.eagle.checkpoint import save_head

TESTS = Path(__file__).parents[1]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and in a folder beside it a head that two ranks can divide."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    # Of heads that layers in fused form take.
    model = make_tiny(num_hidden_layers=3, hidden_size=64)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    save_head(head_of(model, tokens=DRAFT_TOKENS, head_width=16), path.with_name("head"))
    return path


@pytest.mark.parametrize("in_passes", [False, True], ids=["drafts elsewhere", "a head in the passes"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafts_change_nothing(folder: Path, dtype: str, *, in_passes: bool) -> None:
    """In fp32, where the answers are those of one GPU too; in bf16 it runs, and most of them are."""
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(TESTS / "gpu_ranks_worker.py"), str(folder), dtype]
    command += [str(folder.with_name("head"))] if in_passes else []
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True)
    for found in json.loads(done.stdout):
        assert found["tokens"] == [TOKENS] * len(found["alike"]), found
        if dtype == "float32":
            assert all(found["alike"]), found
            assert not found["knowing"] or found["accepted"] > 10, found


def test_a_rank_that_hangs_ends_the_service(folder: Path, tmp_path: Path) -> None:
    """Within captured passes, in which the other GPU waits for it."""
    few = ("--max-step-rows", str(ROWS), "--max-running", str(SEQUENCES), "--no-speculation", "--lookup-tokens", "0")
    end_by_a_rank_that_hangs(folder, tmp_path, "--device", "cuda", "--capture-seconds", "5", *few)
