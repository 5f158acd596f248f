"""Decoder layers of few launches: four products or five, each with what lies before and behind it, and attention or
states.

A product's launch norms, rotates, writes to the cache, adds the residual or multiplies gate and up; see
`tree_kernels.linear`. `preparing` decides which layers are computed so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tree_kernels.experts import ExpertWeights, RowExperts
from tree_kernels.linear import PLAIN_SUM, Activation, ActivationKind, Norm, RowLinears, ScaledRows, SumForm
from tree_models.fused.mixers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaMixer,
    Product,
    mixer_of,
    norm_of,
    quantized,
)
from tree_models.layers.decoder import DecoderLayer
from tree_models.layers.experts import DenseAndExperts, MixtureOfExperts
from tree_models.layers.linear import PlainWeight
from tree_models.layers.mlp import MLP
from tree_models.layers.paged import PagedPass
from tree_models.layers.rank_group import RankGroup
from tree_models.layers.rotary import Angles
from tree_models.layers.router import TopKRouter
from tree_models.spec import GateSpec


@dataclass(frozen=True, slots=True)
class LinearsByRows:
    """What computes the linear layers of a pass."""

    # (maximum of rows, what computes up to so many), rising. Passes of more rows run the plain form.
    ranges: tuple[tuple[float, RowLinears], ...]

    def of(self, rows: int) -> RowLinears | None:
        """What computes a pass of `rows`; None where the plain form does, as for a pass without rows."""
        return next((linears for most, linears in self.ranges if 0 < rows <= most), None)


@dataclass(frozen=True, slots=True)
class MLPParts:
    """Weights of an MLP, and what it computes between them."""

    gate_up: Product
    activation: Activation
    gated: bool
    down: Product


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """A mixture of experts, and the MLP that every row takes beside it."""

    weights: ExpertWeights
    router: TopKRouter
    shared: MLPParts | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Weights of one decoder layer, and what it computes between its products."""

    before_attention: Norm | None
    mixer: AttentionMixer | ConvolutionMixer | DeltaMixer
    out: Product
    attention_sum: SumForm
    before_mlp: Norm | None
    parallel: bool
    mlp: MLPParts | ExpertParts
    mlp_sum: SumForm

    def quantized(self) -> LayerParts:
        """The layer with copies of its weights in int8; experts stay as they are."""
        mlp = self.mlp
        if isinstance(mlp, MLPParts):
            mlp = replace(mlp, gate_up=quantized(mlp.gate_up), down=quantized(mlp.down))
        return replace(self, mixer=self.mixer.quantized(), out=quantized(self.out), mlp=mlp)


def parts_of(layer: DecoderLayer) -> LayerParts | None:
    """The parts of a layer whose products lie as published and whose form the launches have, else None."""
    attention, spec = layer.attention, layer.spec
    if attention is None or layer.mlp is None:
        return None
    mixer = mixer_of(attention)
    if mixer is None:
        return None
    norms = [layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp]
    found = [None if norm is None else norm_of(norm) for norm in norms]
    product: Any = attention.out
    out: PlainWeight | None = product.plain
    if isinstance(layer.mlp, DenseAndExperts) or layer.added_input is not None or layer.scale is not None:
        return None
    mlp = _mlp_parts(layer.mlp) if isinstance(layer.mlp, MLP) else _expert_parts(layer.mlp)
    if mlp is None or out is None:
        return None
    before_attention, after_attention, before_mlp, after_mlp = found
    unusual = spec.parallel or after_mlp is not None
    if [one is None for one in norms] != [one is None for one in found] or (isinstance(mlp, ExpertParts) and unusual):
        return None
    return LayerParts(
        before_attention=before_attention,
        mixer=mixer,
        out=out,
        attention_sum=SumForm(after_attention, spec.residual_scale),
        before_mlp=before_mlp,
        parallel=spec.parallel,
        mlp=mlp,
        mlp_sum=SumForm(after_mlp, spec.residual_scale),
    )


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
    if experts.latent_in is not None or experts.shared_gate is not None or (shared is None) != (experts.shared is None):
        return None
    return ExpertParts(experts.weights, experts.router, shared)


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

    def compute_layer(
        self, hidden: Tensor, carried: ScaledRows | None, angles: Angles | None, step: PagedPass
    ) -> tuple[Tensor, ScaledRows | None] | None:
        """See `tree_models.layers.decoder.LayerForm`."""
        linears, parts = self.linears.of(len(hidden)), self.parts
        if linears is None:
            return None
        scaled = carried or _scaled(linears, hidden, parts.before_attention)
        mixed = parts.mixer.mixed(linears, scaled, angles, step)
        inner = None if parts.parallel else parts.before_mlp
        hidden, normed = self._added(linears, mixed, parts.out, hidden, inner, parts.attention_sum)
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
        product: Product,
        residual: Tensor,
        norm: Norm | None,
        form: SumForm,
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with a product of all ranks, and the first half of the norm behind it."""
        weight, bias, ranks = product.weight, product.bias, self.ranks
        if ranks is None:
            return linears.add_linear(rows, weight, bias, residual, norm, None, form)
        sums = ranks.sums_of(residual)
        part, _ = linears.add_linear(rows, weight, bias, into=None if sums is None else sums.place(*residual.shape))
        if sums is not None:
            return sums.add(part, residual, norm, form)
        return linears.add_rows(ranks.summed(part), residual, norm, form)

    def _mixed(
        self, linears: RowLinears, parts: ExpertParts, scaled: ScaledRows, hidden: Tensor
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with what experts add, and with what the MLP for every row adds before."""
        sum_form, shared, ranks, norm = self.parts.mlp_sum, parts.shared, self.ranks, self.next_norm
        # Of ranks each makes a part without the residual, which their sum adds.
        before, form = (hidden, sum_form) if ranks is None else (None, PLAIN_SUM)
        if shared is not None:
            activated = _activated(linears, shared, scaled)
            before, _ = linears.add_linear(activated, shared.down.weight, shared.down.bias, before, None, None, form)
        chosen = parts.router.choose(scaled, self.experts)
        if ranks is None:
            return self.experts.mix(scaled, chosen, parts.weights, before, norm, form.multiplier)
        part, _ = self.experts.mix(scaled, chosen, parts.weights, before)
        sums = ranks.sums_of(hidden)
        if sums is not None:
            return sums.add(sums.place(*part.shape).copy_(part), hidden, norm, sum_form)
        return linears.add_rows(ranks.summed(part), hidden, norm, sum_form)


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
        head: tuple[LinearsByRows, Product] | None = None,
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
