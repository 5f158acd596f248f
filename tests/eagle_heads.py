"""Tiny EAGLE heads with random weights, and the plain, loop-written head that the real one is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import LAYER_NAMES, HeadConfig, ModuleConfig
from tree_models.fused.preparing import LayerOptions, prepare_layers
from tree_models.layers.paged import UncachedPass
from tree_models.spec import ExpertsSpec, LatentSpec, RotarySpec, RouterSpec

VOCABULARY, DRAFT, HIDDEN = 60, 40, 16

# What makes heads differ in what they compute.
KINDS: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True},
    "two layers": {"num_layers": 2, "qkv_bias": True},
    "window": {"window": 5},
    "whole vocabulary": {"draft_vocab_size": VOCABULARY},
    "eagle-1": {"kind": "eagle", "num_features": 1, "fc_bias": True, "feature_layers": (12,)},
}


def make_head(**changes: Any) -> EagleHead:
    """A head in fp32, equal for equal arguments; weights large enough for peaked distributions."""
    settings: dict[str, Any] = {
        "kind": "eagle3",
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT,
        "target_hidden_size": HIDDEN,
        "num_features": 3,
        "feature_layers": (1, 5, 8),
    }
    return peaked_head(HeadConfig(**(settings | changes)))


def peaked_head(config: HeadConfig | ModuleConfig) -> EagleHead:
    """As `make_head`, of any configuration."""
    torch.manual_seed(3)
    ids = None if config.draft_vocab_size == config.vocab_size else torch.arange(DRAFT) + torch.arange(DRAFT) // 3
    head = EagleHead(config, ids)
    weights = head.weights()
    for name in sorted(weights, key=lambda name: _drawn(name, config.kind)):
        parameter = weights[name]
        if parameter.ndim == 2:
            parameter.normal_(0.0, 0.8 if name == "lm_head.weight" else 0.5)
        else:
            parameter.uniform_(0.5, 1.5)
    return head.eval()


def _drawn(name: str, kind: str) -> tuple[int, int, int, str]:
    """The order in which weights are drawn: that of a head's parts, and of a layer's."""
    projection, outer = ("fc", "input_norm", "fc_norm"), ("token_norm", "feature_norm", "layers", "norm", "lm_head")
    parts = (*projection, "embed_tokens", *outer) if kind == "eagle3" else ("embed_tokens", *projection, *outer)
    first, *rest = name.split(".")
    if first != "layers":
        return parts.index(first), 0, 0, name.replace("weight", "")
    inner = ("input_layernorm", "hidden_norm", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    order = (*inner, "post_attention_layernorm", "gate_proj", "up_proj", "down_proj")
    part = next((order.index(one) for one in rest if one in order), len(order))
    return parts.index(first), int(rest[0]), part, name.replace("weight", "")


def as_module(config: HeadConfig, **changes: Any) -> ModuleConfig:
    """An MTP module with the layer of an EAGLE-1 head that norms its input."""
    shared = ("hidden_size", "vocab_size", "draft_vocab_size", "target_hidden_size", "feature_layers", "max_positions")
    usual = {name: getattr(config, name) for name in shared}
    usual |= {"layer": config.layers[0], "outer_norm": config.norm, "layer_names": LAYER_NAMES, "norm_output": True}
    return ModuleConfig(kind="mtp", **(usual | changes))


# What makes layers of modules differ.
MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": {
        "attention": LatentSpec(4, 8, 16, 16, 0.25, RotarySpec(tuple(0.5**i for i in range(8))), query_latent=12)
    },
    "experts": {"mlp": ExpertsSpec(4, 2, 16, RouterSpec("sigmoid", correction=True, wide=True))},
}


def make_module(**changes: Any) -> EagleHead:
    """A module as `make_head`, its layer with `changes`."""
    config = make_head(kind="eagle", num_features=1, feature_layers=(12,), input_norm=True, head_dim=16).config
    assert isinstance(config, HeadConfig)
    return peaked_head(as_module(config, layer=replace(config.layers[0], **changes)))


def beginning(head: EagleHead) -> EagleHead:
    """The head with random weights to learn from, as PyTorch's modules begin."""
    with torch.no_grad():
        for name, weight in head.weights().items():
            if weight.ndim == 2:
                weight.normal_(0.0, 1.0 if name == "embed_tokens.weight" else (3 * weight.shape[1]) ** -0.5)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return head.requires_grad_(True)


def fuse(head: EagleHead, *, int8: bool = False) -> int:
    """Give a head on a CPU the forms that a GPU's have, in PyTorch. Returns how many layers have one."""
    fused = prepare_layers(head, head.norm, head.lm_head, LayerOptions(compiled=False, int8=int8))
    head.prepare_input(int8=int8)
    return fused


