"""Tiny checkpoints with MTP modules in their published layouts, and the plain module that the real one is held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3Config, Ernie4_5Config, Glm4MoeConfig, PretrainedConfig, Qwen2Config, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5DecoderLayer, Ernie4_5RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding

from draft_service.eagle.head import EagleHead

VOCABULARY, HIDDEN, LAYERS, HEADS = 60, 16, 3, 4
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
}
MIMO = BASE | {"model_type": "mimo", "num_key_value_heads": 2, "attention_bias": True}
DEEPSEEK = BASE | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    # The module's layer, one past the last, is dense.
    "first_k_dense_replace": 99,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 10,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
}
MIMO_V2 = BASE | {
    "model_type": "mimo_v2_flash",
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    # Of the target's other layers, and none of the modules' business.
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rope_theta": 900.0,
    "swa_head_dim": HIDDEN // HEADS,
    "swa_v_head_dim": HIDDEN // HEADS,
    "swa_rope_theta": 5000.0,
    "layernorm_epsilon": 1e-5,
}
# GLM-4.5 and -4.6: DeepSeek-V3's layout and experts around Llama's attention, half of whose heads are turned.
GLM = (
    BASE
    | EXPERTS
    | {
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    }
)
QWEN3_NEXT = BASE | {
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 12,
}
ERNIE = BASE | {
    "model_type": "ernie4_5_moe",
    "num_key_value_heads": 2,
    "use_bias": False,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 10,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
}
# config.json of what differs in what it computes.
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": MIMO,
    "mimo-v2": MIMO_V2,
    "glm": GLM,
    "qwen3-next": QWEN3_NEXT,
    "ernie": ERNIE,
    "deepseek, dense": DEEPSEEK,
    "deepseek, experts": DEEPSEEK | EXPERTS,
    "deepseek, experts as they are weighted": DEEPSEEK | EXPERTS | {"norm_topk_prob": False},
    "deepseek, yarn": DEEPSEEK | YARN,
    "deepseek, one query projection, halves": DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False},
}


@dataclass(frozen=True)
class Published:
    """How a layout calls a module's parts, and what of it is not as in DeepSeek-V3's. Names have a place for the
    module's number, which is `first` for the first one; `layer` is the prefix of the layer's, of embedding and lm_head.
    """

    layer: str
    norms: tuple[str, str, str]
    joining: str
    first: int = 0
    state_first: bool = False
    chained: bool = True
    offset: float = 0.0  # added to the norms' weights

    def of(self, name: str, module: int) -> str:
        return name.format(self.first + module)


def below(prefix: str, norms: tuple[str, str, str], joining: str, **others: Any) -> Published:
    """A layout with all names under one prefix."""
    first, second, last = (f"{prefix}{norm}" for norm in norms)
    return Published(prefix, (first, second, last), f"{prefix}{joining}", **others)


DEEPSEEKS = below("model.layers.{}.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj", first=LAYERS)
PUBLISHED = {
    "deepseek_v3": DEEPSEEKS,
    "mimo": below(
        "model.mtp_layers.{}.",
        ("token_layernorm", "hidden_layernorm", "final_layernorm"),
        "input_proj",
        state_first=True,
    ),
    "mimo_v2_flash": below("model.mtp.layers.{}.", ("enorm", "hnorm", "final_layernorm"), "eh_proj", chained=False),
    "qwen3_next": Published(
        "mtp.layers.{}.", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), "mtp.fc", offset=1.0
    ),
    "ernie4_5_moe": Published(
        "model.mtp_block.{}.",
        ("model.mtp_emb_norm.{}", "model.mtp_hidden_norm.{}", "model.norm"),
        "model.mtp_linear_proj.{}",
    ),
}


# transformers' layer and rotary positions of a kind of settings.
_PARTS: dict[type[PretrainedConfig], tuple[Any, Any]] = {
    DeepseekV3Config: (DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding),
    Glm4MoeConfig: (Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding),
    Qwen2Config: (Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    Qwen3NextConfig: (Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding),
    Ernie4_5Config: (Ernie4_5DecoderLayer, Ernie4_5RotaryEmbedding),
}


@dataclass
class PlainModule:
    """A module by the published formula around transformers' own decoder layer, with no cache: the definition.

    `tensors` are those of the whole checkpoint, in fp64 where they are computed with; `number` counts modules from 0.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    number: int = 0

    def __post_init__(self) -> None:
        self._published = PUBLISHED.get(self.config["model_type"], DEEPSEEKS)
        self._prefix = self._published.of(self._published.layer, self.number)
        settings = settings_of(self.config)
        self._rotary: Any = _PARTS[type(settings)][1](settings)
        self._layer = _layer(settings).double()
        self._layer.load_state_dict(_joined_experts(self._below("")), strict=False)

    def hidden(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        """[n, H] after the module's last norm, of rows that pair states [n, H] with tokens [n]."""
        first, second, last = self._published.norms
        embedding = self._norm(first, self._own("embed_tokens.weight")[list(tokens)])
        state = self._norm(second, states.double())
        joined = torch.cat([state, embedding] if self._published.state_first else [embedding, state], dim=-1)
        rows = (joined @ self._one(self._published.joining).T)[None]
        positions = torch.arange(rows.shape[1])[None]
        mask = torch.full((rows.shape[1],) * 2, float("-inf"), dtype=torch.float64).triu(1)[None, None]
        out = self._layer(rows, attention_mask=mask, position_embeddings=self._rotary(rows, positions))
        return self._norm(last, (out[0] if isinstance(out, tuple) else out)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., vocabulary]"""
        return hidden @ self._own("shared_head.head.weight").T

    def _own(self, name: str) -> Tensor:
        """The module's own, else the target's."""
        own, targets = self._prefix + name, {"shared_head.head.weight": "lm_head.weight"}.get(name, f"model.{name}")
        return self.tensors[own if own in self.tensors else targets].double()

    def _one(self, name: str) -> Tensor:
        return self.tensors[f"{self._published.of(name, self.number)}.weight"].double()

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        weight = self._one(name) + self._published.offset
        return functional.rms_norm(rows, (HIDDEN,), weight, BASE["rms_norm_eps"])

    def _below(self, prefix: str) -> dict[str, Tensor]:
        start = self._prefix + prefix
        return {
            name.removeprefix(start).replace("pre_mlp_layernorm", "post_attention_layernorm"): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }


def plain_logits(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: int, tokens: Sequence[int], states: Tensor
) -> Callable[[tuple[int, ...]], Tensor]:
    """What follows a path below the last of `tokens`, [vocabulary], by so many modules of a checkpoint: the formula of
    arXiv 2412.19437, section 2.2, as it stands, computed anew for every path.

    `states` [n, H] are those of `tokens` from the first on; that of the last is not known.
    """
    plain = [PlainModule(config, tensors, number) for number in range(modules)]
    chained = PUBLISHED.get(config["model_type"], DEEPSEEKS).chained

    def after(path: tuple[int, ...]) -> Tensor:
        text = [*tokens, *path]
        known = states[: len(tokens) - 1].double()
        hidden = known
        depth = min(1 + len(path), modules)
        for k in range(1, depth + 1):
            # Row i pairs what the module before made of row i with token i + k.
            read = hidden if chained else known
            hidden = plain[k - 1].hidden(text[k : k + len(read)], read)
        for _ in range(1 + len(path) - depth):
            # Below, the last module follows itself.
            read = torch.cat([read, hidden[-1:]])
            hidden = plain[depth - 1].hidden(text[depth : depth + len(read)], read)
        return plain[depth - 1].logits(hidden[-1])

    return after


def settings_of(config: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' settings of the layer that a config.json describes."""
    if config["model_type"] == "mimo_v2_flash":
        config = dict(config) | {name.removeprefix("swa_"): config[name] for name in config if name.startswith("swa_")}
    own = {name: value for name, value in config.items() if name not in ("model_type", "rope_theta", "rope_scaling")}
    scaling = dict(config.get("rope_scaling") or {"type": "default"})
    rope = scaling | {"rope_type": scaling.pop("type"), "rope_theta": config["rope_theta"]}
    rope.pop("type", None)
    kinds: dict[str, Any] = {
        "deepseek_v3": DeepseekV3Config,
        "glm4_moe": Glm4MoeConfig,
        "qwen3_next": Qwen3NextConfig,
        "ernie4_5_moe": Ernie4_5Config,
    }
    if "layer_types" in own:
        # The module's layer comes behind the target's.
        own |= {"layer_types": [*own["layer_types"], "full_attention"], "num_hidden_layers": LAYERS + 1}
    settings: PretrainedConfig = kinds.get(config["model_type"], Qwen2Config)(**own, rope_parameters=rope)
    settings._attn_implementation = "eager"
    return settings


def checkpoint_tensors(
    config: Mapping[str, Any], *, modules: int = 2, own_embedding: bool = False
) -> dict[str, Tensor]:
    """A target's weights as published, equal for equal arguments: embedding, head, some of a layer, and modules.

    `own_embedding` gives modules of DeepSeek's layout copies of embedding and head, which then differ from the target's
    and each other's, so that it shows which are read.
    """
    torch.manual_seed(11)
    names = PUBLISHED.get(config["model_type"], DEEPSEEKS)
    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], HIDDEN),
        "lm_head.weight": torch.randn(config["vocab_size"], HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "model.layers.0.mlp.up_proj.weight": torch.randn(24, HIDDEN),
    }
    for number in range(modules):
        prefix = names.of(names.layer, number)
        for name in names.norms:
            tensors[f"{names.of(name, number)}.weight"] = torch.rand(HIDDEN) + 0.5 - names.offset
        tensors[f"{names.of(names.joining, number)}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.4
        if own_embedding and config["model_type"] == "deepseek_v3":
            tensors[f"{prefix}embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN)
            tensors[f"{prefix}shared_head.head.weight"] = torch.randn(VOCABULARY, HIDDEN)
        for name, tensor in _published(_layer(settings_of(config)).state_dict()).items():
            large = torch.rand(tensor.shape) + 0.5 - names.offset if "norm" in name else torch.randn(tensor.shape) * 0.5
            tensors[prefix + _named(config["model_type"], name)] = large.contiguous()
    return tensors


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def module_weights(layout: str, modules: Sequence[EagleHead], target_layers: int) -> dict[str, Tensor]:
    """Heads with Llama's layer, as a layout names and joins the parts of modules without embedding and lm_head."""
    published = PUBLISHED[layout]
    if layout == "deepseek_v3":
        published = replace(published, first=target_layers)
    first, second, last = published.norms
    names = {
        "token_norm.": f"{first}.",
        "feature_norm.": f"{second}.",
        "fc.": f"{published.joining}.",
        "norm.": f"{last}.",
        "layers.0.": published.layer,
    }
    found: dict[str, Tensor] = {}
    for number, module in enumerate(modules):
        for name, tensor in module.weights().items():
            for neutral, own in names.items():
                if name.startswith(neutral):
                    named = published.of(own, number) + name.removeprefix(neutral)
                    found[_named(layout, named)] = tensor.clone()
        if published.state_first:
            assert module.fc is not None
            embedding, state = module.fc.weight.chunk(2, dim=1)
            found[f"{published.of(published.joining, number)}.weight"] = torch.cat([state, embedding], dim=1)
    return found


def _named(layout: str, name: str) -> str:
    """The name of a part of a layer in a layout, given Llama's."""
    return name.replace("post_attention_layernorm", "pre_mlp_layernorm") if layout == "mimo_v2_flash" else name


def _layer(settings: PretrainedConfig) -> torch.nn.Module:
    # Past the target's dense layers, where it has others.
    number = 0 if isinstance(settings, Qwen2Config | Ernie4_5Config) else LAYERS
    layer: torch.nn.Module = _PARTS[type(settings)][0](settings, number)
    return layer.eval().requires_grad_(False)


def _published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's weights by published names: transformers keeps all experts in one tensor, checkpoints do not."""
    found = {name: tensor for name, tensor in state.items() if not name.startswith("mlp.experts.")}
    if "mlp.experts.down_proj" in state:
        for number, (joint, down) in enumerate(
            zip(state["mlp.experts.gate_up_proj"], state["mlp.experts.down_proj"], strict=True)
        ):
            gate, up = joint.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
            found |= {f"mlp.experts.{number}.{name}_proj.weight": part for name, part in parts.items()}
    return found


def _joined_experts(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_published`."""
    found = {name: tensor.double() for name, tensor in published.items() if not name.startswith("mlp.experts.")}
    count = len({name.split(".")[2] for name in published if name.startswith("mlp.experts.")})
    if count:
        gate, up, down = (
            torch.stack([published[f"mlp.experts.{e}.{name}_proj.weight"] for e in range(count)]).double()
            for name in ("gate", "up", "down")
        )
        found |= {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}
    return found
