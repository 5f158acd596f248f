"""The parts of DeepSeek-V3's decoder layer (arXiv 2412.19437, section 2.1): latent attention, a mixture of experts.

Symbols: N heads, D the width of a query or key, E experts, k of them chosen for a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.eagle.head_config import ExpertShape, HeadConfig, LatentShape
from draft_service.eagle.layers import Mlp, rotate
from draft_service.neural.tail_attention import Attend
from outrider.heads import HeadRefused

# Epsilon of the norms of latents, independent of the model's own: transformers' DeepseekV3Attention.
_LATENT_EPS = 1e-6
# Added to the sum of weights that normalises them: transformers' DeepseekV3TopkRouter.
_LEAST_SUM = 1e-20


class ExpandedLatentAttention(nn.Module):
    """Multi-head latent attention, expanded: the cache holds keys and values of all heads, values padded with zeros to
    the width of keys."""

    def __init__(self, config: HeadConfig, shape: LatentShape) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self._shape, self._head_dim, self._heads = shape, config.head_dim, heads
        self._softness = _yarn_softness(config)
        if shape.query_rank:
            self.q_a_proj = nn.Linear(width, shape.query_rank, bias=config.qkv_bias)
            self.q_a_layernorm = nn.RMSNorm(shape.query_rank, _LATENT_EPS)
            self.q_b_proj = nn.Linear(shape.query_rank, heads * config.head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, shape.key_rank + shape.rotary, bias=config.qkv_bias)
        self.kv_a_layernorm = nn.RMSNorm(shape.key_rank, _LATENT_EPS)
        self.kv_b_proj = nn.Linear(shape.key_rank, heads * (shape.plain + shape.value), bias=False)
        self.o_proj = nn.Linear(heads * shape.value, width, bias=config.o_bias)

    def forward(self, rows: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[.., H] -> [.., H]."""
        shape = self._shape
        if shape.query_rank:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(rows)))
        else:
            query = self.q_proj(rows)
        query = query.unflatten(-1, (self._heads, self._head_dim))
        query = torch.cat([query[..., : shape.plain], self._rotated(query[..., shape.plain :], rotation)], dim=-1)
        both: Tensor = self.kv_a_proj_with_mqa(rows)
        latent, turned_key = both[..., : shape.key_rank], both[..., shape.key_rank :]
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self._heads, -1))
        plain_key, value = expanded.split([shape.plain, shape.value], dim=-1)
        # [.., 1, rotary], the same for every head.
        turned_key = self._rotated(turned_key.unsqueeze(-2), rotation)
        key = torch.cat([plain_key, turned_key.expand(*plain_key.shape[:-1], shape.rotary)], dim=-1)
        padded = functional.pad(value, (0, self._head_dim - shape.value))
        attended = attend(0, query * self._softness, key, padded)[..., : shape.value]
        return cast(Tensor, self.o_proj(attended.flatten(-2)))

    def _rotated(self, vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [.., heads, rotary], with interleaved pairs separated into halves first."""
        if self._shape.interleaved:
            vectors = torch.cat([vectors[..., 0::2], vectors[..., 1::2]], dim=-1)
        return rotate(vectors, *rotation)


class Router(nn.Module):
    """Routes rows to experts by sigmoid scores; a bias that balances load affects the choice, not the weights."""

    def __init__(self, config: HeadConfig, shape: ExpertShape) -> None:
        super().__init__()
        self._shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))
        self.e_score_correction_bias: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # No cast makes the bias less exact, since it decides between close scores.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.e_score_correction_bias = bias.to(self.weight.device)
        return self

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[R, H] -> weights [R, k] in fp32 and experts [R, k] int64."""
        shape = self._shape
        scores = functional.linear(rows.float(), self.weight.float()).sigmoid()
        wanted = (scores + self.e_score_correction_bias).view(len(rows), shape.groups, -1)
        # A group's score is that of its two best experts.
        best = wanted.topk(2, dim=-1).values.sum(dim=-1).topk(shape.chosen_groups, dim=-1).indices
        closed = torch.ones_like(wanted[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
        experts = wanted.masked_fill(closed[..., None], -math.inf).flatten(-2).topk(shape.chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        if shape.normed:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return weights * shape.scale, experts


class Experts(nn.Module):
    """A mixture of experts, with shared experts for every row: [.., H] -> [.., H]. The host reads from the device which
    experts run, so this cannot be captured in a CUDA graph."""

    def __init__(self, config: HeadConfig, shape: ExpertShape) -> None:
        super().__init__()
        self.gate = Router(config, shape)
        self.experts = nn.ModuleList(Mlp(config, shape.width) for _ in range(shape.experts))
        self.shared_experts = Mlp(config, shape.width * shape.shared) if shape.shared else None

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.flatten(0, -2)
        weights, chosen = self.gate(flat)
        mixed = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            places, ranks = torch.where(chosen == number)
            weighted = self.experts[number](flat[places]) * weights[places, ranks, None]
            mixed.index_add_(0, places, weighted.to(mixed.dtype))
        if self.shared_experts is not None:
            mixed = mixed + self.shared_experts(flat)
        return mixed.view_as(rows)


def _yarn_softness(config: HeadConfig) -> float:
    """Factor of attention's scale under YaRN with `mscale_all_dim`: transformers' `yarn_apply_mscale`."""
    rope = config.rope
    every = float(rope.get("mscale_all_dim") or 0.0)
    if rope.get("rope_type", "default") == "default" or not every:
        return 1.0
    factor = float(rope.get("factor") or 0.0)
    if not factor:
        raise HeadRefused("config.json scales rotary positions, but names no factor")
    return 1.0 if factor <= 1 else (0.1 * every * math.log(factor) + 1.0) ** 2