class CausalPass(UncachedPass):
    """Causal attention over the rows of one pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        parts = (part.transpose(0, 1) for part in (query, key, value))
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(0, 1)


@dataclass
class _Row:
    keys: list[Tensor]
    values: list[Tensor]
    feature: Tensor
    logits: Tensor


@dataclass
class PlainHead:
    """The head, one row at a time, with no cache but a list: the definition."""

    head: EagleHead
    rows: list[_Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._weights = {name: tensor.double() for name, tensor in self.head.weights().items()}

    def read(self, tokens: Sequence[int], states: Tensor, first: int = 0) -> None:
        """Pair tokens first + 1 .. with the states [n, F * W] of the tokens first .. ."""
        for i, state in enumerate(states):
            visible = list(range(len(self.rows)))
            self.add(tokens[first + i + 1], self._project(state.double()), first + i, visible)

    def add(self, token: int, feature: Tensor, position: int, visible: Sequence[int]) -> int:
        """One row that sees the rows `visible`; returns its number."""
        config = self.head.config
        assert isinstance(config, HeadConfig)
        if config.window is not None:
            # In the order of their positions.
            visible = visible[max(0, len(visible) - config.window + 1) :]
        embedding = self._weights["embed_tokens.weight"][token]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden = feature
        if config.kind == "eagle":
            joined = torch.cat([embedding, feature])
            hidden = self._linear("fc", joined)
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            residual = hidden
            if layer == 0 and config.kind == "eagle3":
                normed = self._norm(f"{name}.hidden_norm", hidden)
                residual = normed if config.norm_before_residual else hidden
                attended = torch.cat([self._norm(f"{name}.input_layernorm", embedding), normed])
            else:
                attended = hidden if layer == 0 else self._norm(f"{name}.input_layernorm", hidden)
            hidden = residual + self._attend(name, layer, attended, position, visible, keys, values)
            normed = self._norm(f"{name}.post_attention_layernorm", hidden)
            gate, up = self._linear(f"{name}.mlp.gate_proj", normed), self._linear(f"{name}.mlp.up_proj", normed)
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        normed = self._norm("norm", hidden) if config.kind == "eagle3" else hidden
        logits = self._linear("lm_head", normed)
        self.rows.append(_Row(keys, values, normed if config.norm_output else hidden, logits))
        return len(self.rows) - 1

    def distribution(self, row: int, temperature: float = 1.0) -> Tensor:
        """[vocabulary] probabilities of what follows a row, by the target's ids."""
        probs = torch.softmax(self.rows[row].logits / temperature, dim=-1)
        ids = self.head.token_ids
        return probs if ids is None else torch.zeros(VOCABULARY, dtype=torch.float64).index_copy(0, ids, probs)

    def _attend(
        self,
        name: str,
        layer: int,
        rows: Tensor,
        position: int,
        visible: Sequence[int],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        config = self.head.config
        width = config.head_dim
        query = self._linear(f"{name}.self_attn.q_proj", rows).view(-1, width)
        key = self._linear(f"{name}.self_attn.k_proj", rows).view(-1, width)
        value = self._linear(f"{name}.self_attn.v_proj", rows).view(-1, width)
        if config.qk_norm:
            query = self._norm(f"{name}.self_attn.q_norm", query)
            key = self._norm(f"{name}.self_attn.k_norm", key)
        key = self._rotate(key, position)
        query = self._rotate(query, position)
        keys.append(key)
        values.append(value)
        heads = []
        for h in range(config.num_heads):
            shared = h // (config.num_heads // config.num_kv_heads)
            seen = [self.rows[row].keys[layer][shared] for row in visible] + [key[shared]]
            held = [self.rows[row].values[layer][shared] for row in visible] + [value[shared]]
            scores = torch.stack([query[h] @ one for one in seen]) / math.sqrt(width)
            weights = torch.softmax(scores, dim=0)
            heads.append(sum((w * one for w, one in zip(weights, held, strict=True)), torch.zeros_like(value[0])))
        return self._linear(f"{name}.self_attn.o_proj", torch.cat(heads))

    def _rotate(self, vectors: Tensor, position: int) -> Tensor:
        width = vectors.shape[-1]
        out = vectors.clone()
        for i in range(width // 2):
            angle = position * self.head.config.rope["rope_theta"] ** (-2 * i / width)
            first, second = vectors[:, i], vectors[:, i + width // 2]
            out[:, i] = first * math.cos(angle) - second * math.sin(angle)
            out[:, i + width // 2] = second * math.cos(angle) + first * math.sin(angle)
        return out

    def _project(self, state: Tensor) -> Tensor:
        config = self.head.config
        if config.kind == "eagle":
            return state
        if config.norm_before_fc:
            state = self._norm("input_norm", state)
        parts = list(state.split(config.target_hidden_size))
        if config.fc_norm:
            parts = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)]
        return self._linear("fc", torch.cat(parts))

    def _linear(self, name: str, vector: Tensor) -> Tensor:
        out = self._weights[f"{name}.weight"] @ vector
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, name: str, vector: Tensor) -> Tensor:
        mean = (vector**2).mean(-1, keepdim=True)
        return vector / torch.sqrt(mean + self.head.config.rms_norm_eps) * self._weights[f"{name}.weight"]
