"""Decoder layers of few launches: four products, each with what lies before and behind it, and attention.

A product's launch norms, rotates, writes to the cache, adds the residual or multiplies gate and up; see
`tree_kernels.linear`. `preparing` decides which layers are computed so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tree_kernels.attention import AttentionVariant
from tree_kernels.experts import ExpertWeights, RowExperts
from tree_kernels.linear import (
    Activation,
    ActivationKind,
    HeadForm,
    HeadRows,
    Int8Weight,
    Norm,
    RowLinears,
    ScaledRows,
    SumForm,
    Weight,
)
from tree_models.layers.attention import HeadAttention
from tree_models.layers.decoder import DecoderLayer
from tree_models.layers.experts import DenseAndExperts, MixtureOfExperts
from tree_models.layers.linear import PlainWeight
from tree_models.layers.mlp import MLP
from tree_models.layers.norm import HeadNorm, Normalization
from tree_models.layers.paged import PagedPass, pass_of
from tree_models.layers.rank_group import RankGroup
from tree_models.layers.rotary import Angles, scaled_queries
from tree_models.layers.router import TopKRouter
from tree_models.spec import AttentionSpec, GateSpec

# Of the table for layers that embed no positions: those of the largest captured pass by default.
_UNTURNED_ROWS = 512


@dataclass(frozen=True, slots=True)
class LinearsByRows:
    """What computes the linear layers of a pass."""

    # (maximum of rows, what computes up to so many), rising. Passes of more rows run the plain form.
    ranges: tuple[tuple[float, RowLinears], ...]

    def of(self, rows: int) -> RowLinears | None:
        """What computes a pass of `rows`; None where the plain form does, as for a pass without rows."""
        return next((linears for most, linears in self.ranges if 0 < rows <= most), None)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A copy of a weight in int8, and the bias."""

    weight: Weight
    bias: Tensor | None

    @classmethod
    def of(cls, product: PlainWeight) -> QuantizedWeight:
        """The weight itself where it has an odd number of columns, which int8 weights cannot have."""
        weight = product.weight.detach()
        return cls(weight if weight.shape[1] % 2 else Int8Weight.of(weight), product.bias)


