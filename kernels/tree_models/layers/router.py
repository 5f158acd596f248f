"""Which experts a row goes to, and with what weights; no decision is taken on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.experts import Chosen, Routing, RowExperts
from tree_kernels.linear import ScaledRows
from tree_models.layers.norm import Normalization
from tree_models.layers.placing import Placement
from tree_models.names import WeightNames
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place
from tree_models.spec import ExpertsSpec, FamilyRefused, RouterSpec


class TopKRouter(nn.Module):
    """See `RouterSpec`: rows to their experts."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        each, rest = divmod(spec.count, spec.router.groups)
        if rest or spec.top_k > each * spec.router.top_groups:
            chosen = (
                f"{spec.top_k} of {spec.count} experts, from {spec.router.top_groups} of {spec.router.groups} groups"
            )
            raise FamilyRefused(f"a choice of {chosen} is not served")
        self.spec = spec.router
        # None for the one kind that is no choice by scores.
        self.routing = None if spec.router.scores == "sparsemixer" else _routing(spec.router, spec.top_k)
        # In fp32 where it is multiplied so, and where other numbers are multiplied into it.
        dtype = torch.float32 if spec.router.wide or spec.router.norm else place.dtype
        self.weight = place.empty(spec.count, hidden_size, dtype=dtype)
        self.norm = Normalization(spec.router.norm, hidden_size, place) if spec.router.norm else None
        self.expert_scales = place.empty(spec.count) if spec.router.expert_scales else None
        self.bias = place.empty(spec.count, dtype=torch.float32) if spec.router.bias else None
        # In fp32, since it decides between close scores.
        self.correction = place.empty(spec.count, dtype=torch.float32) if spec.router.correction else None

    def choose(self, rows: ScaledRows, experts: RowExperts) -> Chosen:
        """The experts of normed rows [R, H], or with a norm of its own of rows that are not normed."""
        if self.norm is not None:
            rows = ScaledRows(self.norm(rows.rows), None, 0.0)
        if self.routing is not None:
            chosen = experts.route(rows, self.weight, self.correction, self.routing, self.bias)
            if self.expert_scales is None:
                return chosen
            return replace(chosen, weights=chosen.weights * self.expert_scales[chosen.experts])
        normed = (rows.rows * rows.scale).to(rows.rows.dtype)
        return sparsemixer(functional.linear(normed, self.weight).float(), self.spec.jitter)

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the router's tensors."""
        weight = f"{names.in_layer(names.router, layer)}.weight"
        if self.norm is None:
            yield in_place(weight, self.weight, copy)
        else:
            yield self._scaled_slot(weight, names.in_layer(names.router_scale, layer), copy)
        if self.expert_scales is not None:
            yield in_place(names.in_layer(names.expert_scales, layer), self.expert_scales, copy)
        if self.bias is not None:
            yield in_place(names.in_layer(names.router_bias, layer), self.bias, copy)
        if self.correction is not None:
            shape = (1,) * (names.correction_dimensions - 1) + tuple(self.correction.shape)
            yield in_place(names.in_layer(names.correction, layer), self.correction.view(shape), copy)

    def _scaled_slot(self, weight: str, scale: str, copy: Copy) -> WeightSlot:
        """Of the weight and of the numbers that its columns are multiplied by."""
        width = self.weight.shape[1]

        def write(tensors: Sequence[Tensor]) -> None:
            product, numbers = tensors
            copy(self.weight, product.float() * (numbers.float() * width**-0.5))

        specs = {
            weight: TensorSpec(tuple(self.weight.shape), torch.float32),
            scale: TensorSpec((width,), torch.float32),
        }
        return WeightSlot(specs, write)


def sparsemixer(scores: Tensor, jitter: float) -> Chosen:
    """Phi-MoE's routing in inference (arXiv 2310.00811): the two best of scores [R, E] fp32. Each is weighed by a
    softmax over the scores that are close to it, the second without the first."""
    experts, weights = [], []
    left = scores
    for _ in range(2):
        best, expert = left.max(dim=-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, -math.inf).softmax(dim=-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -math.inf)
    return Chosen(torch.cat(experts, dim=-1).to(torch.int32), torch.cat(weights, dim=-1))


def _routing(spec: RouterSpec, top_k: int) -> Routing:
    return Routing(
        top_k=top_k,
        scores="sigmoid" if spec.scores == "sigmoid" else "softmax",
        renormalised=spec.renormalised,
        least_sum=spec.least_sum,
        clamped_sum=spec.clamped_sum,
        groups=spec.groups,
        top_groups=spec.top_groups,
        group_score=spec.group_score,
        scaling=spec.scaling,
        rounded=spec.rounded,
    )
