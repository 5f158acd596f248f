"""Llama, and the families that differ from it in arguments only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tree_models.families.common import (
    Description,
    activation,
    attention,
    counted,
    decoder,
    head_width,
    layer,
    mlp,
    rms_norm,
)
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FamilyRefused,
    HeadNormSpec,
    MLPSpec,
    NormSpec,
    PositionScale,
    RotarySpec,
    RouterSpec,
)

_FED = "feed_forward."
_COSMOS = WeightNames(
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    # As published, beside what makes images, sounds and movements.
    renamed=(
        *((f"self_attn.to_{name}", f"self_attn.{name}_proj") for name in "qkv"),
        ("self_attn.to_out", "self_attn.o_proj"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
    ),
    ignored=(
        *WeightNames().ignored,
        r"(model\.)?(action_\w+|time_embedder|proj_(in|out)|norm_moe_gen)(\..*)?",
        r"model\.layers\.\d+\.(\w+_moe_gen|self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|\w+_for_gen))\..*",
    ),
)
_LLAMA4 = WeightNames(
    gate_up=(f"{_FED}gate_proj", f"{_FED}up_proj"),
    down=f"{_FED}down_proj",
    router=f"{_FED}router",
    expert_gate_up=(f"{_FED}experts.{{expert}}.gate_proj", f"{_FED}experts.{{expert}}.up_proj"),
    expert_down=f"{_FED}experts.{{expert}}.down_proj",
    experts_by_columns=True,
    shared_gate_up=(f"{_FED}shared_expert.gate_proj", f"{_FED}shared_expert.up_proj"),
    shared_down=f"{_FED}shared_expert.down_proj",
)


def llama(config: Any, feeding: MLPSpec | None = None, **attending: Any) -> Description:
    """Llama 1 to 3.x, with another MLP or other attention if they are given."""
    norm, feeding = rms_norm(config), feeding or mlp(config)
    layers = [layer(attention(config, index, **attending), feeding, norm) for index in counted(config)]
    return Description(decoder(config, layers, norm), WeightNames())


def mistral(config: Any) -> Description:
    """Mistral and Ministral: no biases."""
    return llama(config, mlp(config, bias=False), windows=True, qkv_bias=False, out_bias=False)


def ministral3(config: Any) -> Description:
    """Ministral 3: queries grow with their position."""
    rope = config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    scale = PositionScale(float(beta), int(rope["original_max_position_embeddings"])) if beta else None
    turning = replace(rotary(config, head_width(config)), query_scale=scale)
    return llama(config, mlp(config, bias=False), windows=True, qkv_bias=False, out_bias=False, rotary=turning)


def smollm3(config: Any) -> Description:
    """SmolLM3: every fourth layer embeds no positions."""
    norm, feeding = rms_norm(config), mlp(config)
    layers = []
    for index in counted(config):
        changes: dict[str, Any] = {} if config.no_rope_layers[index] else {"rotary": None}
        layers.append(layer(attention(config, index, windows=True, **changes), feeding, norm))
    return Description(decoder(config, layers, norm), WeightNames())


def seed_oss(config: Any) -> Description:
    """Seed-OSS: the last product of attention has a bias of its own."""
    return llama(config, out_bias=bool(config.attention_out_bias))


def cosmos3_edge(config: Any) -> Description:
    """The text of Cosmos3-Edge: Llama with an MLP without gates. Three positions, which are equal in texts."""
    return replace(llama(config, mlp(config, gated=False)), names=_COSMOS)


def mllama(config: Any) -> Description:
    """The text of Llama 3.2 Vision: Llama, whose layers of images have nothing to do, and images' tokens no rows."""
    found, images = llama(config, qkv_bias=False, out_bias=False), frozenset(config.cross_attention_layers)
    numbers = tuple(index for index in counted(config) if index not in images)
    unread = "|".join(str(index) for index in sorted(images))
    ignored = (*found.names.ignored, *([rf"model\.layers\.({unread})\..*"] if images else []))
    spec = replace(found.spec, layers=tuple(found.spec.layers[index] for index in numbers), unread_tokens=8)
    return Description(spec, replace(found.names, numbers=numbers, ignored=ignored))


