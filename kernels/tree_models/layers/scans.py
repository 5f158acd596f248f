"""Layers whose channels have states of their own in place of keys and values: Mamba's selective scan, and Griffin's
gated linear recurrence. xLSTM's matrix memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.recurrence import HeadsLayout, ShortConvolution, StateRule
from tree_models.layers.linear import BlockLinear, Linear
from tree_models.layers.mlp import FUNCTIONS
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass
from tree_models.layers.placing import Placement
from tree_models.layers.recurrent import (
    GatedConvolution,
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    StateLayer,
    StateSpace,
    convolution_slots,
    decay_slot,
)
from tree_models.layers.rotary import Angles
from tree_models.names import WeightNames
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place
from tree_models.spec import (
    DeltaNetSpec,
    GatedConvolutionSpec,
    GriffinSpec,
    KimiDeltaSpec,
    LightningSpec,
    MatrixMemorySpec,
    SelectiveSpec,
    StateSpaceSpec,
)


class SelectiveScan(StateLayer):
    """See `SelectiveSpec`. Values and the output's gates are one product."""

    def __init__(self, spec: SelectiveSpec, hidden_size: int, layer: int, place: Placement, state_layer: int) -> None:
        super().__init__(layer, state_layer)
        self.spec, self.ranks = spec, place.ranks
        self.products = Linear(hidden_size, [spec.channels, spec.channels], place, bias=spec.bias)
        self.weight = place.empty(spec.channels, spec.taps)
        self.bias = place.empty(spec.channels) if spec.convolution_bias else None
        self.convolution = ShortConvolution(self.weight, self.bias, silu=True)
        own = [spec.step_rank, spec.state_width, spec.state_width]
        self.selection: Linear | BlockLinear
        self.steps: Linear | BlockLinear
        if spec.heads:
            width = spec.channels // spec.heads
            self.selection = BlockLinear(spec.heads, width, own, place, bias=False)
            self.steps = BlockLinear(spec.heads, spec.step_rank, [width], place, bias=False)
        else:
            self.selection = Linear(spec.channels, [sum(own)], place)
            self.steps = Linear(spec.step_rank, [spec.channels], place)
        self._parts = [max(spec.heads, 1) * width for width in own]
        self.norms = nn.ModuleList(
            Normalization(spec.norm, width, place) for width in self._parts if spec.norm is not None
        )
        # In fp32: decays are powers of them.
        self.step_bias = place.empty(spec.channels, dtype=torch.float32)
        self.decay = place.empty(spec.channels, spec.state_width, dtype=torch.float32)
        self.skip = place.empty(spec.channels, dtype=torch.float32)
        self.out = Linear(spec.channels, [hidden_size], place, bias=spec.bias)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        product: Tensor = self.products(rows)
        inputs, gate = product.chunk(2, dim=-1)
        convolved = self.convolved(inputs, step)
        selected: Tensor = self.selection(convolved.rows)
        if self.ranks is not None and not self.spec.heads:
            # Of all ranks' channels.
            selected = self.ranks.summed(selected)
        parts: tuple[Tensor, ...] = torch.split(selected, self._parts, dim=-1)
        if self.norms:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        steps = functional.softplus(self.steps(parts[0]).float() + self.step_bias)
        gates, queries = torch.cat([steps, parts[1].float()], dim=-1), parts[2].float().contiguous()
        scanned = self.scanned(convolved, gates, queries, self.decay, step)
        scanned = (scanned + self.skip * convolved.rows.float()) * functional.silu(gate.float())
        output: Tensor = self.out(scanned.to(rows.dtype))
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of, channels = partial(names.in_layer, layer=self.layer), self.spec.channels
        if self.spec.heads:
            # Published is each channel's value beside its gate.
            order = torch.arange(2 * channels).view(channels, 2).t().flatten()
            yield from self.products.slots([of(name) for name in names.mixer_in], copy, order)
        else:
            yield from self.products.slots([of(name) for name in names.mixer_in], copy)
        yield from convolution_slots(of(names.convolution), self.weight, self.bias, copy)
        yield from self.selection.slots([of(names.selection)], copy)
        for norm, name in zip(self.norms, names.selection_norms, strict=False):
            assert isinstance(norm, Normalization)
            yield from norm.slots(of(name), copy)
        yield from self.steps.slots([of(names.steps)], copy)
        # Of each head by itself.
        heads, suffix = ((self.spec.heads, -1), "_bias") if self.spec.heads else ((-1,), ".bias")
        yield in_place(f"{of(names.steps)}{suffix}", self.step_bias.view(heads), copy)
        yield decay_slot(of(names.decay), self.decay.view(*heads, self.spec.state_width), copy)
        yield in_place(of(names.skip), self.skip.view(heads), copy)
        yield from self.out.slots([of(names.mixer_out)], copy)


