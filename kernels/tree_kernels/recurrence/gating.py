"""What gated delta nets and Mamba2 compute of single rows around their states: tokens' gates, and gated outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class SpaceOutput:
    """What Mamba2 makes of the states' outputs of H heads, Dv wide."""

    skip: Tensor  # [H] fp32, the share of its own value that a token adds
    norm: Tensor | None  # [H * Dv] weights of the norm of gated outputs; None without one
    epsilon: float
    groups: int  # of heads, each normed by itself


def delta_gates(product: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
    """Gates [R, 2 * H] fp32, see `StateShape.gates`, of a product [R, 2 * H]: first what betas are made of, then what
    decays are. `decay` and `bias` are [H] fp32."""
    betas, decays = product.float().chunk(2, dim=-1)
    return torch.cat([decay * functional.softplus(decays + bias), torch.sigmoid(betas)], dim=-1)


def gated_heads(mixed: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[R, H * Dv]: the norm of each head [Dv] of `mixed` [R, H, Dv], times SiLU of the gate [R, H * Dv]."""
    normed = functional.rms_norm(mixed.float(), mixed.shape[-1:], None, epsilon)
    normed = weight * normed.to(mixed.dtype)
    gated = normed * functional.silu(gate.float()).view_as(normed)
    return gated.to(mixed.dtype).flatten(1)


def space_gates(product: Tensor, decay: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Gates [R, 2 * H] fp32 of a product [R, H] that steps are made of: decay times step, and the step, which is within
    `limits`. `decay` and `bias` are [H] fp32."""
    steps = functional.softplus(product.float() + bias).clamp(*limits)
    return torch.cat([decay * steps, steps], dim=-1)


def space_output(mixed: Tensor, values: Tensor, gate: Tensor, of: SpaceOutput) -> Tensor:
    """[R, H * Dv]: `mixed` [R, H, Dv] with the tokens' own `values` [R, H * Dv], times SiLU of the `gate` [R, H * Dv],
    and normed."""
    skipped = mixed.float() + of.skip[:, None] * values.float().view_as(mixed)
    gated = skipped.to(mixed.dtype).flatten(1).float() * functional.silu(gate.float())
    if of.norm is None:
        return gated.to(mixed.dtype)
    grouped = gated.view(len(mixed), of.groups, -1)
    normed = functional.rms_norm(grouped, grouped.shape[-1:], None, of.epsilon).flatten(1)
    return of.norm * normed.to(mixed.dtype)
