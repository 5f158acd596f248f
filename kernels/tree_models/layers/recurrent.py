"""Layers that keep a state of a fixed size in place of keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.compiled_layers import uncompiled
from tree_kernels.recurrence import (
    Convolved,
    HeadsLayout,
    RecurrentPass,
    ShortConvolution,
    SpaceOutput,
    StateRule,
    StateShape,
    delta_gates,
    gated_heads,
    space_gates,
    space_output,
)
from tree_models.layers.linear import Linear
from tree_models.layers.paged import PagedPass
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import Angles
from tree_models.names import WeightNames
from tree_models.rank_group import rms_over_ranks
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place
from tree_models.spec import (
    DeltaNetSpec,
    GatedConvolutionSpec,
    GriffinSpec,
    KimiDeltaSpec,
    LightningSpec,
    MatrixMemorySpec,
    RecurrentSpec,
    SelectiveSpec,
    StateSpaceSpec,
)


class StateLayer(nn.Module):
    """What layers with states have in common; `state_layer` counts them. Reading it is not compiled: it is all in which
    layers of a kind differ."""

    convolution: ShortConvolution
    layout: HeadsLayout

    def __init__(self, layer: int, state_layer: int) -> None:
        super().__init__()
        self.layer, self.state_layer = layer, state_layer

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        raise NotImplementedError

    @uncompiled
    def convolved(self, inputs: Tensor, step: PagedPass) -> Convolved:
        """The convolution's outputs of inputs [R, C], with states to come that are scanned."""
        of_pass: RecurrentPass = step.recurrent
        early = inputs.new_empty(len(inputs), 0, dtype=torch.float32)
        return of_pass.convolve(self.state_layer, inputs, early, self.convolution)

    @uncompiled
    def scanned(self, convolved: Convolved, gates: Tensor, queries: Tensor, decay: Tensor, step: PagedPass) -> Tensor:
        """[R, C] fp32. See `RecurrentPass.scan`."""
        of_pass: RecurrentPass = step.recurrent
        return of_pass.scan(self.state_layer, convolved, gates, queries, decay)

    @uncompiled
    def mixed(self, inputs: Tensor, gates: Tensor, step: PagedPass, *, keyed: bool = False) -> tuple[Tensor, Tensor]:
        """[R, heads, value width] of inputs [R, C], and the convolution's outputs [R, C]. `keyed` gates come too late
        for the convolution. See `RecurrentPass.mix`."""
        of_pass: RecurrentPass = step.recurrent
        convolved = of_pass.convolve(self.state_layer, inputs, gates[:, :0] if keyed else gates, self.convolution)
        return of_pass.mix(self.state_layer, convolved, gates, self.layout), convolved.rows


class GatedConvolution(StateLayer):
    """See `GatedConvolutionSpec`. Both gates and what is convolved are one product."""

    def __init__(
        self, spec: GatedConvolutionSpec, hidden_size: int, layer: int, place: Placement, state_layer: int
    ) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        width = spec.width or hidden_size
        self.products = Linear(hidden_size, [3 * width], place, bias=spec.bias)
        self.weight = place.empty(width, spec.taps)
        self.bias = place.empty(width) if spec.bias else None
        self.convolution = ShortConvolution(self.weight, self.bias)
        self.out = Linear(width, [hidden_size], place, bias=spec.bias)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        product: Tensor = self.products(rows)
        before, behind, inputs = product.chunk(3, dim=-1)
        output: Tensor = self.out(behind * self.convolved(before * inputs, step).rows)
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        yield from self.products.slots([names.in_layer(name, self.layer) for name in names.mixer_in], copy)
        yield from convolution_slots(names.in_layer(names.convolution, self.layer), self.weight, self.bias, copy)
        yield from self.out.slots([names.in_layer(names.mixer_out, self.layer)], copy)