@dataclass(frozen=True, slots=True)
class MLPParts:
    """Weights of an MLP, and what it computes between them."""

    gate_up: PlainWeight | QuantizedWeight
    activation: Activation
    gated: bool
    down: PlainWeight | QuantizedWeight


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """A mixture of experts, and the MLP that every row takes beside it."""

    weights: ExpertWeights
    router: TopKRouter
    shared: MLPParts | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Weights of one decoder layer, and what it computes between its products."""

    cache_layer: int
    head_width: int
    scaling: float
    variant: AttentionVariant
    before_attention: Norm | None
    qkv: PlainWeight | QuantizedWeight
    heads: HeadForm
    out: PlainWeight | QuantizedWeight
    attention_sum: SumForm
    before_mlp: Norm | None
    parallel: bool
    mlp: MLPParts | ExpertParts
    mlp_sum: SumForm

    def quantized(self) -> LayerParts:
        """The layer with copies of its weights in int8; experts stay as they are."""
        mlp = self.mlp
        if isinstance(mlp, MLPParts):
            mlp = replace(mlp, gate_up=_quantized(mlp.gate_up), down=_quantized(mlp.down))
        return replace(self, qkv=_quantized(self.qkv), out=_quantized(self.out), mlp=mlp)


def _quantized(product: PlainWeight | QuantizedWeight) -> QuantizedWeight:
    return product if isinstance(product, QuantizedWeight) else QuantizedWeight.of(product)


def parts_of(layer: DecoderLayer) -> LayerParts | None:
    """The parts of a layer whose products lie as published and whose form the launches have, else None."""
    attention, spec = layer.attention, layer.spec
    if not isinstance(attention, HeadAttention) or not _is_launched(attention.spec):
        return None
    norms = [layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp]
    found = [None if norm is None else norm_of(norm) for norm in norms]
    heads, qkv, out = _head_form(attention), attention.qkv.plain, attention.out.plain
    if isinstance(layer.mlp, DenseAndExperts) or layer.added_input is not None or layer.scale is not None:
        return None
    mlp = _mlp_parts(layer.mlp) if isinstance(layer.mlp, MLP) else _expert_parts(layer.mlp)
    if heads is None or mlp is None or qkv is None or out is None:
        return None
    before_attention, after_attention, before_mlp, after_mlp = found
    unusual = spec.parallel or after_mlp is not None
    if [one is None for one in norms] != [one is None for one in found] or (isinstance(mlp, ExpertParts) and unusual):
        return None
    return LayerParts(
        cache_layer=attention.cache_layer,
        head_width=attention.spec.head_width,
        scaling=attention.spec.scaling,
        variant=attention.variant,
        before_attention=before_attention,
        qkv=qkv,
        heads=heads,
        out=out,
        attention_sum=SumForm(after_attention, spec.residual_scale),
        before_mlp=before_mlp,
        parallel=spec.parallel,
        mlp=mlp,
        mlp_sum=SumForm(after_mlp, spec.residual_scale),
    )


def _is_launched(spec: AttentionSpec) -> bool:
    """Whether a launch makes queries, keys and values as this attention has them."""
    unusual = spec.gated or spec.output_gate is not None or spec.keys_are_values or spec.keys_of is not None
    return not unusual and (spec.clip, spec.value_norm, spec.value_width, spec.value_scale) == (None, None, 0, 1.0)


def _mlp_parts(mlp: MLP) -> MLPParts | None:
    gate_up, down = mlp.gate_up.plain, mlp.down.plain
    kinds = {kind.value: kind for kind in ActivationKind}
    kind = kinds.get(mlp.spec.activation)
    if gate_up is None or down is None or kind is None or mlp.spec.gate != GateSpec():
        return None
    activation = Activation(kind, None if mlp.xielu is None else mlp.xielu.numbers)
    return MLPParts(gate_up, activation, mlp.spec.gated, down)


def _expert_parts(experts: MixtureOfExperts) -> ExpertParts | None:
    """The parts of experts; None where the one for every row is weighed by a gate."""
    shared = None if experts.shared is None else _mlp_parts(experts.shared)
    if experts.shared_gate is not None or (shared is None) != (experts.shared is None):
        return None
    return ExpertParts(experts.weights, experts.router, shared)


def norm_of(norm: Normalization) -> Norm | None:
    """The norm as the launches take it; None for one without weights."""
    if norm.weight is None:
        return None
    return Norm(norm.weight, norm.spec.epsilon, norm.bias, centered=norm.spec.kind == "layer")


class FusedForm:
    """A decoder layer by the `RowLinears` for its number of rows; see `tree_models.layers.decoder.LayerForm`.

    What it carries to the next layer is the first half of that one's norm.
    """

    def __init__(
        self, parts: LayerParts, linears: LinearsByRows, experts: RowExperts, ranks: RankGroup | None = None
    ) -> None:
        """`experts` compute mixtures of experts, where the layer has one; `ranks` share the layer."""
        self.parts, self.linears, self.experts, self.ranks = parts, linears, experts, ranks
        # Of the layer behind this one, where that has a form too.
        self.next_norm: Norm | None = None
        self._still: Angles | None = None

    def compute_layer(
        self, hidden: Tensor, carried: ScaledRows | None, angles: Angles | None, step: PagedPass
    ) -> tuple[Tensor, ScaledRows | None] | None:
        """See `tree_models.layers.decoder.LayerForm`."""
        linears, parts = self.linears.of(len(hidden)), self.parts
        if linears is None:
            return None
        scaled = carried or _scaled(linears, hidden, parts.before_attention)
        attended = self._attended(linears, scaled, angles, step)
        inner = None if parts.parallel else parts.before_mlp
        hidden, normed = self._added(linears, attended, parts.out, hidden, inner, parts.attention_sum)
        if not parts.parallel:
            scaled = normed or ScaledRows(hidden, None, 0.0)
        if isinstance(parts.mlp, MLPParts):
            activated = _activated(linears, parts.mlp, scaled)
            return self._added(linears, activated, parts.mlp.down, hidden, self.next_norm, parts.mlp_sum)
        return self._mixed(linears, parts.mlp, scaled, hidden)

    def _added(
        self,
        linears: RowLinears,
        rows: Tensor,
        product: PlainWeight | QuantizedWeight,
        residual: Tensor,
        norm: Norm | None,
        form: SumForm,
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with a product of all ranks, and the first half of the norm behind it."""
        weight, bias, ranks = product.weight, product.bias, self.ranks
        if ranks is None:
            return linears.add_linear(rows, weight, bias, residual, norm, None, form)
        if form.norm is None:
            # One rank's part has the residual, which costs no launch of its own.
            own = residual if ranks.rank == 0 else None
            hidden = ranks.summed(linears.add_linear(rows, weight, bias, own, None, None, form)[0])
        else:
            total = ranks.summed(linears.add_linear(rows, weight, bias)[0])
            hidden = residual + linears.norm_rows(total, form.norm) * form.multiplier
        return hidden, None if norm is None else linears.scale_rows(hidden, norm)

    def _mixed(
        self, linears: RowLinears, parts: ExpertParts, scaled: ScaledRows, hidden: Tensor
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with what experts add, and with what the MLP for every row adds before."""
        sum_form, shared, ranks = self.parts.mlp_sum, parts.shared, self.ranks
        if ranks is not None and ranks.rank:
            # The first rank's part has the residual.
            hidden = torch.zeros_like(hidden)
        if shared is not None:
            activated = _activated(linears, shared, scaled)
            hidden, _ = linears.add_linear(
                activated, shared.down.weight, shared.down.bias, hidden, None, None, sum_form
            )
        chosen, norm = parts.router.choose(scaled, self.experts), self.next_norm
        if ranks is None:
            return self.experts.mix(scaled, chosen, parts.weights, hidden, norm, sum_form.multiplier)
        part, _ = self.experts.mix(scaled, chosen, parts.weights, hidden, None, sum_form.multiplier)
        hidden = ranks.summed(part)
        return hidden, None if norm is None else linears.scale_rows(hidden, norm)

    def _attended(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, Hq * D]."""
        parts = self.parts
        step = pass_of(parts.variant, step)
        keys, values = step.cache.keys[parts.cache_layer], step.cache.values[parts.cache_layer]
        angles = angles or self._unturned(len(scaled.rows), step)
        heads = HeadRows(angles.cosines, angles.sines, step.slots, keys, values)
        # The weight behind attention is not prefetched: that slows this product by more than it saves there, 3 % of a
        # layer of 1 to 64 rows (benchmarks/results/2026-11-27-h100-vectors.md).
        query = linears.rotary_linear(scaled, parts.qkv.weight, parts.qkv.bias, heads, form=parts.heads)
        if angles.query_scale is not None:
            query = scaled_queries(query, angles.query_scale)
        attended: Tensor = step.attention.run(step.plan, query, keys, values, parts.scaling, parts.variant)
        return attended.flatten(1)

    def _unturned(self, rows: int, step: PagedPass) -> Angles:
        """Angles of zero, for a layer that embeds no positions. Made once for many rows, since a launch costs time."""
        if self._still is None or len(self._still.cosines) < rows:
            shape, device = (max(rows, _UNTURNED_ROWS), self.parts.head_width), step.slots.device
            with torch.inference_mode(False):
                self._still = Angles(torch.ones(shape, device=device), torch.zeros(shape, device=device))
        return Angles(self._still.cosines[:rows], self._still.sines[:rows])


class QuantizedForm:
    """A layer whose passes of few rows read copies of its weights in int8, since they take as long as reading; those of
    more rows are its own form's. See `tree_models.layers.decoder.LayerForm`."""

    def __init__(self, own: FusedForm, few: LinearsByRows) -> None:
        """`few` computes passes of few rows."""
        self._own, self._few = own, FusedForm(own.parts.quantized(), few, own.experts, own.ranks)
        self._few.next_norm = own.next_norm

    def compute_layer(
        self, hidden: Tensor, carried: ScaledRows | None, angles: Angles | None, step: PagedPass
    ) -> tuple[Tensor, ScaledRows | None] | None:
        """See `tree_models.layers.decoder.LayerForm`."""
        few = self._few.compute_layer(hidden, carried, angles, step)
        return few or self._own.compute_layer(hidden, carried, angles, step)


class FinalRows:
    """The last norm in one launch, and perhaps the head; see `tree_models.layers.decoder.FinalForm`."""

    def __init__(
        self,
        norm: Norm | None,
        linears: LinearsByRows,
        head: tuple[LinearsByRows, PlainWeight | QuantizedWeight] | None = None,
    ) -> None:
        """With `head`, its product is computed so for the numbers of rows that are named there."""
        self._norm, self._linears, self._head = norm, linears, head

    def norm(self, hidden: Tensor) -> Tensor | None:
        """See `tree_models.layers.decoder.FinalForm`."""
        linears = self._linears.of(len(hidden))
        return None if linears is None or self._norm is None else linears.norm_rows(hidden, self._norm)

    def head(self, rows: Tensor) -> Tensor | None:
        """See `tree_models.layers.decoder.FinalForm`."""
        if self._head is None:
            return None
        by_rows, product = self._head
        linears = by_rows.of(len(rows))
        return None if linears is None else linears.add_linear(rows, product.weight, product.bias)[0]


def _activated(linears: RowLinears, parts: MLPParts, scaled: ScaledRows) -> Tensor:
    """What an MLP's last product multiplies."""
    multiply = linears.gated_linear if parts.gated else linears.activated_linear
    return multiply(scaled, parts.gate_up.weight, parts.gate_up.bias, parts.activation)


def _scaled(linears: RowLinears, hidden: Tensor, norm: Norm | None) -> ScaledRows:
    return ScaledRows(hidden, None, 0.0) if norm is None else linears.scale_rows(hidden, norm)


def _head_form(attention: HeadAttention) -> HeadForm | None:
    """What is done to heads before attention; None for norms with weights of each head's own."""
    if attention.query_norm is None or attention.key_norm is None:
        return HeadForm()
    query, key = _head_norm(attention.query_norm), _head_norm(attention.key_norm)
    return None if query is None or key is None else HeadForm(query, key)


def _head_norm(norm: HeadNorm) -> Norm | None:
    found = norm_of(norm.norm)
    return None if found is None or found.weight.dim() > 1 else found