class GriffinRecurrence(StateLayer):
    """See `GriffinSpec`. What is convolved and the output's gates are one product.

    A selective scan with a key for each channel: with a decay rate c < 0 of its own, a step r and a gate i, its state
    becomes exp(r * c) S + sqrt(1 - exp(2 * r * c)) * i * value, without the root at a text's first token.
    """

    def __init__(self, spec: GriffinSpec, hidden_size: int, layer: int, place: Placement, state_layer: int) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        self.products = Linear(hidden_size, [spec.channels, spec.channels], place, bias=True)
        self.weight, self.bias = place.empty(spec.channels, spec.taps), place.empty(spec.channels)
        self.convolution = ShortConvolution(self.weight, self.bias)
        width = spec.channels // spec.blocks
        self.gates = BlockLinear(spec.blocks, width, [width, width], place)
        # In fp32: decays are powers of them.
        self.decay = place.empty(spec.channels, dtype=torch.float32)
        self.out = Linear(spec.channels, [hidden_size], place, bias=True)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        assert angles is not None, "positions are known by them"
        product: Tensor = self.products(rows)
        inputs, gate = product.chunk(2, dim=-1)
        convolved = self.convolved(inputs, step)
        entering, steps = self.gates(convolved.rows).float().sigmoid().chunk(2, dim=-1)
        # What is added is then still finite in fp32.
        steps = steps.clamp(min=1e-20)
        factors = torch.sqrt(1 - torch.exp(2 * steps * self.decay))
        # No other whole number of radians has no sine.
        factors = torch.where(angles.sines[:, :1] == 0, 1.0, factors)
        gates = torch.cat([steps, entering * factors / steps], dim=-1)
        scanned = self.scanned(convolved, gates, torch.ones_like(steps), self.decay[:, None], step)
        output: Tensor = self.out(scanned.to(rows.dtype) * FUNCTIONS[self.spec.activation](gate))
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)

        def write(tensors: Sequence[Tensor]) -> None:
            (tensor,) = tensors
            copy(self.decay, -8.0 * functional.softplus(tensor))

        yield from self.products.slots([of(name) for name in names.mixer_in], copy)
        yield from convolution_slots(of(names.convolution), self.weight, self.bias, copy)
        yield from self.gates.slots([of(name) for name in names.mixer_gates], copy)
        yield WeightSlot({of(names.decay): TensorSpec(tuple(self.decay.shape), torch.float32)}, write)
        yield from self.out.slots([of(names.mixer_out)], copy)


class MatrixMemory(StateLayer):
    """See `MatrixMemorySpec`. Queries, keys, values and the output's gates are one product, and so are both gates of
    the state.

    transformers divides states by their largest gate so far, which changes no output but by the 1e-6 that it adds to
    the divisor; the norm behind takes that out again.
    """

    def __init__(
        self, spec: MatrixMemorySpec, hidden_size: int, layer: int, place: Placement, state_layer: int
    ) -> None:
        super().__init__(layer, state_layer)
        self.spec = spec
        keys, values = spec.heads * spec.key_width, spec.heads * spec.value_width
        self._parts = [2 * keys, values, values]
        self.products = Linear(hidden_size, [keys, keys, values, values], place)
        self.gates = Linear(hidden_size, [spec.heads, spec.heads], place, bias=True)
        self.norm = place.empty(values)
        self.out = Linear(values, [hidden_size], place)
        self.layout = HeadsLayout(StateRule.SUM, spec.heads, 0, keys, 2 * keys, scaling=spec.key_width**-0.5)
        ones = torch.ones(2 * keys + values + spec.heads, 1, dtype=place.dtype, device=place.device)
        self.convolution = ShortConvolution(ones)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        del angles
        spec, width = self.spec, (self.spec.value_width,)
        turned, values, opening = torch.split(self.products(rows), self._parts, dim=-1)
        counted = functional.pad(values.unflatten(1, (spec.heads, -1)), (0, 1), value=1.0)  # type: ignore[no-untyped-call]
        adding, keeping = (spec.gate_cap * torch.tanh(self.gates(rows).float() / spec.gate_cap)).chunk(2, dim=-1)
        gates = torch.cat([functional.logsigmoid(keeping), adding.exp()], dim=-1)
        heads, _ = self.mixed(torch.cat([turned, counted.flatten(1)], dim=-1), gates, step)
        mixed = heads.float()
        read = mixed[..., :-1] / mixed[..., -1:].abs().clamp(min=1.0)
        normed = functional.layer_norm(read, width, None, None, spec.epsilon).to(rows.dtype).flatten(1)
        output: Tensor = self.out(torch.sigmoid(opening) * (self.norm * normed))
        return output

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        yield from self.products.slots([of(name) for name in names.mixer_in], copy)
        yield from self.gates.slots([of(name) for name in names.mixer_gates], copy)
        yield in_place(f"{of(names.mixer_norm)}.weight", self.norm, copy)
        yield from self.out.slots([of(names.mixer_out)], copy)


# By their descriptions.
STATE_LAYERS: dict[type, Callable[..., StateLayer]] = {
    DeltaNetSpec: GatedDeltaNet,
    GatedConvolutionSpec: GatedConvolution,
    GriffinSpec: GriffinRecurrence,
    KimiDeltaSpec: KimiDeltaAttention,
    LightningSpec: LightningAttention,
    MatrixMemorySpec: MatrixMemory,
    SelectiveSpec: SelectiveScan,
    StateSpaceSpec: StateSpace,
}
