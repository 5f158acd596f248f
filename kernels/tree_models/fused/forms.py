"""Decoder layers of few launches: four products or five, each with what lies before and behind it, and attention or
states.

A product's launch norms, rotates, writes to the cache, adds the residual or multiplies gate and up; see
`tree_kernels.linear`. `preparing` decides which layers are computed so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tree_kernels.experts import ExpertWeights, RowExperts
from tree_kernels.linear import PLAIN_SUM, Activation, ActivationKind, Norm, RowLinears, ScaledRows, SumForm
from tree_models.fused.mixers import (
    AttentionMixer,
    Mixer,
    Product,
    mixer_of,
    norm_of,
    quantized,
)
from tree_models.layers.beside_rows import AddedInput
from tree_models.layers.decoder_layer import DecoderLayer
from tree_models.layers.experts import DenseAndExperts, MixtureOfExperts, TopKRouter
from tree_models.layers.mlp import MLP, activation_of
from tree_models.layers.paged import PagedPass
from tree_models.layers.rotary import Angles
from tree_models.rank_group import RankGroup
from tree_models.spec import GateSpec

_SIGMOID = Activation(ActivationKind.SIGMOID)


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
    shared_gate: Product | None  # [1, H], whose sigmoid weighs that MLP


@dataclass(frozen=True, slots=True)
class DenseAndExpertParts:
    """See `DenseAndExperts`: both halves, and the norms before and behind each."""

    dense: MLPParts
    before_dense: Norm
    after_dense: Norm
    experts: ExpertParts
    before_experts: Norm
    after_experts: Norm


@dataclass(frozen=True, slots=True)
class AddedParts:
    """See `AddedInput`: what a layer adds last, made of its rows and of vectors."""

    gate: Product
    activation: Activation
    projection: Product
    norm: Norm


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Weights of one decoder layer, and what it computes between its products. One of its halves may be absent."""

    before_attention: Norm | None
    mixer: Mixer | None
    out: Product | None
    attention_sum: SumForm
    before_mlp: Norm | None
    parallel: bool
    mlp: MLPParts | ExpertParts | DenseAndExpertParts | None
    mlp_sum: SumForm
    added: AddedParts | None
    scale: Tensor | None

    @property
    def first_norm(self) -> Norm | None:
        """The norm before its first half."""
        return self.before_mlp if self.mixer is None else self.before_attention

    def quantized(self) -> LayerParts:
        """The layer with copies of its weights in int8; experts stay as they are."""
        mlp, mixer, out = self.mlp, self.mixer, self.out
        if isinstance(mlp, MLPParts):
            mlp = replace(mlp, gate_up=quantized(mlp.gate_up), down=quantized(mlp.down))
        if mixer is not None and out is not None:
            mixer, out = mixer.quantized(), quantized(out)
        return replace(self, mixer=mixer, out=out, mlp=mlp)


def parts_of(layer: DecoderLayer) -> LayerParts | None:
    """The parts of a layer whose products lie as published and whose form the launches have, else None."""
    attention, mlp, spec = layer.attention, layer.mlp, layer.spec
    mixer, out, fed, added = None, None, None, None
    if layer.beside is not None or spec.normed_residual is not None or spec.streams or spec.laurel:
        return None
    if spec.ahead is not None or spec.norms_sums or spec.residual_norm is not None or spec.router_mlp is not None:
        return None
    if attention is not None:
        product: Any = attention.out
        mixer, out = mixer_of(attention), product.plain
        if mixer is None or out is None:
            return None
    if mlp is not None:
        fed = _fed_parts(mlp)
        if fed is None:
            return None
    if layer.added_input is not None:
        added = _added_parts(layer.added_input)
        if added is None:
            return None
    norms = [layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp]
    found = [None if norm is None else norm_of(norm) for norm in norms]
    before_attention, after_attention, before_mlp, after_mlp = found
    if [one is None for one in norms] != [one is None for one in found]:
        return None
    if spec.parallel and not isinstance(fed, MLPParts):
        return None
    return LayerParts(
        before_attention=before_attention,
        mixer=mixer,
        out=out,
        attention_sum=SumForm(after_attention, spec.residual_scale),
        before_mlp=before_mlp,
        parallel=spec.parallel,
        mlp=fed,
        mlp_sum=SumForm(after_mlp, spec.residual_scale),
        added=added,
        scale=layer.scale,
    )