class GatedDeltaNet(StateLayer):
    """See `DeltaNetSpec`. Queries, keys, values and the output's gates are one product; betas and decays another."""

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, layer: int, place: Placement, state_layer: int) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        keys, values = spec.key_heads * spec.key_width, spec.heads * spec.value_width
        channels = 2 * keys + values
        self.products = Linear(hidden_size, [channels, values], place)
        self.gates = Linear(hidden_size, [spec.heads, spec.heads], place)
        self.weight = place.empty(channels, spec.taps)
        self.convolution = ShortConvolution(self.weight, silu=True)
        # In fp32: decays are powers of them.
        self.decay = place.empty(spec.heads, dtype=torch.float32)
        self.decay_bias = place.empty(spec.heads, dtype=torch.float32)
        self.norm = place.empty(spec.value_width)
        self.out = Linear(values, [hidden_size], place)
        self.layout = HeadsLayout(
            StateRule.DELTA, spec.key_heads, 0, keys, 2 * keys, normed=True, scaling=spec.key_width**-0.5
        )

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        spec = self.spec
        product: Tensor = self.products(rows)
        inputs, gate = product[:, : len(self.weight)], product[:, len(self.weight) :]
        gates = delta_gates(self.gates(rows), self.decay, self.decay_bias)
        mixed, _ = self.mixed(inputs, scaled_betas(gates, spec.beta_scale), step)
        output: Tensor = self.out(gated_heads(mixed, gate, self.norm, spec.epsilon))
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        yield from self._product_slots(names, copy)
        yield decay_slot(of(names.decay), self.decay, copy)
        yield in_place(of(names.decay_bias), self.decay_bias, copy)
        yield in_place(f"{of(names.mixer_norm)}.weight", self.norm, copy)
        yield from self.out.slots([of(names.mixer_out)], copy)

    def _product_slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Of the products and the convolution."""
        spec, keys = self.spec, self.spec.key_heads * self.spec.key_width
        of = partial(names.in_layer, layer=self.layer)
        group, values = spec.heads // spec.key_heads, spec.heads * spec.value_width
        yield from convolution_slots(of(names.convolution), self.weight, None, copy)
        if len(names.mixer_in) > 2:
            # Queries, keys, values and gates by themselves.
            rows = [keys, keys, values, values]
            yield from self.products.slots([of(name) for name in names.mixer_in], copy, parts=rows)
            yield from self.gates.slots([of(name) for name in names.mixer_gates], copy)
            return
        parts = [spec.key_width, spec.key_width, group * spec.value_width, group * spec.value_width]
        yield from _by_head(self.products, [of(name) for name in names.mixer_in], spec.key_heads, parts, copy)
        yield from _by_head(self.gates, [of(name) for name in names.mixer_gates], spec.key_heads, [group, group], copy)


class StateSpace(StateLayer):
    """See `StateSpaceSpec`. The output's gates, what is convolved and the tokens' steps are one product."""

    def __init__(self, spec: StateSpaceSpec, hidden_size: int, layer: int, place: Placement, state_layer: int) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        keys, values = spec.groups * spec.state_width, spec.heads * spec.value_width
        channels = values + 2 * keys
        self.products = Linear(hidden_size, [values, channels, spec.heads], place, bias=spec.bias)
        self.weight = place.empty(channels, spec.taps)
        self.bias = place.empty(channels) if spec.convolution_bias else None
        self.convolution = ShortConvolution(self.weight, self.bias, silu=True)
        # In fp32: decays are powers of them.
        self.decay = place.empty(spec.heads, dtype=torch.float32)
        self.decay_bias = place.empty(spec.heads, dtype=torch.float32)
        self.skip = place.empty(spec.heads, dtype=torch.float32)
        self.norm = place.empty(values) if spec.normed else None
        self.out = Linear(values, [hidden_size], place, bias=spec.bias)
        # Of the product's numbers.
        parts = zip(spec.part_scales, (values, values, keys, keys, spec.heads), strict=True)
        scales = torch.cat([torch.full((count,), scale, device=place.device) for scale, count in parts])
        self.register_buffer("_scales", scales if set(spec.part_scales) != {1.0} else None, persistent=False)
        self._scales: Tensor | None
        self.layout = HeadsLayout(StateRule.SUM, spec.groups, values + keys, values, 0)
        # Of ranks each has some groups of the heads that are normed together, or a part of one.
        ranks = place.ranks
        self.norm_ranks = ranks if spec.normed and ranks is not None and spec.norm_groups % ranks.size else None
        alone = self.norm_ranks is not None or not spec.normed
        groups = 1 if alone else spec.norm_groups // (1 if ranks is None else ranks.size)
        own = None if self.norm_ranks is not None else self.norm
        self.output = SpaceOutput(self.skip, own, spec.epsilon, groups)

    @property
    def is_usual(self) -> bool:
        """Whether nothing is scaled, and no norm reaches over ranks."""
        return self.norm_ranks is None and self._scales is None and self.spec.scale == 1.0

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        spec, channels = self.spec, len(self.weight)
        product: Tensor = self.products(rows)
        if self._scales is not None:
            product = (product * self._scales).to(rows.dtype)
        values = spec.heads * spec.value_width
        gate, inputs = product[:, :values], product[:, values : values + channels]
        gates = space_gates(product[:, values + channels :], self.decay, self.decay_bias, spec.step_limits)
        mixed, convolved = self.mixed(inputs, gates, step)
        gated = space_output(mixed, convolved[:, :values], gate, self.output)
        if self.norm_ranks is not None and self.norm is not None:
            normed = rms_over_ranks(gated, spec.epsilon, self.norm_ranks, spec.norm_groups)
            gated = self.norm * normed.to(rows.dtype)
        output: Tensor = self.out(gated)
        return output if spec.scale == 1.0 else output * spec.scale

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        yield from self.products.slots([of(name) for name in names.mixer_in], copy)
        yield from convolution_slots(of(names.convolution), self.weight, self.bias, copy)
        yield decay_slot(of(names.decay), self.decay, copy)
        yield in_place(of(names.decay_bias), self.decay_bias, copy)
        yield in_place(of(names.skip), self.skip, copy)
        if self.norm is not None:
            yield in_place(f"{of(names.mixer_norm)}.weight", self.norm, copy)
        yield from self.out.slots([of(names.mixer_out)], copy)


class LightningAttention(StateLayer):
    """See `LightningSpec`. Queries, keys, values and the output's gates are one product.

    SiLU is that of a convolution of one tap, whose weight is one.
    """

    def __init__(self, spec: LightningSpec, hidden_size: int, layer: int, place: Placement, state_layer: int) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        values = spec.heads * spec.width
        self.products = Linear(hidden_size, [3 * values, values], place)
        self.norm = place.empty(values)
        self.out = Linear(values, [hidden_size], place)
        self.layout = HeadsLayout(StateRule.SUM, spec.heads, 0, values, 2 * values)
        self.ranks = place.ranks
        ones = torch.ones(3 * values, 1, dtype=place.dtype, device=place.device)
        self.convolution = ShortConvolution(ones, silu=True)
        # Of every token: each head's decay, and a beta of one.
        gates = torch.tensor([*(-rate for rate in lightning_rates(spec, layer)), *[1.0] * spec.heads])
        self.register_buffer("_gates", gates.to(place.device), persistent=False)
        self._gates: Tensor

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        product: Tensor = self.products(rows)
        channels, epsilon = len(self.convolution.weight), self.spec.epsilon
        heads, _ = self.mixed(product[:, :channels], self._gates.repeat(len(rows), 1), step)
        mixed = heads.flatten(1)
        if self.ranks is None:
            normed = functional.rms_norm(mixed.float(), mixed.shape[-1:], None, epsilon)
        else:
            normed = rms_over_ranks(mixed, epsilon, self.ranks)
        gate = torch.sigmoid(product[:, channels:])
        output: Tensor = self.out(gate * (self.norm * normed.to(rows.dtype)))
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        # Published are each head's query, key and value beside one another.
        spec, values = self.spec, self.spec.heads * self.spec.width
        order = torch.arange(3 * values).view(spec.heads, 3, spec.width).transpose(0, 1).flatten()
        order = torch.cat([order, torch.arange(3 * values, 4 * values)])
        yield from self.products.slots([of(name) for name in names.mixer_in], copy, order)
        yield in_place(f"{of(names.mixer_norm)}.weight", self.norm, copy)
        yield from self.out.slots([of(names.mixer_out)], copy)


class KimiDeltaAttention(StateLayer):
    """See `KimiDeltaSpec`. Queries, keys, values, what both kinds of gates are made of, and betas are one product."""

    def __init__(self, spec: KimiDeltaSpec, hidden_size: int, layer: int, place: Placement, state_layer: int) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        values = spec.heads * spec.width
        self._parts = [3 * values, spec.width, spec.width, spec.heads]
        self.products = Linear(hidden_size, [values, values, values, *self._parts[1:]], place)
        self.decays, self.gates = (Linear(spec.width, [values], place) for _ in range(2))
        self.weight = place.empty(3 * values, spec.taps)
        self.convolution = ShortConvolution(self.weight, silu=True)
        # In fp32: decays are powers of them.
        self.decay = place.empty(spec.heads, dtype=torch.float32)
        self.decay_bias = place.empty(values, dtype=torch.float32)
        self.norm = place.empty(spec.width)
        self.out = Linear(values, [hidden_size], place)
        self.layout = HeadsLayout(
            StateRule.DELTA, spec.heads, 0, values, 2 * values, normed=True, scaling=spec.width**-0.5
        )

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        spec, product = self.spec, self.products(rows)
        inputs, of_decays, of_gates, betas = torch.split(product, self._parts, dim=-1)
        decays = functional.softplus(self.decays(of_decays).float() + self.decay_bias)
        decays = (decays.view(-1, spec.heads, spec.width) * self.decay[:, None]).flatten(1)
        mixed, _ = self.mixed(inputs, torch.cat([decays, betas.sigmoid().float()], dim=-1), step, keyed=True)
        normed = functional.rms_norm(mixed.float(), mixed.shape[-1:], self.norm.float(), spec.epsilon)
        gated = normed.flatten(1) * torch.sigmoid(self.gates(of_gates).float())
        output: Tensor = self.out(gated.to(rows.dtype))
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        yield from self.products.slots([of(name) for name in names.mixer_in], copy)
        for product, name in zip((self.decays, self.gates), names.mixer_gates, strict=True):
            yield from product.slots([of(name)], copy)
        yield from convolution_slots(of(names.convolution), self.weight, None, copy)
        yield decay_slot(of(names.decay), self.decay.view(1, 1, -1, 1), copy)
        yield in_place(of(names.decay_bias), self.decay_bias, copy)
        yield in_place(f"{of(names.mixer_norm)}.weight", self.norm, copy)
        yield from self.out.slots([of(names.mixer_out)], copy)


def lightning_rates(spec: LightningSpec, layer: int) -> list[float]:
    """By head the rate at which a state of a layer, counted from 0, decays with each token."""
    share = 1 - layer / (spec.layers - 1 + 1e-5) + 1e-5
    return [2 ** (-8 * (spec.first_head + head + 1) / spec.all_heads) * share for head in range(spec.heads)]


def scaled_betas(gates: Tensor, scale: float) -> Tensor:
    """Gates [R, 2 * H] with their betas, the second half, times `scale`, in their memory."""
    if scale != 1.0:
        gates[:, gates.shape[1] // 2 :].mul_(scale)
    return gates


def state_shape(spec: RecurrentSpec, hidden_size: int) -> StateShape:
    """What a layer keeps of a sequence."""
    if isinstance(spec, GatedConvolutionSpec):
        return StateShape(spec.width or hidden_size, spec.taps)
    if isinstance(spec, MatrixMemorySpec):
        # One more number of each value is one: so is what a head divides by kept.
        keys, values = spec.heads * spec.key_width, spec.heads * (spec.value_width + 1)
        return StateShape(2 * keys + values, 1, spec.heads, spec.key_width, spec.value_width + 1)
    if isinstance(spec, LightningSpec):
        return StateShape(3 * spec.heads * spec.width, 1, spec.heads, spec.width, spec.width)
    if isinstance(spec, KimiDeltaSpec):
        return StateShape(3 * spec.heads * spec.width, spec.taps, spec.heads, spec.width, spec.width, keyed=True)
    if isinstance(spec, GriffinSpec):
        of = spec.channels
        return StateShape(of, spec.taps, of, 1, 1, selective=True, key_groups=of)
    if isinstance(spec, SelectiveSpec):
        of = spec.channels
        return StateShape(of, spec.taps, of, spec.state_width, 1, selective=True, key_groups=max(spec.heads, 1))
    values = spec.heads * spec.value_width
    if isinstance(spec, StateSpaceSpec):
        channels = values + 2 * spec.groups * spec.state_width
        return StateShape(channels, spec.taps, spec.heads, spec.state_width, spec.value_width)
    channels = 2 * spec.key_heads * spec.key_width + values
    return StateShape(channels, spec.taps, spec.heads, spec.key_width, spec.value_width)


def _by_head(
    product: Linear, names: Sequence[str], heads: int, parts: Sequence[int], copy: Copy
) -> Iterator[WeightSlot]:
    """Slots of a product's tensors. Where there is one for all, it has for each head its rows of every part."""
    if len(names) > 1:
        return product.slots(names, copy)
    each, ends = torch.arange(heads * sum(parts)).view(heads, -1), [0, *itertools.accumulate(parts)]
    order = torch.cat([each[:, start:end].flatten() for start, end in itertools.pairwise(ends)])
    return product.slots(names, copy, order)


def decay_slot(name: str, memory: Tensor, copy: Copy) -> WeightSlot:
    """The slot of decays. Published is the logarithm of what is multiplied with."""

    def write(tensors: Sequence[Tensor]) -> None:
        (logarithm,) = tensors
        copy(memory, -logarithm.exp())

    return WeightSlot({name: TensorSpec(tuple(memory.shape), torch.float32)}, write)


def convolution_slots(name: str, weight: Tensor, bias: Tensor | None, copy: Copy) -> Iterator[WeightSlot]:
    """Slots of a short convolution's weight [C, K] and bias [C]."""
    yield in_place(f"{name}.weight", weight.view(len(weight), 1, -1), copy)
    if bias is not None:
        yield in_place(f"{name}.bias", bias, copy)
