"""The layers of a head: Llama's, and the first layer of EAGLE-3, which reads token and feature side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.eagle.head_config import HeadConfig
from draft_service.neural.tail_attention import Attend


class Rotary(nn.Module):
    """Rotary embedding as in transformers' Llama, for every type that a `HeadConfig` allows."""

    def __init__(self, config: HeadConfig) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        settings = LlamaConfig(
            hidden_size=config.rotary_width,
            num_attention_heads=1,
            head_dim=config.rotary_width,
            max_position_embeddings=config.max_positions,
            # Of `head_dim`, which is the rotary part of a head already.
            rope_parameters={**config.rope, "partial_rotary_factor": 1.0},
        )
        embedding: Any = LlamaRotaryEmbedding(settings)
        self.scaling = float(embedding.attention_scaling)
        # As bits, so that a cast of the head to half precision does not round the frequencies.
        inverse = embedding.inv_freq.float().clone()
        self.register_buffer("inverse_bits", inverse.view(torch.int32), persistent=False)
        self.inverse_bits: Tensor

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [.., 1, T] in fp32 of positions [..], where T numbers of a head are rotated."""
        angles = positions[..., None].float() * self.inverse_bits.view(torch.float32)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first T numbers of [.., heads, D] by cosine and sine [.., 1, T], in fp32. Keeps the type."""
    width = cosine.shape[-1]
    wide = vectors[..., :width].float()
    first, second = wide.chunk(2, dim=-1)
    rotated = (wide * cosine + torch.cat([-second, first], dim=-1) * sine).to(vectors.dtype)
    return rotated if width == vectors.shape[-1] else torch.cat([rotated, vectors[..., width:]], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention. `attend` stores keys and values, and attends."""

    def __init__(self, config: HeadConfig, layer: int, input_width: int) -> None:
        super().__init__()
        self._layer, self._head_dim = layer, config.head_dim
        query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_width, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.o_bias)
        norm = config.qk_norm
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if norm else nn.Identity()

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[.., input_width] -> [.., H]."""
        split = (-1, self._head_dim)
        query = rotate(self.q_norm(self.q_proj(rows).unflatten(-1, split)), *rotation)
        key = rotate(self.k_norm(self.k_proj(rows).unflatten(-1, split)), *rotation)
        value = self.v_proj(rows).unflatten(-1, split)
        return cast(Tensor, self.o_proj(attend(self._layer, query, key, value).flatten(-2)))


class Mlp(nn.Module):
    """Llama's gated MLP. [.., H] -> [.., H]."""

    def __init__(self, config: HeadConfig, inner: int = 0) -> None:
        """`inner` width; 0 takes the head's."""
        super().__init__()
        width, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows)))


class Layer(nn.Module):
    """A Llama decoder layer. The first one of an EAGLE-1 head has no input_layernorm, as published."""

    def __init__(
        self, config: HeadConfig, layer: int, attention: nn.Module | None = None, mlp: nn.Module | None = None
    ) -> None:
        """`attention` and `mlp` take the place of Llama's, as DeepSeek's (`draft_service.eagle.deepseek_layers`)."""
        super().__init__()
        normed = layer > 0 or config.input_norm
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()
        self.self_attn = attention or Attention(config, layer, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or Mlp(config)

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[.., H] -> [.., H]."""
        rows = rows + self.self_attn(self.input_layernorm(rows), rotation, attend)
        return rows + cast(Tensor, self.mlp(self.post_attention_layernorm(rows)))


class FusedLayer(nn.Module):
    """The first layer of EAGLE-3: attention reads the normed token embedding beside the normed feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(config, 0, 2 * width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = Mlp(config)

    def forward(self, embeddings: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """embeddings and features [.., H] each -> [.., H]."""
        normed = self.hidden_norm(features)
        residual = normed if self._norm_before_residual else features
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        rows = residual + self.self_attn(joined, rotation, attend)
        return cast(Tensor, rows + self.mlp(self.post_attention_layernorm(rows)))


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' `rope_parameters` from a config.json of any age: rope_theta, rope_scaling, rope_parameters."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return rope
