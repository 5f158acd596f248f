"""Checkpoints are read strictly: published layouts fit; what is missing, left over or of another kind is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from latent_models import V3
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.checkpoints.folder import Checkpoint
from tree_models.building import build
from tree_models.families import describe
from tree_models.families.rotary import rotary
from tree_models.layer_comparison import layers_that_differ
from tree_models.layers.decoder import Decoder
from tree_models.layers.linear import Linear
from tree_models.layers.placing import Placement
from tree_models.reference import published_tensors
from tree_models.spec import FamilyRefused
from tree_models.weights.checkpoint import TensorsInMemory, WeightsRefused, text_tensors, whole_names

CPU = Placement(torch.device("cpu"), torch.float32)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
Change = Any


def decoder_of(config: Any, tensors: dict[str, Tensor]) -> Decoder:
    description = describe(config)
    assert description is not None
    return build(description, TensorsInMemory(tensors), CPU)


def tensors_of(model: Any) -> dict[str, Tensor]:
    published = published_tensors(model)
    return {name: published.read(name).clone() for name in published.stored}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("phi3", {}),
        ("glm4", {"head_dim": 16}),
        ("mixtral", EXPERTS),
        ("granitemoe", EXPERTS),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
        ("deepseek_v3", V3),
    ],
)
def test_folders_have_the_names_of_the_family(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny(model_type, **settings)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    description = describe(model.config)
    assert description is not None
    read = build(description, Checkpoint.of_folder(tmp_path), CPU)
    expected = build(description, published_tensors(model), CPU)
    for (name, tensor), own in zip(read.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(tensor, own), name


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("lm_head.weight"), "missing are lm_head.weight"),
        (drop("model.layers.1.mlp.up_proj.weight"), r"missing are model.layers.1.mlp.up_proj.weight"),
        (drop("model.norm.weight"), r"missing are model.norm.weight"),
        (put("score.weight", torch.zeros(2, 48)), "left over are score.weight"),
        (put("model.layers.2.mlp.up_proj.weight", torch.zeros(96, 48)), "left over are model.layers.2.mlp.up_proj"),
        (put("model.layers.0.self_attn.q_proj.bias", torch.zeros(48)), "left over are .*q_proj.bias"),
        (
            put("model.embed_tokens.weight", torch.zeros(213, 48)),
            r"is \[213, 48\], expected \[211, 48\]",
        ),
        (put("model.norm.weight", torch.zeros(48, dtype=torch.int64)), "model.norm.weight \\(I64\\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: Change, reason: str) -> None:
    model = make_tiny()
    tensors = tensors_of(model)
    change(tensors)
    with pytest.raises(WeightsRefused, match=reason) as refused:
        decoder_of(model.config, tensors)
    assert "\n" not in str(refused.value)


def test_the_first_ten_names_are_shown() -> None:
    model = make_tiny()
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_of(model).items()}
    with pytest.raises(
        WeightsRefused, match=r"model\.embed_tokens\.weight, .* and 10 more; left over are .* and 10 more$"
    ):
        decoder_of(model.config, tensors)


def test_buffers_and_modules_that_nobody_reads_are_ignored() -> None:
    model = make_tiny()
    tensors = tensors_of(model)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(48, 96)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 48)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(48, 96)
    tensors["mtp.layers.0.eh_proj.weight"] = torch.zeros(48, 96)
    decoder_of(model.config, tensors)


def test_a_tied_head_that_differs_is_refused() -> None:
    model = make_tiny(tie_word_embeddings=True)
    tensors = tensors_of(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    decoder_of(model.config, tensors)
    tensors["lm_head.weight"][3, 4] += 1
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        decoder_of(model.config, tensors)


def test_of_two_tied_tensors_one_is_enough() -> None:
    model = make_tiny(tie_word_embeddings=True)
    tensors = tensors_of(model)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    assert torch.equal(decoder_of(model.config, tensors).embedding, tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsRefused, match=r"missing are lm_head\.weight, model\.embed_tokens\.weight"):
        decoder_of(model.config, tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "glm4", "deepseek_v3"])
def test_a_body_that_was_written_by_itself_has_names_without_its_prefix(model_type: str, tied: bool) -> None:
    settings: dict[str, Any] = {"glm4": {"head_dim": 16}, "deepseek_v3": V3}.get(model_type, {})
    model = make_tiny(model_type, **settings, tie_word_embeddings=tied)
    description = describe(model.config)
    assert description is not None
    tensors = tensors_of(model)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["layers.2.eh_proj.weight"] = bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    def read(found: dict[str, Tensor]) -> Decoder:
        return build(description, whole_names(TensorsInMemory(found), description.names), CPU)

    expected = build(description, TensorsInMemory(tensors), CPU)
    for (name, tensor), own in zip(read(bare).named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(tensor, own), name
    with pytest.raises(WeightsRefused, match=r"with and without 'model\.' before their names: model\.norm\.weight$"):
        read(bare | {"model.norm.weight": bare["norm.weight"]})
    with pytest.raises(WeightsRefused, match=r"left over are bias, model\.layers\.0\.other\.weight$"):
        read(bare | {"layers.0.other.weight": torch.zeros(1), "bias": torch.zeros(1)})
    del bare["norm.weight"]
    with pytest.raises(WeightsRefused, match=r"missing are model\.norm\.weight$"):
        read(bare)


def test_experts_may_be_one_tensor() -> None:
    """As transformers keeps them in memory and Qwen3.5's are published."""
    model = make_tiny("qwen3_moe", head_dim=16, **EXPERTS)
    tensors = tensors_of(model)
    expected = decoder_of(model.config, tensors)
    joined = {name: one.clone() for name, one in model.state_dict().items()}
    assert joined["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 48, 48)
    found = decoder_of(model.config, joined)
    assert all(torch.equal(one, own) for one, own in zip(found.parameters(), expected.parameters(), strict=True))
    assert layers_that_differ(found, model.config, TensorsInMemory(joined)) == []
    # Some layers so, others not.
    mixed = {name: one for name, one in tensors.items() if ".layers.0." in name or ".experts." not in name}
    decoder_of(model.config, mixed | {name: one for name, one in joined.items() if ".layers.1.mlp.experts." in name})
    short = joined | {"model.layers.1.mlp.experts.down_proj": torch.zeros(3, 48, 24)}
    with pytest.raises(WeightsRefused, match=r"missing are model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight$"):
        decoder_of(model.config, short)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.text_model."])
def test_the_text_part_is_read_alone(prefix: str) -> None:
    model = make_tiny()
    text = tensors_of(model)
    head = "language_model.lm_head." if prefix.startswith("language_model") else "lm_head."
    whole = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head): tensor
        for name, tensor in text.items()
    }
    whole["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3)
    whole["vision_tower.patch_embed.weight"] = torch.zeros(3)
    whole["multi_modal_projector.linear_1.weight"] = torch.zeros(3)
    description = describe(model.config)
    assert description is not None
    read = build(description, text_tensors(TensorsInMemory(whole)), CPU)
    assert torch.equal(read.embedding, text["model.embed_tokens.weight"])
    # Whichever comes first, one of both would be dropped.
    for again in ({**text, **whole}, {**whole, **text}):
        with pytest.raises(WeightsRefused, match=r"under another prefix too: .*model\.embed_tokens\.weight"):
            text_tensors(TensorsInMemory(again))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 40.0, "beta_fast": 24, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "factor": 16.0, "attention_factor": 1.3},
        {"rope_type": "longrope", "short_factor": [1.0 + i / 9 for i in range(16)], "long_factor": [9.0] * 16},
        {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [9.0] * 16, "factor": 32.0},
        {"rope_type": "proportional"},
        {"rope_type": "proportional", "factor": 8.0},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    original = (
        {}
        if parameters["rope_type"] in ("default", "linear", "dynamic", "proportional")
        else {"original_max_position_embeddings": 1024}
    )
    rope = {"rope_theta": 500000.0, "partial_rotary_factor": 0.5} | parameters | original
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=rope, max_position_embeddings=8192)
    if parameters["rope_type"] == "default":
        expected, scaling = 500000.0 ** -(torch.arange(0, 32, 2) / 32), 1.0
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    found = rotary(config, 64)
    torch.testing.assert_close(torch.tensor(found.frequencies), expected, rtol=2e-6, atol=0)
    assert found.scaling == pytest.approx(scaling)
    # All of a head, of which a half is turned by nothing.
    assert found.width == (64 if parameters["rope_type"] == "proportional" else 32)


