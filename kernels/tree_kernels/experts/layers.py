"""A mixture of experts in PyTorch: the definition of what the backends compute.

    chosen = experts.route(rows, router_weight, correction, routing)
    hidden, scaled = experts.mix(rows, chosen, weights, residual, next_norm)

Rows come as `ScaledRows`, as between the linear layers, and so does the norm behind the sum.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tree_kernels.experts.types import Chosen, ExpertWeights, Routing
from tree_kernels.linear import Norm, RowLinears, ScaledRows
from tree_kernels.linear.layers import activated, gated


class RowExperts:
    """See the module; in fp32, rounded at the end. No row's result depends on the others."""

    def route(
        self,
        rows: ScaledRows,
        weight: Tensor,
        correction: Tensor | None,
        routing: Routing,
        bias: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Chosen:
        """The experts of normed rows [R, H], and their weights.

        Of equal scores the lowest expert's wins. Raises `ValueError` for shapes that do not fit.

        Args:
            rows: [R, H].
            weight: [E, H] of the router, in the rows' type or in fp32, which it is then multiplied in.
            correction: [E] fp32, added to the scores for the choice and not for the weights.
            routing: how they are chosen and weighed.
            bias: [E] fp32 of the router's product.
            present: [1] int32, how many rows there are. Those behind them hold anything, and go where the first row
                goes, so that none has an expert's weights read for itself alone. None: all are there.
        """
        check_router(rows, weight, correction, routing, bias)
        return choose(router_logits(with_first(rows, present), weight, bias), correction, routing, rows.rows.dtype)

    def mix(
        self,
        rows: ScaledRows,
        chosen: Chosen,
        weights: ExpertWeights,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> tuple[Tensor, ScaledRows | None]:
        """[R, H] in the rows' type: a multiple of what the chosen experts make of normed rows [R, H], weighed and
        summed from the best expert to the last, with `residual` [R, H]; and its `ScaledRows` where a norm was given.

        Raises `ValueError` for shapes, types or strides that do not fit.
        """
        check_mix(rows, chosen, weights)
        normed, experts = rows.rows.float() * rows.scale, chosen.experts.long()
        both = torch.einsum("rh,rkih->rki", normed, weights.gate_up[experts].float())
        if weights.gate_up_bias is not None:
            both = both + weights.gate_up_bias[experts].float()
        inner = of_gate_and_up(both, weights)
        outputs = torch.einsum("rki,rkhi->rkh", inner, weights.down[experts].float())
        if weights.down_bias is not None:
            outputs = outputs + weights.down_bias[experts].float()
        return summed((outputs * chosen.weights[..., None]).sum(1), rows.rows.dtype, residual, norm, multiplier)


def of_gate_and_up(both: Tensor, weights: ExpertWeights) -> Tensor:
    """What down reads, of gate and up [.., 2 * I] in the rows' type, or of up alone [.., I]; fp32."""
    activate = partial(activated, activation=weights.activation)
    if not weights.gated:
        return activate(both.float())
    gate, up = both.chunk(2, dim=-1)
    return gated(gate.float(), up, activate, weights.gate_form)


def with_first(rows: ScaledRows, present: Tensor | None) -> ScaledRows:
    """The rows, with the first one in place of those behind the `present` [1] int32 ones; None: all are there."""
    if present is None:
        return rows
    index = torch.arange(len(rows.rows), device=rows.rows.device)
    index = torch.where(index < present, index, 0)
    squares = None if rows.squares is None else rows.squares[index]
    return ScaledRows(rows.rows[index], squares, rows.epsilon)


def router_logits(rows: ScaledRows, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[R, E] fp32."""
    logits = torch.nn.functional.linear(rows.rows.float(), weight.float()) * rows.scale
    return logits if bias is None else logits + bias


def choose(logits: Tensor, correction: Tensor | None, routing: Routing, dtype: torch.dtype) -> Chosen:
    """The choice by logits [R, E] fp32; weights are rounded to `dtype` where the routing asks for it."""
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction.float()
    if routing.groups > 1:
        wanted = wanted.masked_fill(_closed_groups(wanted, routing), -math.inf)
    # Stable: of equal scores the lowest expert's comes first.
    experts = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, experts)
    if routing.renormalised:
        total = weights.sum(dim=-1, keepdim=True) + routing.least_sum
        weights = weights / total.clamp(min=routing.clamped_sum)
    weights = weights * routing.scaling
    if routing.rounded:
        weights = weights.to(dtype).float()
    return Chosen(experts.to(torch.int32).contiguous(), weights.contiguous())


def summed(
    total: Tensor, dtype: torch.dtype, residual: Tensor | None, norm: Norm | None, multiplier: float
) -> tuple[Tensor, ScaledRows | None]:
    """What `RowExperts.mix` returns, of the experts' sum [R, H] fp32."""
    total = total * multiplier
    if residual is not None:
        total = total + residual
    output = total.to(dtype)
    return output, None if norm is None else RowLinears().scale_rows(output, norm)


def check_router(
    rows: ScaledRows, weight: Tensor, correction: Tensor | None, routing: Routing, bias: Tensor | None
) -> None:
    """Raise `ValueError` unless `route` takes these."""
    experts, width = weight.shape
    if rows.rows.shape[1] != width:
        raise ValueError(f"expected rows [R, {width}], got {list(rows.rows.shape)}")
    if weight.dtype not in (rows.rows.dtype, torch.float32):
        raise ValueError("expected a router's weight of the rows' dtype, or in fp32")
    for name, numbers in (("correction", correction), ("bias", bias)):
        if numbers is not None and numbers.shape != (experts,):
            raise ValueError(f"expected {name} [{experts}], got {list(numbers.shape)}")
    if experts % routing.groups or routing.top_k > experts // routing.groups * routing.top_groups:
        raise ValueError(f"expected groups to divide {experts} experts and to hold {routing.top_k}, got {routing}")


def check_mix(rows: ScaledRows, chosen: Chosen, weights: ExpertWeights) -> None:
    """Raise `ValueError` unless `mix` takes these."""
    weights.check()
    if rows.rows.shape[1] != weights.down.shape[1]:
        raise ValueError(f"expected rows [R, {weights.down.shape[1]}], got {list(rows.rows.shape)}")
    if rows.rows.dtype != weights.down.dtype:
        raise ValueError("expected rows and weights of one dtype")
    if len(chosen.experts) != len(rows.rows) or chosen.experts.shape != chosen.weights.shape:
        raise ValueError(f"expected experts and weights [{len(rows.rows)}, k], got {list(chosen.experts.shape)}")


def _closed_groups(wanted: Tensor, routing: Routing) -> Tensor:
    """[R, E] bool: experts of groups that a row does not choose from."""
    grouped = wanted.unflatten(-1, (routing.groups, -1))  # type: ignore[no-untyped-call]
    best = grouped.topk(2, dim=-1).values.sum(-1) if routing.group_score == "top2" else grouped.amax(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, value=False)
    return closed.repeat_interleave(grouped.shape[-1], dim=-1)
