"""Tiny checkpoints with MTP modules in their published layouts, and the plain module that the real one is held to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3Config, PretrainedConfig, Qwen2Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

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
# config.json of what differs in what it computes.
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": MIMO,
    "deepseek, dense": DEEPSEEK,
    "deepseek, experts": DEEPSEEK | EXPERTS,
    "deepseek, experts as they are weighted": DEEPSEEK | EXPERTS | {"norm_topk_prob": False},
    "deepseek, yarn": DEEPSEEK | YARN,
    "deepseek, one query projection, halves": DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False},
}


@dataclass
class PlainModule:
    """A module by the published formula around transformers' own decoder layer, with no cache: the definition.

    `tensors` are those of the whole checkpoint, in fp64 where they are computed with.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        self._mimo = self.config["model_type"] == "mimo"
        self._prefix = "model.mtp_layers.0." if self._mimo else f"model.layers.{LAYERS}."
        settings = settings_of(self.config)
        rotary = Qwen2RotaryEmbedding if self._mimo else DeepseekV3RotaryEmbedding
        self._rotary: Any = rotary(settings)
        self._layer = _layer(settings, self._mimo).double()
        self._layer.load_state_dict(_joined_experts(self._below("")), strict=False)

    def hidden(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        """[n, H] after the module's last norm, of rows that pair the states [n, H] of tokens 0 .. with tokens 1 .. ."""
        first, second = ("token_layernorm", "hidden_layernorm") if self._mimo else ("enorm", "hnorm")
        embedding = self._norm(first, self._own("embed_tokens.weight")[list(tokens)])
        state = self._norm(second, states.double())
        # DeepSeek joins the embedding first, MiMo the state.
        joined = torch.cat([state, embedding] if self._mimo else [embedding, state], dim=-1)
        weight = self._one("input_proj.weight" if self._mimo else "eh_proj.weight")
        rows = (joined @ weight.T)[None]
        positions = torch.arange(rows.shape[1])[None]
        mask = torch.full((rows.shape[1],) * 2, float("-inf"), dtype=torch.float64).triu(1)[None, None]
        out = self._layer(rows, attention_mask=mask, position_embeddings=self._rotary(rows, positions))[0]
        return self._norm("final_layernorm" if self._mimo else "shared_head.norm", out)

    def logits(self, tokens: Sequence[int], states: Tensor, path: Sequence[int] = ()) -> Tensor:
        """[vocabulary] of what follows `path` below the last of `tokens`, whose tokens but the last have `states`.

        The module reads its own output where the target's state is not known.
        """
        rows, features = list(tokens[1:]), states[: len(tokens) - 1].double()
        for token in path:
            features = torch.cat([features, self.hidden(rows, features)[-1:]])
            rows.append(token)
        return self.hidden(rows, features)[-1] @ self._own("shared_head.head.weight").T

    def _own(self, name: str) -> Tensor:
        """The module's own, else the target's."""
        own, targets = self._prefix + name, {"shared_head.head.weight": "lm_head.weight"}.get(name, f"model.{name}")
        return self.tensors[own if own in self.tensors else targets].double()

    def _one(self, name: str) -> Tensor:
        return self.tensors[self._prefix + name].double()

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return functional.rms_norm(rows, (HIDDEN,), self._one(f"{name}.weight"), self.config["rms_norm_eps"])

    def _below(self, prefix: str) -> dict[str, Tensor]:
        start = self._prefix + prefix
        return {name.removeprefix(start): tensor for name, tensor in self.tensors.items() if name.startswith(start)}


def settings_of(config: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' settings of the layer that a config.json describes."""
    own = {name: value for name, value in config.items() if name not in ("model_type", "rope_theta", "rope_scaling")}
    scaling = dict(config.get("rope_scaling") or {"type": "default"})
    rope = scaling | {"rope_type": scaling.pop("type"), "rope_theta": config["rope_theta"]}
    rope.pop("type", None)
    kind = Qwen2Config if config["model_type"] == "mimo" else DeepseekV3Config
    settings = kind(**own, rope_parameters=rope)
    settings._attn_implementation = "eager"
    return settings


def checkpoint_tensors(config: Mapping[str, Any], *, own_embedding: bool = False) -> dict[str, Tensor]:
    """A target's weights as published, equal for equal arguments: embedding, head, some of a layer, and two modules.

    `own_embedding` gives a module of DeepSeek's layout its copies of embedding and head, which then differ from the
    target's, so that it shows which are read.
    """
    torch.manual_seed(11)
    mimo = config["model_type"] == "mimo"
    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], HIDDEN),
        "lm_head.weight": torch.randn(config["vocab_size"], HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "model.layers.0.mlp.up_proj.weight": torch.randn(24, HIDDEN),
    }
    norms = (
        ("token_layernorm", "hidden_layernorm", "final_layernorm") if mimo else ("enorm", "hnorm", "shared_head.norm")
    )
    for number in range(2):
        prefix = f"model.mtp_layers.{number}." if mimo else f"model.layers.{LAYERS + number}."
        tensors |= {f"{prefix}{name}.weight": torch.rand(HIDDEN) + 0.5 for name in norms}
        tensors[f"{prefix}{'input_proj' if mimo else 'eh_proj'}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.4
        if own_embedding and not mimo:
            tensors[f"{prefix}embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN)
            tensors[f"{prefix}shared_head.head.weight"] = torch.randn(VOCABULARY, HIDDEN)
        layer = _layer(settings_of(config), mimo)
        for name, tensor in _published(layer.state_dict()).items():
            large = torch.rand(tensor.shape) + 0.5 if "norm" in name else torch.randn(tensor.shape) * 0.5
            tensors[prefix + name] = large.contiguous()
    return tensors


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def mimo_weights(head: EagleHead) -> dict[str, Tensor]:
    """A head with Llama's layer, as MiMo names and joins its parts."""
    names = {
        "token_norm.": "token_layernorm.",
        "feature_norm.": "hidden_layernorm.",
        "fc.": "input_proj.",
        "norm.": "final_layernorm.",
        "layers.0.": "",
    }
    found: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        for neutral, published in names.items():
            if name.startswith(neutral):
                found[f"model.mtp_layers.0.{published}{name.removeprefix(neutral)}"] = tensor.clone()
    embedding, state = head.fc.weight.chunk(2, dim=1)
    found["model.mtp_layers.0.input_proj.weight"] = torch.cat([state, embedding], dim=1)
    return found


def _layer(settings: PretrainedConfig, mimo: bool) -> torch.nn.Module:
    kind: Any = Qwen2DecoderLayer if mimo else DeepseekV3DecoderLayer
    layer: torch.nn.Module = kind(settings, LAYERS if not mimo else 0)
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