def test_what_is_not_computed_is_refused() -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "axial", "rope_theta": 1e4}
    with pytest.raises(FamilyRefused, match="of type axial"):
        describe(config)
    with pytest.raises(FamilyRefused, match="activation tanh"):
        describe(LlamaConfig(hidden_act="tanh"))
    assert describe(make_tiny("bitnet").config) is None


def test_packed_products_are_the_plain_ones_in_any_order() -> None:
    from dataclasses import replace

    from tree_models.layers.linear import can_pack

    half = replace(CPU, dtype=torch.bfloat16)
    if not can_pack(torch.bfloat16, half.device):
        pytest.skip("this CPU packs nothing")
    plain, packed = (Linear(32, (16, 8), place, bias=True) for place in (half, replace(half, packed=True)))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    order = torch.cat([order[order < 16], order[order >= 16]])
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for linear in (plain, packed):
        generator = torch.Generator().manual_seed(2)
        for slot in linear.slots(["a", "b"], Tensor.copy_, order):
            slot.write([torch.zeros(spec.shape, dtype=spec.dtype) for spec in slot.specs.values()])
        assert not linear(rows).any()
        weights = {
            "a.weight": torch.randn(16, 32, generator=generator), "b.weight": torch.randn(8, 32, generator=generator),
            "a.bias": torch.randn(16, generator=generator), "b.bias": torch.randn(8, generator=generator),
        }  # fmt: skip
        for slot in linear.slots(["a", "b"], Tensor.copy_, order):
            slot.write([weights[name].bfloat16() for name in slot.specs])
    torch.testing.assert_close(packed(rows), plain(rows), rtol=0.02, atol=0.02)
    assert packed(rows[:0]).shape == (0, 24)
