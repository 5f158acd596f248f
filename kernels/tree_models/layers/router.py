"""Which experts a row goes to, and with what weights; no decision is taken on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.layers.placing import Placement
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, in_place
from tree_models.spec import ExpertsSpec, RouterSpec


class Router(nn.Module):
    """See `RouterSpec`: rows [R, H] -> experts [R, k] int64 and their weights [R, k]."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.spec, self.top_k = spec.router, spec.top_k
        # In fp32 where it is multiplied so.
        dtype = torch.float32 if spec.router.wide else place.dtype
        self.weight = place.empty(spec.count, hidden_size, dtype=dtype)
        # In fp32, since it decides between close scores.
        self.correction = place.empty(spec.count, dtype=torch.float32) if spec.router.correction else None

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[R, H] -> [R, k] int64 and [R, k] in fp32, or in the rows' type where the family rounds."""
        spec = self.spec
        logits = functional.linear(rows.to(self.weight.dtype), self.weight)
        if spec.scores == "sparsemixer":
            return sparsemixer(logits, spec.jitter)
        logits = logits.float()
        scores = logits.sigmoid() if spec.scores == "sigmoid" else logits.softmax(dim=-1)
        wanted = scores if self.correction is None else scores + self.correction
        if spec.groups > 1:
            wanted = wanted.masked_fill(closed_groups(wanted, spec), -math.inf)
        chosen = wanted.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if spec.renormalised:
            total = weights.sum(dim=-1, keepdim=True) + spec.least_sum
            weights = weights / total.clamp(min=spec.clamped_sum)
        weights = weights * spec.scaling
        return chosen, weights.to(rows.dtype) if spec.rounded else weights

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the weight and of the bias."""
        yield in_place(f"{names.in_layer(names.router, layer)}.weight", self.weight, copy)
        if self.correction is not None:
            shape = (1,) * (names.correction_dimensions - 1) + tuple(self.correction.shape)
            yield in_place(names.in_layer(names.correction, layer), self.correction.view(shape), copy)


def closed_groups(scores: Tensor, spec: RouterSpec) -> Tensor:
    """[R, E] bool: experts of the groups that a row does not choose from, by scores [R, E]."""
    grouped = scores.unflatten(-1, (spec.groups, -1))  # type: ignore[no-untyped-call]
    best = grouped.topk(2, dim=-1).values.sum(-1) if spec.group_score == "top2" else grouped.amax(-1)
    chosen = best.topk(spec.top_groups, dim=-1).indices
    closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, value=False)
    return closed.repeat_interleave(grouped.shape[-1], dim=-1)


def sparsemixer(scores: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Phi-MoE's routing in inference (arXiv 2310.00811): the two best of scores [R, E]. Each is weighed by a softmax
    over the scores that are close to it, the second without the first."""
    experts, weights = [], []
    left = scores
    for _ in range(2):
        best, expert = left.max(dim=-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, -math.inf).softmax(dim=-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -math.inf)
    return torch.cat(experts, dim=-1), torch.cat(weights, dim=-1)