def helium(config: Any) -> Description:
    """Helium: neighbouring pairs are rotated."""
    return llama(config, out_bias=False, rotary=rotary(config, head_width(config), interleaved=True))


def diffllama(config: Any) -> Description:
    """DiffLlama: heads are pairs, of which one's output is taken from the other's."""
    norm, feeding, layers = rms_norm(config), mlp(config), []
    for index in counted(config):
        # transformers' lambda_init_fn.
        begin = 0.8 - 0.6 * math.exp(-0.3 * index)
        own = attention(config, index, differential=begin, pair_epsilon=float(config.rms_norm_eps))
        layers.append(layer(own, feeding, norm))
    return Description(decoder(config, layers, norm), WeightNames())


def arcee(config: Any) -> Description:
    """Arcee: an MLP without a gate."""
    return llama(config, mlp(config, gated=False))


def nanochat(config: Any) -> Description:
    """nanochat: norms without weights, of embedded rows too, and heads that turn backwards before they are normed."""
    norm = rms_norm(config, weight=False)
    turning = replace(rotary(config, head_width(config)), backwards=True)
    changes: dict[str, Any] = {"rotary": turning, "head_norm": HeadNormSpec(norm, after_rotary=True)}
    feeding, cap = mlp(config, gated=False, bias=False), config.final_logit_softcapping
    layers = [layer(attention(config, index, **changes), feeding, norm) for index in counted(config)]
    ends = {"embedding_norm": norm, "logits_cap": None if cap is None else float(cap)}
    return Description(decoder(config, layers, norm, **ends), WeightNames(gate_up=("mlp.fc1",), down="mlp.fc2"))


def llama4(config: Any) -> Description:
    """Llama 4's text: an MLP, or one expert of many that reads weighed rows beside one for all."""
    if config.num_experts_per_tok != 1:
        raise FamilyRefused(f"{config.num_experts_per_tok} experts that read weighed rows are not served")
    norm, width = rms_norm(config), int(config.intermediate_size)
    router = RouterSpec(scores="sigmoid", renormalised=False, rounded=True)
    shared = MLPSpec(width, activation(config))
    experts = ExpertsSpec(
        int(config.num_local_experts), 1, width, router, shared.activation, shared=shared, weighs_inputs=True
    )
    dense = mlp(config, config.intermediate_size_mlp, bias=False)
    layers = [
        layer(_of_chunks(config, index), experts if index in config.moe_layers else dense, norm)
        for index in counted(config)
    ]
    return Description(decoder(config, layers, norm), _LLAMA4)


def _of_chunks(config: Any, index: int) -> AttentionSpec:
    """Of a layer, which sees all tokens or its chunk, and embeds positions or scales queries by them."""
    size, longest, changes = config.attention_chunk_size, config.max_position_embeddings, dict[str, Any]()
    if config.layer_types[index] == "chunked_attention" and size < longest:
        changes = {"window": int(size), "chunked": True}
    if config.no_rope_layers[index]:
        changes["rotary"] = rotary(config, config.head_dim, interleaved=True)
        if config.use_qk_norm:
            own = NormSpec("rms", float(config.rms_norm_eps), weight=False)
            changes["head_norm"] = HeadNormSpec(own, after_rotary=True)
    elif config.attn_temperature_tuning:
        scale = PositionScale(float(config.attn_scale), int(config.floor_scale), ahead=1)
        # Nothing turns.
        changes["rotary"] = RotarySpec((0.0,) * (config.head_dim // 2), query_scale=scale)
    else:
        changes["rotary"] = None
    return attention(config, index, **changes)
