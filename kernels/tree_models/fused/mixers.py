"""What stands in the middle of a fused layer, between its first products and its last: attention, or states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from tree_kernels.attention import AttentionVariant
from tree_kernels.linear import (
    NO_ACTIVATION,
    Activation,
    ActivationKind,
    HeadForm,
    HeadRows,
    Int8Weight,
    Norm,
    RowLinears,
    ScaledRows,
    Weight,
)
from tree_kernels.recurrence import HeadsLayout, RecurrentPass, ShortConvolution, SpaceOutput
from tree_models.layers.attention import HeadAttention
from tree_models.layers.linear import PlainWeight
from tree_models.layers.norm import HeadNorm, Normalization
from tree_models.layers.paged import PagedPass, expanded_shape, pass_of
from tree_models.layers.recurrent import GatedConvolution, GatedDeltaNet, StateSpace, scaled_betas
from tree_models.layers.rotary import Angles, scaled_queries
from tree_models.spec import AttentionSpec


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


# A product of a fused layer.
Product = PlainWeight | QuantizedWeight


def quantized(product: Product) -> QuantizedWeight:
    """The product with a copy of its weight in int8."""
    return product if isinstance(product, QuantizedWeight) else QuantizedWeight.of(product)


class Mixer(Protocol):
    """What a layer does between the norm before it and its last product."""

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, K], which the layer's last product multiplies."""

    def quantized(self) -> Mixer:
        """The same with copies of its weights in int8."""


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Grouped-query attention whose queries, keys and values are one launch, and its output's gates another."""

    cache_layer: int
    head_width: int
    scaling: float
    variant: AttentionVariant
    has_keys: bool  # of its own
    qkv: Product
    cached: Product  # the rows of that product which make keys and values, or all of them
    heads: HeadForm
    # What multiplies the output, [heads * D or heads, H], and how it is made of its product.
    gate: Product | None = None
    gate_activation: Activation = NO_ACTIVATION
    # Angles of zero, for a layer that embeds no positions: for the most rows so far.
    still: list[Angles] = field(default_factory=list)

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """See `Mixer.mixed`."""
        step = pass_of(self.variant, step)
        query = self._made(self.qkv, linears, scaled, angles, step, step.queries)
        if angles is not None and angles.query_scale is not None:
            query = scaled_queries(query, angles.query_scale)
        keys, values = step.cache.keys[self.cache_layer], step.cache.values[self.cache_layer]
        attended: Tensor = step.attention.run(step.plan, query, keys, values, self.scaling, self.variant)
        if self.gate is not None:
            gate = linears.activated_linear(scaled, self.gate.weight, self.gate.bias, self.gate_activation)
            attended = attended * gate.view(*attended.shape[:2], -1)
        return attended.flatten(1)

    def cache_rows(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> None:
        """Write the rows' keys and values, and attend to none."""
        self._made(self.cached, linears, scaled, angles, pass_of(self.variant, step))

    def quantized(self) -> AttentionMixer:
        """See `Mixer.quantized`."""
        gate = None if self.gate is None else quantized(self.gate)
        return replace(self, qkv=quantized(self.qkv), cached=quantized(self.cached), gate=gate)

    def _made(
        self,
        product: Product,
        linears: RowLinears,
        scaled: ScaledRows,
        angles: Angles | None,
        step: PagedPass,
        queries: Tensor | None = None,
    ) -> Tensor:
        """[R, Hq, D], the queries that a product of the rows makes, whose keys and values are written."""
        keys, values = step.cache.keys[self.cache_layer], step.cache.values[self.cache_layer]
        angles = angles or self._unturned(len(scaled.rows), step)
        # Of a layer without keys of its own nothing is written.
        written = (keys, values) if self.has_keys else (keys[:, :, :0], values[:, :, :0])
        heads = HeadRows(angles.cosines, angles.sines, step.slots, *written, queries)
        return linears.rotary_linear(scaled, product.weight, product.bias, heads, form=self.heads)

    def _unturned(self, rows: int, step: PagedPass) -> Angles:
        """Made once for many rows, since a launch costs time."""
        if not self.still or len(self.still[0].cosines) < rows:
            # As many as the largest captured pass has by default.
            shape, device = (max(rows, 512), self.head_width), step.slots.device
            with torch.inference_mode(False):
                self.still[:] = [Angles(torch.ones(shape, device=device), torch.zeros(shape, device=device))]
        still = self.still[0]
        return Angles(still.cosines[:rows], still.sines[:rows])


@dataclass(frozen=True, slots=True)
class _StateMixer:
    """What all mixers with states have."""

    state_layer: int
    products: Product

    def quantized(self) -> Self:
        """See `Mixer.quantized`. A product of gates stays as it is: it is small."""
        return replace(self, products=quantized(self.products))


@dataclass(frozen=True, slots=True)
class ConvolutionMixer(_StateMixer):
    """See `GatedConvolutionSpec`: one product, the convolution, and its gates."""

    convolution: ShortConvolution

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """See `Mixer.mixed`."""
        del angles
        product = linears.activated_linear(scaled, self.products.weight, self.products.bias, NO_ACTIVATION)
        before, behind, inputs = product.chunk(3, dim=-1)
        of_pass: RecurrentPass = step.recurrent
        gates = product.new_empty(len(product), 0, dtype=torch.float32)
        return behind * of_pass.convolve(self.state_layer, before * inputs, gates, self.convolution).rows


@dataclass(frozen=True, slots=True)
class DeltaMixer(_StateMixer):
    """See `DeltaNetSpec`: two products, tokens' gates, the convolution, the states, and the gated norm."""

    gates: Product
    decay: Tensor
    decay_bias: Tensor
    convolution: ShortConvolution
    layout: HeadsLayout
    norm: Tensor
    epsilon: float
    beta_scale: float

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """See `Mixer.mixed`."""
        del angles
        of_pass: RecurrentPass = step.recurrent
        product, of_gates = (
            linears.activated_linear(scaled, each.weight, each.bias, NO_ACTIVATION)
            for each in (self.products, self.gates)
        )
        inputs = product[:, : len(self.convolution.weight)]
        gate = product[:, len(self.convolution.weight) :]
        gates = of_pass.recurrence.form.delta_gates(of_gates, self.decay, self.decay_bias)
        gates = scaled_betas(gates, self.beta_scale)
        convolved = of_pass.convolve(self.state_layer, inputs, gates, self.convolution)
        heads = of_pass.mix(self.state_layer, convolved, gates, self.layout)
        return of_pass.recurrence.form.gated_heads(heads, gate, self.norm, self.epsilon)


@dataclass(frozen=True, slots=True)
class SpaceMixer(_StateMixer):
    """See `StateSpaceSpec`: one product, tokens' gates, the convolution, the states, and the gated norm."""

    decay: Tensor
    decay_bias: Tensor
    step_limits: tuple[float, float]
    convolution: ShortConvolution
    layout: HeadsLayout
    output: SpaceOutput

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """See `Mixer.mixed`."""
        del angles
        of_pass: RecurrentPass = step.recurrent
        product = linears.activated_linear(scaled, self.products.weight, self.products.bias, NO_ACTIVATION)
        channels, heads = len(self.convolution.weight), len(self.decay)
        values = product.shape[1] - channels - heads
        gate, inputs = product[:, :values], product[:, values:-heads]
        of_steps = product[:, -heads:]
        gates = of_pass.recurrence.form.space_gates(of_steps, self.decay, self.decay_bias, self.step_limits)
        convolved = of_pass.convolve(self.state_layer, inputs, gates, self.convolution)
        mixed = of_pass.mix(self.state_layer, convolved, gates, self.layout)
        return of_pass.recurrence.form.space_output(mixed, convolved.rows[:, :values], gate, self.output)


def mixer_of(
    attention: HeadAttention | GatedConvolution | GatedDeltaNet | StateSpace | torch.nn.Module,
) -> Mixer | None:
    """The mixer of a layer whose products lie as published and whose form the launches have, else None."""
    if isinstance(attention, HeadAttention):
        return _attention_mixer(attention)
    if isinstance(attention, GatedConvolution) and attention.products.plain is not None:
        return ConvolutionMixer(attention.state_layer, attention.products.plain, attention.convolution)
    # A norm over all ranks' heads is the plain form's, and so are scales.
    if isinstance(attention, StateSpace) and attention.products.plain is not None and attention.is_usual:
        return SpaceMixer(
            attention.state_layer,
            attention.products.plain,
            attention.decay,
            attention.decay_bias,
            attention.spec.step_limits,
            attention.convolution,
            attention.layout,
            attention.output,
        )
    if not isinstance(attention, GatedDeltaNet):
        return None
    products, gates = attention.products.plain, attention.gates.plain
    if products is None or gates is None:
        return None
    return DeltaMixer(
        attention.state_layer,
        products,
        gates,
        attention.decay,
        attention.decay_bias,
        attention.convolution,
        attention.layout,
        attention.norm,
        attention.spec.epsilon,
        attention.spec.beta_scale,
    )


def _attention_mixer(attention: HeadAttention) -> AttentionMixer | None:
    heads, qkv, spec = _head_form(attention), attention.qkv.plain, attention.spec
    usual = spec.kv_heads, spec.head_width, spec.width_of_values
    if heads is None or qkv is None or not _is_launched(spec) or expanded_shape(spec) != usual:
        return None
    gate, activation = None, NO_ACTIVATION
    if attention.output_gate is not None:
        gate, activation = attention.output_gate.product.plain, attention.output_gate.launched
    elif spec.gated:
        # Those of the output come first.
        count = spec.heads * spec.head_width
        gate, qkv, activation = _rows_of(qkv, 0, count), _rows_of(qkv, count), Activation(ActivationKind.SIGMOID)
    if gate is None and (spec.gated or attention.output_gate is not None):
        return None
    of_layer = attention.cache_layer, spec.head_width, spec.scaling, attention.variant, spec.has_keys
    # A norm over all queries needs them.
    whole = heads.query_norm is not None and len(heads.query_norm.weight) > spec.head_width
    cached = qkv if whole or not spec.has_keys else _rows_of(qkv, spec.heads * spec.head_width)
    return AttentionMixer(*of_layer, qkv, cached, heads, gate, activation)


def _rows_of(product: PlainWeight, first: int, last: int | None = None) -> PlainWeight:
    """Some rows of a product, in its memory."""

    def part(memory: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(memory.detach()[first:last], requires_grad=False)

    return PlainWeight(part(product.weight), None if product.bias is None else part(product.bias))


def norm_of(norm: Normalization) -> Norm | None:
    """The norm as the launches take it; None for one without weights, or for what norms nothing."""
    if norm.weight is None or norm.spec.kind == "affine":
        return None
    return Norm(norm.weight, norm.spec.epsilon, norm.bias, centered=norm.spec.kind == "layer")


def _is_launched(spec: AttentionSpec) -> bool:
    """Whether a launch makes queries, keys and values as this attention has them."""
    usual = spec.clip is None and (spec.value_width, spec.value_scale) == (0, 1.0) and not spec.keys_are_values
    # A norm of values has no weights, and comes beside those of queries and keys.
    return usual and (spec.value_norm is None or (spec.value_norm.kind == "rms" and not spec.value_norm.weight))


def _head_form(attention: HeadAttention) -> HeadForm | None:
    """What is done to heads before attention; None for norms with weights of each head's own, over all ranks', or
    behind the rotary embedding."""
    if attention.spec.head_norm is not None and attention.spec.head_norm.after_rotary:
        return None
    normed = attention.spec.value_norm
    if attention.query_norm is None:
        return HeadForm() if normed is None else None
    query = _head_norm(attention.query_norm)
    # Without keys the norm of queries stands for theirs.
    key = query if attention.key_norm is None else _head_norm(attention.key_norm)
    if query is None or key is None:
        return None
    return HeadForm(query, key, value_epsilon=0.0 if normed is None else normed.epsilon)


def _head_norm(norm: HeadNorm) -> Norm | None:
    if norm.ranks is not None:
        return None
    found = norm_of(norm.norm)
    return None if found is None or found.weight.dim() > 1 else found
