"""Of a checkpoint of text and images the part for text is served, and answers as that part alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from safetensors.torch import save_file
from text_parts import TEXT_PARTS, WHOLE, whole_model
from windowed_models import WINDOWED

from target_service.config import TargetConfig
from target_service.model.loading.inspection import inspect
from target_service.model.loading.loader import load_runner
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.support import ModelRefused
from tree_models.reference import published_tensors

# Of images, sounds and movements, by names from transformers' conversion of Cosmos3-Edge.
COSMOS_MAKES = (
    "action_modality_embed", "action_proj_in.fc.weight", "time_embedder.linear_1.weight", "proj_out.bias",
    "norm_moe_gen.weight", "layers.1.input_layernorm_moe_gen.weight", "layers.0.mlp_moe_gen.up_proj.weight",
    "layers.0.self_attn.add_q_proj.weight", "layers.0.self_attn.to_add_out.weight",
    "layers.1.self_attn.norm_added_k.weight", "layers.1.self_attn.k_norm_und_for_gen.weight",
)  # fmt: skip
VISION = {"model_type": "clip_vision_model", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path: Path, byte_tokenizer: Any) -> Path:
    """A folder in Llava's layout around a tiny Llama."""
    model = make_tiny(vocab_size=300)
    published = published_tensors(model)
    tensors = {
        name.replace("model.", "language_model.model.", 1)
        if name.startswith("model.")
        else f"language_model.{name}": published.read(name).clone()
        for name in published.stored
    }
    tensors["vision_tower.vision_model.embeddings.class_embedding"] = torch.zeros(8)
    tensors["multi_modal_projector.linear_1.weight"] = torch.zeros(48, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": model.config.to_dict(),
        "vision_config": VISION,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_part_for_text_is_served(folder: Path) -> None:
    runner = load_runner(TargetConfig(model=str(folder), dtype="float32", kv_tokens=64))
    check_runner(runner, own_logits(make_tiny(vocab_size=300)))
    assert inspect(folder).verdict == "can be served"


def test_gemma_4_is_served_as_it_is_published(tmp_path: Path, byte_tokenizer: Any) -> None:
    """With keys and values of layers that have none, which nobody reads."""
    model_type, settings = WINDOWED["gemma4"]
    settings = settings | {"vocab_size": 300, "vocab_size_per_layer_input": 300, "tie_word_embeddings": True}
    model = make_tiny(model_type, **settings)
    published = published_tensors(model)
    tensors = {
        name.replace("model.", "model.language_model.", 1): published.read(name).clone() for name in published.stored
    }
    unread = "model.language_model.layers.5.self_attn."
    tensors |= {f"{unread}k_proj.weight": torch.zeros(48, 48), f"{unread}k_norm.weight": torch.zeros(24)}
    tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.zeros(8, 8)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.zeros(8, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    text = model.config.to_dict()
    config = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer.save_pretrained(tmp_path)
    runner = load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64))
    check_runner(runner, own_logits(model))
    assert inspect(tmp_path).verdict == "can be served"
    assert len(runner.cache.keys) == 3


@pytest.mark.parametrize(("name", "speaking"), [("qwen2_5_omni", "token2wav"), ("qwen3_omni_moe", "code2wav")])
def test_what_thinks_in_an_omni_model_is_served(name: str, speaking: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    """Beside what hears, sees and speaks."""
    model_type, settings = TEXT_PARTS[name]
    model = make_tiny(model_type, **settings | {"vocab_size": 300})
    published = published_tensors(model)
    tensors = {f"thinker.{own}": published.read(own).clone() for own in published.stored}
    others = "thinker.visual.merger", "thinker.audio_tower.proj1", "talker.model.norm", f"{speaking}.decoder"
    save_file(tensors | {f"{other}.weight": torch.zeros(4) for other in others}, tmp_path / "model.safetensors")
    config = {"model_type": name, "thinker_config": {"text_config": model.config.to_dict()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer.save_pretrained(tmp_path)
    assert inspect(tmp_path).verdict == "can be served"
    runner = load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64))
    check_runner(runner, own_logits(model))


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_of_a_whole_model_is_served(name: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    """Its own logits of a text; the first one's head is tied."""
    model = whole_model(name, tied=name == "qwen2_vl")
    published = published_tensors(model)
    tensors = {name: published.read(name).clone() for name in published.stored}
    tensors |= {one: torch.zeros(4) for one in COSMOS_MAKES if name == "cosmos3_edge"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    byte_tokenizer.save_pretrained(tmp_path)
    assert inspect(tmp_path).verdict == "can be served"
    runner = load_runner(TargetConfig(model=str(tmp_path), dtype="float32", kv_tokens=64))
    check_runner(runner, own_logits(model))


def test_another_kind_of_text_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"model_type": "bitnet"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="it takes more than text"):
        load_runner(TargetConfig(model=str(folder), dtype="float32", kv_tokens=64))