def _fed_parts(mlp: MLP | MixtureOfExperts | DenseAndExperts) -> MLPParts | ExpertParts | DenseAndExpertParts | None:
    if isinstance(mlp, MLP):
        return _mlp_parts(mlp)
    if isinstance(mlp, MixtureOfExperts):
        return _expert_parts(mlp)
    dense, experts = _mlp_parts(mlp.dense), _expert_parts(mlp.experts)
    norms = [norm_of(norm) for norm in (mlp.before_dense, mlp.after_dense, mlp.before_experts, mlp.after_experts)]
    before_dense, after_dense, before_experts, after_experts = norms
    if None in (dense, experts) or before_dense is None or after_dense is None:
        return None
    if before_experts is None or after_experts is None:
        return None
    assert dense is not None and experts is not None, "as above"
    return DenseAndExpertParts(dense, before_dense, after_dense, experts, before_experts, after_experts)


def _added_parts(added: AddedInput) -> AddedParts | None:
    gate, projection, norm = added.gate.plain, added.projection.plain, norm_of(added.norm)
    if gate is None or projection is None or norm is None:
        return None
    return AddedParts(gate, activation_of(added.activation), projection, norm)


def _mlp_parts(mlp: MLP) -> MLPParts | None:
    gate_up, down = mlp.gate_up.plain, mlp.down.plain
    kinds = {kind.value: kind for kind in ActivationKind}
    kind = kinds.get(mlp.spec.activation)
    if gate_up is None or down is None or kind is None:
        return None
    if (mlp.spec.gate, mlp.spec.scale, mlp.spec.cutoff) != (GateSpec(), 1.0, None):
        return None
    activation = Activation(kind, None if mlp.xielu is None else mlp.xielu.numbers)
    return MLPParts(gate_up, activation, mlp.spec.gated, down)


