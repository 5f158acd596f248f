"""A mixture of experts: a router, experts of one width, and perhaps one for every row or an MLP beside it.

Which experts a row goes to, and with what weights, is not decided on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.compiled_layers import uncompiled
from tree_kernels.experts import Chosen, ExpertWeights, Routing, RowExperts, row_experts
from tree_kernels.linear import ScaledRows
from tree_models.layers.linear import Linear
from tree_models.layers.mlp import MLP, activation_of, gate_form_of
from tree_models.layers.norm import Normalization
from tree_models.layers.placing import Placement
from tree_models.names import WeightNames
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place, rearranged, stacked
from tree_models.spec import DenseAndExpertsSpec, ExpertsSpec, FamilyRefused, RouterMLPSpec, RouterSpec


class TopKRouter(nn.Module):
    """See `RouterSpec`: rows to their experts."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        each, rest = divmod(spec.count + spec.idle, spec.router.groups)
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
        count = spec.count + spec.idle
        self.weight = place.empty(count, hidden_size, dtype=dtype)
        self.norm = Normalization(spec.router.norm, hidden_size, place) if spec.router.norm else None
        self.expert_scales = place.empty(count) if spec.router.expert_scales else None
        self.bias = place.empty(count, dtype=torch.float32) if spec.router.bias else None
        # In fp32, since it decides between close scores.
        self.correction = place.empty(count, dtype=torch.float32) if spec.router.correction else None

    def choose(self, rows: ScaledRows, experts: RowExperts, present: Tensor | None = None) -> Chosen:
        """The experts of normed rows [R, H], or with a norm of its own of rows that are not normed; `present` as in
        `RowExperts.route`."""
        if self.norm is not None:
            rows = ScaledRows(self.norm(rows.rows), None, 0.0)
        if self.routing is not None:
            chosen = experts.route(rows, self.weight, self.correction, self.routing, self.bias, present)
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


