"""What stands in the middle of a fused layer, between its first products and its last: attention, or states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tree_kernels.attention import AttentionVariant
from tree_kernels.linear import NO_ACTIVATION, HeadForm, HeadRows, Int8Weight, Norm, RowLinears, ScaledRows, Weight
from tree_kernels.recurrence import HeadsLayout, RecurrentPass, ShortConvolution
from tree_models.layers.attention import HeadAttention
from tree_models.layers.linear import PlainWeight
from tree_models.layers.norm import HeadNorm, Normalization
from tree_models.layers.paged import PagedPass, pass_of
from tree_models.layers.recurrent import GatedConvolution, GatedDeltaNet, StateSpace
from tree_models.layers.rotary import Angles, scaled_queries
from tree_models.spec import AttentionSpec

# Of the table for layers that embed no positions: those of the largest captured pass by default.
_UNTURNED_ROWS = 512


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
    """Grouped-query attention whose queries, keys and values are one launch."""

    cache_layer: int
    head_width: int
    scaling: float
    variant: AttentionVariant
    qkv: Product
    heads: HeadForm
    # Angles of zero, for a layer that embeds no positions: for the most rows so far.
    still: list[Angles]

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """See `Mixer.mixed`."""
        step = pass_of(self.variant, step)
        keys, values = step.cache.keys[self.cache_layer], step.cache.values[self.cache_layer]
        angles = angles or self._unturned(len(scaled.rows), step)
        heads = HeadRows(angles.cosines, angles.sines, step.slots, keys, values)
        # The weight behind attention is not prefetched: that slows this product by more than it saves there, 3 % of a
        # layer of 1 to 64 rows (benchmarks/results/2026-11-27-h100-vectors.md).
        query = linears.rotary_linear(scaled, self.qkv.weight, self.qkv.bias, heads, form=self.heads)
        if angles.query_scale is not None:
            query = scaled_queries(query, angles.query_scale)
        attended: Tensor = step.attention.run(step.plan, query, keys, values, self.scaling, self.variant)
        return attended.flatten(1)

    def quantized(self) -> AttentionMixer:
        """See `Mixer.quantized`."""
        return replace(self, qkv=quantized(self.qkv))

    def _unturned(self, rows: int, step: PagedPass) -> Angles:
        """Made once for many rows, since a launch costs time."""
        if not self.still or len(self.still[0].cosines) < rows:
            shape, device = (max(rows, _UNTURNED_ROWS), self.head_width), step.slots.device
            with torch.inference_mode(False):
                self.still[:] = [Angles(torch.ones(shape, device=device), torch.zeros(shape, device=device))]
        still = self.still[0]
        return Angles(still.cosines[:rows], still.sines[:rows])


@dataclass(frozen=True, slots=True)
class ConvolutionMixer:
    """See `GatedConvolutionSpec`: one product, the convolution, and its gates."""

    state_layer: int
    products: Product
    convolution: ShortConvolution

    def mixed(self, linears: RowLinears, scaled: ScaledRows, angles: Angles | None, step: PagedPass) -> Tensor:
        """See `Mixer.mixed`."""
        del angles
        product = linears.activated_linear(scaled, self.products.weight, self.products.bias, NO_ACTIVATION)
        before, behind, inputs = product.chunk(3, dim=-1)
        of_pass: RecurrentPass = step.recurrent
        gates = product.new_empty(len(product), 0, dtype=torch.float32)
        return behind * of_pass.convolve(self.state_layer, before * inputs, gates, self.convolution).rows

    def quantized(self) -> ConvolutionMixer:
        """See `Mixer.quantized`."""
        return replace(self, products=quantized(self.products))


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """See `DeltaNetSpec`: two products, tokens' gates, the convolution, the states, and the gated norm."""

    state_layer: int
    products: Product
    gates: Product
    decay: Tensor
    decay_bias: Tensor
    convolution: ShortConvolution
    layout: HeadsLayout
    norm: Tensor
    epsilon: float

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
        gates = of_pass.recurrence.delta_gates(of_gates, self.decay, self.decay_bias)
        convolved = of_pass.convolve(self.state_layer, inputs, gates, self.convolution)
        heads = of_pass.mix(self.state_layer, convolved, gates, self.layout)
        return of_pass.recurrence.gated_heads(heads, gate, self.norm, self.epsilon)

    def quantized(self) -> DeltaMixer:
        """See `Mixer.quantized`. Gates stay as they are: their product is small."""
        return replace(self, products=quantized(self.products))


def mixer_of(
    attention: HeadAttention | GatedConvolution | GatedDeltaNet | StateSpace | torch.nn.Module,
) -> AttentionMixer | ConvolutionMixer | DeltaMixer | None:
    """The mixer of a layer whose products lie as published and whose form the launches have, else None."""
    if isinstance(attention, HeadAttention):
        heads, qkv, spec = _head_form(attention), attention.qkv.plain, attention.spec
        if heads is None or qkv is None or not _is_launched(spec):
            return None
        of_layer = attention.cache_layer, spec.head_width, spec.scaling, attention.variant
        return AttentionMixer(*of_layer, qkv, heads, [])
    if isinstance(attention, GatedConvolution) and attention.products.plain is not None:
        convolution = ShortConvolution(attention.weight, attention.bias)
        return ConvolutionMixer(attention.state_layer, attention.products.plain, convolution)
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
        ShortConvolution(attention.weight, silu=True),
        attention.layout,
        attention.norm,
        attention.spec.epsilon,
    )


def norm_of(norm: Normalization) -> Norm | None:
    """The norm as the launches take it; None for one without weights."""
    if norm.weight is None:
        return None
    return Norm(norm.weight, norm.spec.epsilon, norm.bias, centered=norm.spec.kind == "layer")


def _is_launched(spec: AttentionSpec) -> bool:
    """Whether a launch makes queries, keys and values as this attention has them."""
    unusual = spec.gated or spec.output_gate is not None or spec.keys_are_values or spec.keys_of is not None
    return not unusual and (spec.clip, spec.value_norm, spec.value_width, spec.value_scale) == (None, None, 0, 1.0)


def _head_form(attention: HeadAttention) -> HeadForm | None:
    """What is done to heads before attention; None for norms with weights of each head's own, or over all ranks'."""
    if attention.query_norm is None or attention.key_norm is None:
        return HeadForm()
    query, key = _head_norm(attention.query_norm), _head_norm(attention.key_norm)
    return None if query is None or key is None else HeadForm(query, key)


def _head_norm(norm: HeadNorm) -> Norm | None:
    if norm.ranks is not None:
        return None
    found = norm_of(norm.norm)
    return None if found is None or found.weight.dim() > 1 else found
