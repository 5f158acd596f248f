"""Launches of experts for very few rows: two, of which the second also sums and norms."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tree_kernels.experts.triton_tiling import ExpertVectorTilings
from tree_kernels.experts.triton_vectors import expert_down_vector_kernel, expert_gated_vector_kernel
from tree_kernels.experts.types import Chosen, ExpertWeights
from tree_kernels.linear import Norm, ScaledRows
from tree_kernels.linear.triton_backend import or_other, parts_of_rows


def gate_options(weights: ExpertWeights) -> dict[str, Any]:
    """Constants of the kernels that multiply with gate and up."""
    return {
        "ACTIVATION": str(weights.activation.kind),
        "LIMIT": weights.gate_form.limit,
        "LIMITS_ACTIVATED": weights.gate_form.limits_activated,
        "OFFSET": weights.gate_form.offset,
        "GATED": weights.gated,
        "HAS_BIAS": weights.gate_up_bias is not None,
    }


def mix_vectors(
    rows: ScaledRows,
    chosen: Chosen,
    weights: ExpertWeights,
    residual: Tensor | None,
    norm: Norm | None,
    multiplier: float,
    tilings: ExpertVectorTilings,
    dependent: dict[str, bool],
) -> tuple[Tensor, ScaledRows | None]:
    """As `RowExperts.mix`, for a norm that halves or none; `dependent` is `dependent_launch` of the device."""
    (count, top_k), device = chosen.experts.shape, weights.down.device
    _, hidden, inner = weights.down.shape
    gated = rows.rows.new_empty(count * top_k, inner)
    tiling = tilings.gated
    expert_gated_vector_kernel[(triton.cdiv(inner, tiling.block_outputs), count * top_k)](
        rows.rows, or_other(rows.squares, gated), chosen.experts, weights.gate_up,
        or_other(weights.gate_up_bias, gated), or_other(weights.activation.parameters, gated), gated,
        rows.rows.stride(0), rows.epsilon, TOP_K=top_k, OUTPUTS=inner, INNER=hidden, **gate_options(weights),
        BLOCK_N=tiling.block_outputs, CHUNKS=tiling.chunks, BLOCK_T=tiling.block_inner, num_warps=tiling.warps,
        **parts_of_rows(rows), **dependent,
    )  # fmt: skip
    output = rows.rows.new_empty(count, hidden)
    tiling = tilings.down
    tiles = triton.cdiv(hidden, tiling.block_outputs)
    scaled = None
    if norm is not None:
        squares = torch.empty(count, tiles, dtype=torch.float32, device=device)
        scaled = ScaledRows(torch.empty_like(output), squares, norm.epsilon)
    expert_down_vector_kernel[(tiles, count)](
        gated, chosen.experts, chosen.weights, weights.down, or_other(weights.down_bias, gated),
        or_other(residual, output),
        output if norm is None else norm.weight, output, output if scaled is None else scaled.rows,
        output if scaled is None else scaled.squares, HAS_BIAS=weights.down_bias is not None,
        TOP_K=top_k, BLOCK_E=triton.next_power_of_2(top_k),
        MULTIPLIER=multiplier, ADDS=residual is not None, SCALES=norm is not None, OUTPUTS=hidden, INNER=inner,
        BLOCK_N=tiling.block_outputs, BLOCK_T=tiling.block_inner, num_warps=tiling.warps, **dependent,
    )  # fmt: skip
    return output, scaled
