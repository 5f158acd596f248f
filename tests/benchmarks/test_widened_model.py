"""A model and its head in a larger shape say what they say in their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import make_tiny
from eagle_heads import PlainHead, make_head
from medusa_heads import make_heads
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.widened.medusa import widen_medusa
from benchmarks.widened.model import SHAPES, CannotWiden, DecoderShape, Widening, wide_config, widen_head, widen_model
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import EagleCheckpoint, save_head
from draft_service.eagle.head import EagleHead
from draft_service.medusa.checkpoint import MedusaCheckpoint, save_heads

VOCABULARY, LAYERS = 60, 6
SMALL = DecoderShape(hidden=48, heads=6, kv_heads=2, head_dim=8, inner=40, layers=LAYERS)
WIDE = DecoderShape(hidden=96, heads=16, kv_heads=4, head_dim=32, inner=72, layers=LAYERS + 2)
MODEL = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
MODEL |= {"head_dim": 8, "intermediate_size": 40, "num_hidden_layers": LAYERS}
# The head's layer has heads of its own, and reads the state after the last norm too.
HEAD = {"hidden_size": 48, "target_hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
HEAD |= {"feature_layers": (1, 3, LAYERS), "fc_norm": True, "norm_output": True, "rms_norm_eps": 1e-3}
IDS = torch.arange(3, 43)[None]


class Pair(NamedTuple):
    """The small ones' and the large ones' folders."""

    small: Path
    wide: Path
    small_head: Path
    wide_head: Path


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("widened")
    made = Pair(folder / "small", folder / "wide", folder / "head", folder / "wide-head")
    model = make_tiny(**MODEL, rms_norm_eps=1e-3, tie_word_embeddings=request.param)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(made.small)
    save_head(make_head(**HEAD), made.small_head)
    widen_model(made.small, made.wide, WIDE, "cpu", torch.float32)
    widen_head(str(made.small_head), made.small, made.wide_head, made.wide, WIDE, "cpu", torch.float32)
    return made


def states_of(folder: Path) -> tuple[Tensor, tuple[Tensor, ...], Any]:
    """Logits [T, V], the outputs of all layers [T, H], the last one normed, and the configuration."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        said = model(IDS, output_hidden_states=True)
    return said.logits[0], tuple(state[0] for state in said.hidden_states[1:]), model.config


def features_of(folder: Path, head: EagleHead) -> Tensor:
    """[T, H] what the head makes of its target's hidden states."""
    _, states, config = states_of(folder)
    # transformers norms the last layer's output.
    taken = [states[min(layer, config.num_hidden_layers - 1)] for layer in head.config.feature_layers or ()]
    return head.project(torch.cat(taken, dim=-1))


def test_logits_stay(pair: Pair) -> None:
    (small, states, _), (wide, wide_states, config) = states_of(pair.small), states_of(pair.wide)
    torch.testing.assert_close(wide, small, rtol=0, atol=1e-4)
    assert small.std() > 0.5
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (96, LAYERS + 2, 32)
    torch.testing.assert_close(wide_states[3][:, :48], states[3], rtol=0, atol=1e-4)
    for state in wide_states:
        assert not state[:, 48:].any()


def test_heads_stay(pair: Pair) -> None:
    small = EagleCheckpoint(pair.small_head).load(target=TargetCheckpoint(pair.small))
    wide = EagleCheckpoint(pair.wide_head).load(target=TargetCheckpoint(pair.wide))
    assert wide.config.feature_layers == (1, 3, LAYERS + 2)
    assert small.token_ids is not None and wide.token_ids is not None
    assert torch.equal(wide.token_ids, small.token_ids)
    features = [features_of(pair.small, small), features_of(pair.wide, wide)]
    torch.testing.assert_close(features[1][:, :48], features[0], rtol=0, atol=1e-4)
    plain = [PlainHead(small), PlainHead(wide)]
    tokens = IDS[0].tolist()
    for reader, own in zip(plain, features, strict=True):
        for position in range(8):
            reader.add(tokens[position + 1], own[position].double(), position, range(position))
        # And a drafted one, which reads the head's own feature.
        reader.add(tokens[20], reader.rows[-1].feature, 8, range(8))
    for one, other in zip(plain[0].rows, plain[1].rows, strict=True):
        torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=1e-4)


def test_medusa_heads_stay(pair: Pair, tmp_path: Path) -> None:
    save_heads(make_heads(target_hidden_size=48, num_layers=2, target_layers=LAYERS), tmp_path / "small")
    widen_medusa(str(tmp_path / "small"), pair.wide, tmp_path / "wide", "cpu", torch.float32)
    heads = [
        MedusaCheckpoint(tmp_path / name).load(target=TargetCheckpoint(target))
        for name, target in (("small", pair.small), ("wide", pair.wide))
    ]
    said = [own(states_of(folder)[1][-1]) for own, folder in zip(heads, (pair.small, pair.wide), strict=True)]
    torch.testing.assert_close(said[1], said[0], rtol=0, atol=1e-3)
    assert said[0].std() > 0.5
    assert heads[1].config.layers_of(LAYERS + 2) == (LAYERS + 2,)
    # As many bytes as real heads of the large model have: nothing but what reads live dimensions is zero.
    assert all((one == 0).float().mean() < 0.6 for name, one in heads[1].weights().items() if "weight" in name)


def test_nothing_is_left_empty(pair: Pair) -> None:
    """All but added layers' outputs and embeddings have the bytes of a real model."""
    model = AutoModelForCausalLM.from_pretrained(pair.wide)
    for name, weight in model.named_parameters():
        if "embed" in name or weight.ndim == 1 or "lm_head" in name:
            continue
        added = int(name.split(".")[2]) >= LAYERS
        silent = added and name.endswith(("o_proj.weight", "down_proj.weight"))
        assert (weight == 0).float().mean() <= (1.0 if silent else 0.75), name


def test_a_model_must_fit(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CannotWiden, match="hidden: 48 does not fit into 40"):
        widen_model(pair.small, tmp_path, DecoderShape(40, 16, 4, 32, 72, 8), "cpu", torch.float32)
    with pytest.raises(CannotWiden, match="more queries"):
        Widening(SMALL, DecoderShape(96, 8, 4, 32, 72, 8), "cpu", torch.float32)
    config = json.loads((pair.small / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(CannotWiden, match="only Llama"):
        widen_model(tmp_path, tmp_path / "out", WIDE, "cpu", torch.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_transformers_takes(name: str) -> None:
    shape, smol = SHAPES[name], DecoderShape(576, 9, 3, 64, 1536, 30)
    LlamaConfig(**wide_config({"hidden_size": 576, "rms_norm_eps": 1e-5}, shape, torch.bfloat16))
    for of_layer in (smol, replace(smol, layers=1)):
        Widening(of_layer, shape, "cpu", torch.float32)
