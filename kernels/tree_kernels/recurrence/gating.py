"""What gated delta nets compute of single rows around their states: tokens' gates, and the gated norm of heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