class RouterMLP(nn.Module):
    """See `RouterMLPSpec`."""

    def __init__(self, spec: RouterMLPSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        if spec.width > hidden_size:
            raise FamilyRefused(f"a router of {spec.width} numbers beside {hidden_size} of hidden rows is not served")
        self.spec, self._hidden_size = spec, hidden_size
        self.product = Linear(hidden_size, [spec.width], place, bias=True)
        self.scale = place.empty(spec.width) if spec.reads else None
        self.norm = Normalization(spec.norm, spec.width, place)
        self.first, self.second = (Linear(spec.width, [spec.width], place, bias=True) for _ in range(2))

    def forward(self, rows: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the next layer is to give as `before`, zeros behind it, [R, H]; and what the router reads, [R, W], of
        normed rows [R, H]."""
        states: Tensor = self.product(rows)
        if before is not None and self.scale is not None:
            states = states + before[:, : self.spec.width] * self.scale
        inner = functional.gelu(self.first(self.norm(states)))
        kept = functional.pad(states, (0, self._hidden_size - self.spec.width))
        return kept, functional.gelu(self.second(inner))

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the MLP's tensors."""
        product, norm, first, second = (names.in_layer(name, layer) for name in names.router_mlp)
        for name, own in ((product, self.product), (first, self.first), (second, self.second)):
            yield from own.slots([name], copy)
        yield from self.norm.slots(norm, copy)
        if self.scale is not None:
            yield in_place(names.in_layer(names.router_states, layer), self.scale, copy)


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


class MixtureOfExperts(nn.Module):
    """See `ExpertsSpec`: [R, H] -> [R, H]."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, layer: int, place: Placement) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        # Rows that come back are added once.
        self._returns = bool(spec.idle) and spec.idle_returns and (place.ranks is None or place.ranks.rank == 0)
        self.router = TopKRouter(spec, spec.router.mlp.width if spec.router.mlp else hidden_size, place)
        inner, made = spec.latent or hidden_size, 2 * spec.width if spec.gated else spec.width
        self.gate_up = place.empty(spec.count, made, inner)
        self.down = place.empty(spec.count, inner, spec.width)
        self.gate_up_bias = place.empty(spec.count, made) if spec.bias else None
        self.down_bias = place.empty(spec.count, inner) if spec.bias else None
        self.latent_in = Linear(hidden_size, [inner], place) if spec.latent else None
        self.latent_out = Linear(inner, [hidden_size], place) if spec.latent else None
        self.op = row_experts(place.device)
        self.shared = MLP(spec.shared, hidden_size, place) if spec.shared else None
        self.shared_gate = Linear(hidden_size, [1], place) if spec.shared_gate else None

    def forward(self, rows: Tensor, routed: Tensor | None = None) -> Tensor:
        """[R, H] -> [R, H]; `routed` as in `_mixed`."""
        output: Tensor
        if self.latent_in is not None and self.latent_out is not None:
            output = self.latent_out(self._mixed(self.latent_in(rows), rows))
        else:
            output = self._mixed(rows, routed)
        if self.shared is not None:
            shared: Tensor = self.shared(rows)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(rows)) * shared
            output = output + shared
        return output

    @property
    def weights(self) -> ExpertWeights:
        """As the launches take them."""
        forms = activation_of(self.spec.activation), gate_form_of(self.spec.gate)
        return ExpertWeights(self.gate_up, self.down, *forms, self.gate_up_bias, self.down_bias)

    # Not compiled: these are launches of their own, or loops on a CPU.
    @uncompiled
    def _mixed(self, rows: Tensor, routed: Tensor | None = None) -> Tensor:
        """[R, H]: what the chosen experts make of normed rows. `routed` [R, H] is what they are chosen by, where that
        is something else."""
        scaled = ScaledRows(rows, None, 0.0)
        chosen = self.router.choose(scaled if routed is None else ScaledRows(routed, None, 0.0), self.op)
        if self.spec.weighs_inputs:
            scaled = ScaledRows((rows * chosen.weights).to(rows.dtype), None, 0.0)
            chosen = replace(chosen, weights=torch.ones_like(chosen.weights))
        output: Tensor
        if not self.spec.idle:
            output = self.op.mix(scaled, chosen, self.weights)[0]
            return output
        idle = chosen.experts >= self.spec.count
        kept = Chosen(chosen.experts.masked_fill(idle, 0), chosen.weights.masked_fill(idle, 0.0))
        output = self.op.mix(scaled, kept, self.weights)[0]
        return output + rows * (chosen.weights - kept.weights).sum(-1, True).to(rows.dtype) if self._returns else output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        yield from self.router.slots(names, self.layer, copy)
        if names.experts_lie in ("by_columns", "by_neighbours"):
            yield from self._transposed_slots(names, copy)
        elif names.experts_lie == "flat":
            yield from self._flat_slots(names, copy)
        else:
            yield from self._expert_slots(names.expert_gate_up, self.gate_up, names, copy)
            yield from self._expert_slots([names.expert_down], self.down, names, copy)
        for name, product in ((names.latent_in, self.latent_in), (names.latent_out, self.latent_out)):
            if product is not None:
                yield from product.slots([names.in_layer(name, self.layer)], copy)
        if self.shared is not None:
            gate_up = [names.in_layer(name, self.layer) for name in names.shared_gate_up]
            down = names.in_layer(names.shared_down, self.layer)
            yield from self.shared.slots(gate_up, down, "", copy)
        if self.shared_gate is not None:
            yield from self.shared_gate.slots([names.in_layer(names.shared_gate, self.layer)], copy)

    def _expert_slots(
        self, published: Sequence[str], memory: Tensor, names: WeightNames, copy: Copy
    ) -> Iterator[WeightSlot]:
        if "{expert}" not in published[0]:
            whole = [f"{names.in_layer(name, self.layer)}{names.expert_suffix}" for name in published]
            for name, part in zip(whole, memory.chunk(len(whole), dim=1), strict=True):
                yield in_place(name, part, copy)
            return
        for expert in range(self.spec.count):
            of = [f"{names.in_layer(name, self.layer, expert)}.weight" for name in published]
            yield from stacked(of, memory[expert], copy)

    def _transposed_slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Of all experts' tensors with inputs before outputs, and of their biases."""
        experts, width, hidden = self.spec.count, self.spec.width, self.down.shape[1]
        gate_up, down = (
            f"{names.in_layer(name, self.layer)}{names.expert_suffix}"
            for name in (names.expert_gate_up[0], names.expert_down)
        )
        arrange = _apart if names.experts_lie == "by_neighbours" else Tensor.contiguous
        yield rearranged(
            gate_up, (experts, hidden, 2 * width), self.gate_up, lambda both: arrange(both.transpose(1, 2)), copy
        )
        yield rearranged(down, (experts, width, hidden), self.down, lambda one: one.transpose(1, 2), copy)
        if self.gate_up_bias is not None and self.down_bias is not None:
            bias = names.in_layer(names.expert_gate_up_bias, self.layer)
            yield rearranged(bias, (experts, 2 * width), self.gate_up_bias, _apart, copy)
            yield in_place(names.in_layer(names.expert_down_bias, self.layer), self.down_bias, copy)

    def _flat_slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Of matrices [E * I, H] of all experts, of which down has inputs before outputs."""
        experts, width, hidden = self.spec.count, self.spec.width, self.down.shape[1]
        gate, up = self.gate_up[:, :width], self.gate_up[:, width:]
        whole = (
            f"{names.in_layer(name, self.layer)}{names.expert_suffix}"
            for name in (*names.expert_gate_up, names.expert_down)
        )
        for name, memory in zip(whole, (gate, up, self.down.transpose(1, 2)), strict=True):
            yield rearranged(
                name, (experts * width, hidden), memory, lambda flat: flat.reshape(-1, width, hidden), copy
            )


class DenseAndExperts(nn.Module):
    """See `DenseAndExpertsSpec`: rows [R, H] that are not normed -> [R, H]."""

    def __init__(self, spec: DenseAndExpertsSpec, hidden_size: int, layer: int, place: Placement) -> None:
        super().__init__()
        self.spec, self._layer, self._ranks = spec, layer, place.ranks
        self.dense = MLP(spec.dense, hidden_size, place)
        self.experts = MixtureOfExperts(spec.experts, hidden_size, layer, place)
        norms = (Normalization(spec.norm, hidden_size, place) for _ in range(4))
        self.before_dense, self.after_dense, self.before_experts, self.after_experts = norms

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, H], of ranks the whole and no part."""
        dense: Tensor = self.dense(self.before_dense(hidden))
        mixed: Tensor = self.experts(self.before_experts(hidden), hidden)
        if self._ranks is not None:
            dense, mixed = self._ranks.summed(torch.cat([dense, mixed])).chunk(2)
        output: Tensor = self.after_dense(dense) + self.after_experts(mixed)
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        norms = (
            (names.before_mlp, self.before_dense),
            (names.after_dense, self.after_dense),
            (names.before_experts, self.before_experts),
            (names.after_experts, self.after_experts),
        )
        for name, norm in norms:
            yield from norm.slots(names.in_layer(name, self._layer), copy)
        yield from self.dense.slots(
            [names.in_layer(name, self._layer) for name in names.gate_up],
            names.in_layer(names.down, self._layer),
            names.in_layer(names.activation, self._layer),
            copy,
        )
        yield from self.experts.slots(names, copy)


def _apart(both: Tensor) -> Tensor:
    """[E, 2 * I, ..] with all of gate above all of up, of the same with neighbours."""
    pairs: Tensor = both.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    return pairs.transpose(1, 2).flatten(1, 2)