def _expert_parts(experts: MixtureOfExperts) -> ExpertParts | None:
    """The parts of experts; None where they read a latent or weighed rows, some are idle, or a weighed MLP for all rows
    has a bias at its end."""
    shared = None if experts.shared is None else _mlp_parts(experts.shared)
    gate = None if experts.shared_gate is None else experts.shared_gate.plain
    if (
        experts.spec.weighs_inputs
        or experts.spec.idle
        or experts.latent_in is not None
        or (shared is None) != (experts.shared is None)
    ):
        return None
    if (gate is None) != (experts.shared_gate is None) or (gate and shared and shared.down.bias is not None):
        return None
    return ExpertParts(experts.weights, experts.router, shared, gate)


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
        self,
        hidden: Tensor,
        carried: ScaledRows | None,
        angles: Angles | None,
        step: PagedPass,
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, ScaledRows | None] | None:
        """See `tree_models.layers.decoder.LayerForm`."""
        linears, parts = self.linears.of(len(hidden)), self.parts
        if linears is None:
            return None
        scaled = carried or _scaled(linears, hidden, parts.first_norm)
        aside = parts.parallel and parts.before_mlp is not None
        fed = _scaled(linears, hidden, parts.before_mlp) if aside else scaled
        # What is still to be done behind a half reads whole rows.
        after = None if parts.added is not None or parts.scale is not None else self.next_norm
        normed = None
        if parts.mixer is not None and parts.out is not None:
            mixed = parts.mixer.mixed(linears, scaled, angles, step)
            inner = None if parts.parallel else parts.before_mlp
            inner = after if parts.mlp is None else inner
            hidden, normed = self._added(linears, mixed, parts.out, hidden, inner, parts.attention_sum)
            if not parts.parallel:
                fed = normed or ScaledRows(hidden, None, 0.0)
        if parts.mlp is not None:
            hidden, normed = self._fed(linears, parts.mlp, fed, hidden, after, step)
        if parts.added is None and parts.scale is None:
            return hidden, normed
        return self._finished(linears, hidden, vectors)

    def cache_rows(self, hidden: Tensor, carried: ScaledRows | None, angles: Angles | None, step: PagedPass) -> bool:
        """See `tree_models.layers.decoder.LayerForm`."""
        linears, mixer = self.linears.of(len(hidden)), self.parts.mixer
        if linears is None or not isinstance(mixer, AttentionMixer):
            return False
        mixer.cache_rows(linears, carried or _scaled(linears, hidden, self.parts.first_norm), angles, step)
        return True

    def _fed(
        self,
        linears: RowLinears,
        mlp: MLPParts | ExpertParts | DenseAndExpertParts,
        scaled: ScaledRows,
        hidden: Tensor,
        after: Norm | None,
        step: PagedPass,
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with what an MLP or experts add, and the first half of the norm `after` them."""
        if isinstance(mlp, MLPParts):
            activated = _activated(linears, mlp, scaled)
            return self._added(linears, activated, mlp.down, hidden, after, self.parts.mlp_sum)
        if isinstance(mlp, ExpertParts):
            return self._mixed(linears, mlp, scaled, hidden, after, step)
        return self._side_by_side(linears, mlp, hidden, after, step)

    def _finished(
        self, linears: RowLinears, hidden: Tensor, vectors: Tensor | None
    ) -> tuple[Tensor, ScaledRows | None]:
        """The rows with what the layer adds last and in their last size, and the first half of the next norm."""
        added, scale, norm = self.parts.added, self.parts.scale, self.next_norm
        if added is not None and vectors is not None:
            opened = linears.activated_linear(
                ScaledRows(hidden, None, 0.0), added.gate.weight, added.gate.bias, added.activation
            )
            form = SumForm(added.norm)
            hidden, _ = linears.add_linear(
                opened * vectors, added.projection.weight, added.projection.bias, hidden, None, form
            )
        if scale is not None:
            hidden = hidden * scale
        return hidden, None if norm is None else linears.scale_rows(hidden, norm)

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
            return linears.add_linear(rows, weight, bias, residual, norm, form)
        sums = ranks.sums_of(residual)
        part, _ = linears.add_linear(rows, weight, bias, into=None if sums is None else sums.place(*residual.shape))
        if sums is not None:
            return sums.add(part, residual, norm, form)
        return linears.add_rows(ranks.summed(part), residual, norm, form)

    def _mixed(
        self,
        linears: RowLinears,
        parts: ExpertParts,
        scaled: ScaledRows,
        hidden: Tensor,
        norm: Norm | None,
        step: PagedPass,
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with what experts add, and with what the MLP for every row adds before."""
        form, shared, ranks = self.parts.mlp_sum, parts.shared, self.ranks
        # Without the residual where parts of ranks are summed, or the sum is normed first.
        whole = ranks is None and form.norm is None
        before, own = (hidden, form) if whole else (None, PLAIN_SUM)
        if shared is not None:
            activated = _activated(linears, shared, scaled)
            if parts.shared_gate is not None:
                gate = parts.shared_gate
                activated = activated * linears.activated_linear(scaled, gate.weight, gate.bias, _SIGMOID)
            before, _ = linears.add_linear(activated, shared.down.weight, shared.down.bias, before, None, own)
        chosen = parts.router.choose(scaled, self.experts, step.plan.present)
        if whole:
            return self.experts.mix(scaled, chosen, parts.weights, before, norm, form.multiplier)
        part, _ = self.experts.mix(scaled, chosen, parts.weights, before)
        if ranks is None:
            return linears.add_rows(part, hidden, norm, form)
        sums = ranks.sums_of(hidden)
        if sums is not None:
            return sums.add(sums.place(*part.shape).copy_(part), hidden, norm, form)
        return linears.add_rows(ranks.summed(part), hidden, norm, form)

    def _side_by_side(
        self,
        linears: RowLinears,
        parts: DenseAndExpertParts,
        hidden: Tensor,
        norm: Norm | None,
        step: PagedPass,
    ) -> tuple[Tensor, ScaledRows | None]:
        """The residual with an MLP and experts, whose sum may be normed."""
        down = parts.dense.down
        activated = _activated(linears, parts.dense, linears.scale_rows(hidden, parts.before_dense))
        dense, _ = linears.add_linear(activated, down.weight, down.bias)
        scaled = linears.scale_rows(hidden, parts.before_experts)
        chosen = parts.experts.router.choose(ScaledRows(hidden, None, 0.0), self.experts, step.plan.present)
        mixed, _ = self.experts.mix(scaled, chosen, parts.experts.weights)
        if self.ranks is not None:
            dense, mixed = self.ranks.summed(torch.cat([dense, mixed])).chunk(2)
        total = linears.norm_rows(dense, parts.after_dense) + linears.norm_rows(mixed, parts.after_experts)
        return linears.add_rows(total, hidden, norm, self.parts.mlp_sum)


class QuantizedForm:
    """A layer whose passes of few rows read copies of its weights in int8, since they take as long as reading; those of
    more rows are its own form's. See `tree_models.layers.decoder.LayerForm`."""

    def __init__(self, own: FusedForm, few: LinearsByRows) -> None:
        """`few` computes passes of few rows."""
        self._own, self._few = own, FusedForm(own.parts.quantized(), few, own.experts, own.ranks)
        self._few.next_norm = own.next_norm

    def compute_layer(
        self,
        hidden: Tensor,
        carried: ScaledRows | None,
        angles: Angles | None,
        step: PagedPass,
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, ScaledRows | None] | None:
        """See `tree_models.layers.decoder.LayerForm`."""
        few = self._few.compute_layer(hidden, carried, angles, step, vectors)
        return few or self._own.compute_layer(hidden, carried, angles, step, vectors)

    def cache_rows(self, hidden: Tensor, carried: ScaledRows | None, angles: Angles | None, step: PagedPass) -> bool:
        """See `tree_models.layers.decoder.LayerForm`."""
        of = hidden, carried, angles, step
        return self._few.cache_rows(*of) or self._own.cache_rows(*of)


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
