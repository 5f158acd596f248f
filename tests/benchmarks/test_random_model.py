"""Models of a shape with random weights, as transformers reads them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from teaching_model import save_teaching_model
from transformers import AutoModelForCausalLM

from benchmarks.shared.random_model import SHAPES, read_shape, tensors_of, write_model


def test_what_is_written_is_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.shared.model_folder.SHARD_BYTES", 1 << 20)
    config = read_shape("tiny")
    config.vocab_size = 4001
    written = write_model(tmp_path / "model", config, str(save_teaching_model(tmp_path / "teacher", layers=2)), "cpu")
    shards = list((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 1
    assert written <= sum(shard.stat().st_size for shard in shards) < written + 4096 * len(shards)
    assert (tmp_path / "model" / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, weight in tensors_of(config, "cpu"):
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], weight), name


def test_a_shape_has_all_of_its_weights() -> None:
    config, shape = read_shape("tiny"), SHAPES["tiny"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    # Queries and output, half as many keys and values, the MLP, two norms.
    layer = 2 * hidden * hidden + hidden * hidden + 3 * hidden * inner + 2 * hidden
    total = sum(weight.numel() for _, weight in tensors_of(config, "cpu"))
    assert total == shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden + hidden


def test_a_shape_may_be_a_configuration(tmp_path: Path) -> None:
    read_shape("llama-8b").save_pretrained(tmp_path)
    config = read_shape(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    for name, value in SHAPES["llama-8b"].items():
        assert getattr(config, name) == value
