"""A mixture of experts by PyTorch's products: rows are sorted by expert, and each that is chosen is read once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tree_kernels.experts.layers import RowExperts, check_mix, of_gate_and_up, summed
from tree_kernels.experts.types import Chosen, ExpertWeights
from tree_kernels.linear import Norm, ScaledRows


class GroupedExperts(RowExperts):
    """See `RowExperts`. Products are rounded to the rows' type, as `nn.Linear` does; the sum is in fp32."""

    def mix(
        self,
        rows: ScaledRows,
        chosen: Chosen,
        weights: ExpertWeights,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> tuple[Tensor, ScaledRows | None]:
        check_mix(rows, chosen, weights)
        count, top_k = chosen.experts.shape
        normed = rows.rows if rows.squares is None else (rows.rows.float() * rows.scale).to(rows.rows.dtype)
        experts, order = chosen.experts.flatten().sort(stable=True)
        gathered = normed[order // top_k]
        outputs = gathered.new_empty(count * top_k, normed.shape[1])
        found, sizes = torch.unique_consecutive(experts, return_counts=True)
        begin = 0
        for expert, size in zip(found.tolist(), sizes.tolist(), strict=True):
            biases = [None if of is None else of[expert] for of in (weights.gate_up_bias, weights.down_bias)]
            both = functional.linear(gathered[begin : begin + size], weights.gate_up[expert], biases[0])
            inner = of_gate_and_up(both, weights).to(gathered.dtype)
            outputs[order[begin : begin + size]] = functional.linear(inner, weights.down[expert], biases[1])
            begin += size
        total = torch.einsum("rkh,rk->rh", outputs.view(count, top_k, normed.shape[1]).float(), chosen.weights)
        return summed(total, rows.rows.dtype, residual, norm, multiplier)
