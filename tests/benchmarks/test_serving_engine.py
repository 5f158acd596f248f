"""The engine under both loads, with what its steps cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from teaching_model import save_teaching_model

from benchmarks.serving.engine import EngineAlone, capturing_for, sizes_of_loads
from benchmarks.serving.serving import ServingRun, parse
from benchmarks.shared.workload import random_prompts
from target_service.config import TargetConfig
from target_service.model.cuda_graphs.sizes import buckets_up_to, choose_bucket
from tree_kernels.attention import AttentionBatch


@pytest.mark.parametrize("concurrency", [1, 3])
def test_both_loops(tmp_path: Path, concurrency: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_teaching_model(tmp_path / "model", layers=2))
    words = ["--model", model, "--concurrency", str(concurrency), "--loops", "waves,closed"]
    options = parse([*words, "--waves", "2", "--max-tokens", "6"])
    session = ServingRun(options, random_prompts(7, 20, 259))
    alone = EngineAlone(TargetConfig(model=model, dtype="float32", kv_tokens=2048))
    try:
        session.measure({"plain": alone}, "engine")
    finally:
        alone.close()
    waves, closed = session.rows
    assert (waves["loop"], closed["loop"]) == ("waves", "closed")
    assert waves["tokens"] == 2 * 6 * concurrency
    # The first token of an answer comes with the step that reads its prompt; the warm-up's steps are not counted.
    steps = waves["steps"]
    assert steps["decode"]["tokens"] + steps["prompt"]["tokens"] == waves["tokens"]
    assert steps["decode"]["steps"] >= 2 * 5 and steps["decode"]["ms"]["forward"] > 0
    assert 0 < closed["tokens"] <= 6 * (concurrency + max(4 * concurrency, 24))
    assert closed["token_ms"]["n"] > 0
    assert "decode steps of" in capsys.readouterr().out


def test_random_weights_of_a_folder_without_any(tmp_path: Path) -> None:
    folder = save_teaching_model(tmp_path / "model", layers=2)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = TargetConfig(model=str(folder), kv_tokens=2048, speculation=False)
    alone = EngineAlone(config, random=True)
    try:
        _, answers = alone.wave(random_prompts(3, 20, 259), 6)
        assert [answer.tokens for answer in answers] == [6, 6, 6]
        # Each token is followed by one that is so many ids further, so that different prompts end differently.
        assert len(set(alone.last_tokens)) > 1
    finally:
        alone.close()


def decoding(sequences: int) -> AttentionBatch:
    """A step in which so many sequences decode a token each."""
    starts = tuple(range(sequences + 1))
    return AttentionBatch(starts, (512,) * sequences, ((0,),) * sequences, 16, (None,) * sequences)


def test_loads_decode_in_the_sizes_that_they_always_do() -> None:
    loads, every = (1, 8, 32, 64), buckets_up_to(8192, 64, common=True)
    few = sizes_of_loads(every, loads)
    assert len(few) < len(every) / 4
    for load in loads:
        assert choose_bucket(few, decoding(load)) == choose_bucket(every, decoding(load))
    # Larger layers are compiled by PyTorch where they are captured, for many seconds.
    assert few[-1].rows == 1536 and few[-1].sequences == 64


def test_only_sizes_of_loads_are_captured() -> None:
    pytest.importorskip("triton")
    from target_service.model.cuda_graphs import runner

    with capturing_for([1, 4]):
        assert {one.rows for one in runner.buckets_up_to(64, 4)} == {1, 4, 16, 32, 64}
    assert len(runner.buckets_up_to(64, 4)) > 5
