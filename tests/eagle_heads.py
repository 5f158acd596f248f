"""Tiny EAGLE heads with random weights, and the plain, loop-written head that the real one is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig

VOCABULARY, DRAFT, HIDDEN = 60, 40, 16

# What makes heads differ in what they compute.
KINDS: dict[str, dict[str, Any]] = {
    "eagle-3": {},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True},
    "two layers": {"num_layers": 2, "qkv_bias": True},
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
    config = HeadConfig(**(settings | changes))
    torch.manual_seed(3)
    ids = None if config.draft_vocab_size == config.vocab_size else torch.arange(DRAFT) + torch.arange(DRAFT) // 3
    head = EagleHead(config, ids)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.8 if name == "lm_head.weight" else 0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return head.eval().requires_grad_(False)


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
        self._weights = {name: tensor.double() for name, tensor in self.head.state_dict().items()}

    def read(self, tokens: Sequence[int], states: Tensor, first: int = 0) -> None:
        """Pair tokens first + 1 .. with the states [n, F * W] of the tokens first .. ."""
        for i, state in enumerate(states):
            visible = list(range(len(self.rows)))
            self.add(tokens[first + i + 1], self._project(state.double()), first + i, visible)

    def add(self, token: int, feature: Tensor, position: int, visible: Sequence[int]) -> int:
        """One row that sees the rows `visible`; returns its number."""
        config = self.head.config
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
            state = self._norm("projection.input_norm", state)
        parts = list(state.split(config.target_hidden_size))
        if config.fc_norm:
            parts = [self._norm(f"projection.fc_norm.{i}", part) for i, part in enumerate(parts)]
        return self._linear("projection.fc", torch.cat(parts))

    def _linear(self, name: str, vector: Tensor) -> Tensor:
        out = self._weights[f"{name}.weight"] @ vector
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, name: str, vector: Tensor) -> Tensor:
        mean = (vector**2).mean(-1, keepdim=True)
        return vector / torch.sqrt(mean + self.head.config.rms_norm_eps) * self._weights[f"{name}.weight"]
