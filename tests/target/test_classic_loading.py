"""Folders of GPT-2 and its like are served as they were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from classic_models import CLASSIC
from conftest import TINY, make_tiny
from safetensors.torch import save_file
from transformers import AutoConfig, FuyuForCausalLM
from windowed_models import WINDOWED

from target_service.config import TargetConfig
from target_service.model.loading.inspection import inspect
from target_service.model.loading.loader import load_runner
from target_service.model.loading.self_check import check_runner, own_logits
from tree_models.layers.decoder import Decoder
from tree_models.reference import published_tensors


@pytest.mark.parametrize(
    ("name", "prefix", "masks"),
    [
        # The body was written by itself.
        ("gpt2", "transformer.", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("openai-gpt", "transformer.", ["h.0.attn.bias"]),
        ("gpt_bigcode", "", []),
        ("gpt_neo", "", ["transformer.h.0.attn.attention.bias", "transformer.h.1.attn.attention.masked_bias"]),
        ("gpt_neox", "", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"]),
        ("gpt_neox_japanese", "", []),
        ("gptj", "", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("codegen", "", ["transformer.h.0.attn.causal_mask"]),
        ("falcon", "", []),
        ("falcon, falling", "", []),
        ("opt", "", []),
        ("biogpt", "", []),
        ("xglm", "", []),
        ("mpt", "", []),
        ("persimmon", "", []),
        ("dbrx", "", []),
        ("modernbert", "", []),
        ("bloom", "transformer.", []),
    ],
)
def test_published_folders_are_served(
    name: str, prefix: str, masks: list[str], tmp_path: Path, byte_tokenizer: Any
) -> None:
    model_type, settings = (CLASSIC | WINDOWED)[name]
    model = make_tiny(model_type, **settings | {"vocab_size": 300})
    published = published_tensors(model)
    tensors = {own.removeprefix(prefix): published.read(own).clone() for own in published.stored}
    tensors |= {own: torch.ones(1, 1, 4, 4) for own in masks}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    byte_tokenizer.save_pretrained(tmp_path)
    assert inspect(tmp_path).verdict == "can be served"
    runner = load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64))
    assert isinstance(runner.network, Decoder)
    check_runner(runner, own_logits(model))


def test_the_text_of_fuyu_is_served(tmp_path: Path, byte_tokenizer: Any) -> None:
    sizes = {**TINY, "vocab_size": 300, "num_key_value_heads": 4}
    whole = sizes | {"text_config": sizes | {"model_type": "persimmon"}, "patch_size": 4, "image_token_id": 299}
    config = AutoConfig.for_model("fuyu", **whole)
    torch.manual_seed(0)
    model = FuyuForCausalLM._from_config(config, dtype=torch.float32).eval()
    published = published_tensors(model)
    assert "vision_embed_tokens.weight" in published.stored
    save_file({name: published.read(name).clone() for name in published.stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    byte_tokenizer.save_pretrained(tmp_path)
    assert inspect(tmp_path).verdict == "can be served"
    check_runner(load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64)), own_logits(model))
