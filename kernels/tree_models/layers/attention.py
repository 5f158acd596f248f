"""Grouped-query attention, and compressed convolutional attention (CCA, arXiv 2510.04476), as ZAYA has it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.attention import AttentionVariant
from tree_kernels.linear import Activation, ActivationKind
from tree_kernels.linear.layers import activated
from tree_kernels.recurrence import ShortConvolution, StateShape
from tree_models.layers.linear import Adapter, Linear
from tree_models.layers.norm import HeadNorm, Normalization
from tree_models.layers.paged import PagedPass, UncachedPass, attend, cache_keys
from tree_models.layers.placing import Placement
from tree_models.layers.recurrent import StateLayer
from tree_models.layers.rotary import Angles, halves_order, rotate_heads, scaled_queries
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, in_place, rearranged
from tree_models.spec import AttentionSpec, FamilyRefused

# Tokens that a convolved query or key is of: two convolutions of two taps each.
_TAPS = 3


class OutputGate(nn.Module):
    """See `OutputGateSpec`: rows [R, H] -> [R, Hq, Dv], or [R, Hq, 1] with a number for each head."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        assert spec.output_gate is not None, "made where there is one"
        self._shape = spec.heads, 1 if spec.output_gate.per_head else spec.width_of_values
        self.launched = Activation(ActivationKind(spec.output_gate.activation))
        self.product = Linear(hidden_size, [prod(self._shape)], place)

    def forward(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, Hq, Dv or 1]."""
        product: Tensor = self.product(rows)
        return activated(product.float(), self.launched).to(rows.dtype).view(-1, *self._shape)


class HeadPairs(nn.Module):
    """See `AttentionSpec.differential` (arXiv 2410.05258)."""

    def __init__(self, spec: AttentionSpec, place: Placement) -> None:
        super().__init__()
        assert spec.differential is not None, "made where there are pairs"
        self._begin, self._epsilon = spec.differential, spec.pair_epsilon
        self.lambdas = place.empty(4, spec.head_width)

    def values(self, value: Tensor) -> Tensor:
        """[R, Hkv, 2 * D]: of values [R, Hkv, D] those of both halves side by side, twice."""
        return torch.cat(value.chunk(2, dim=1), dim=-1).repeat(1, 2, 1)

    def outputs(self, attended: Tensor) -> Tensor:
        """[R, Hq / 2, 2 * D] of what heads attended to [R, Hq, 2 * D]."""
        first, second = attended.chunk(2, dim=1)
        of_queries, of_keys = self.lambdas[::2].float(), self.lambdas[1::2].float()
        one, other = (of_queries * of_keys).sum(-1).exp().to(attended.dtype)
        mixed = first - (one - other + self._begin) * second
        return (1 - self._begin) * functional.rms_norm(mixed, mixed.shape[-1:], None, self._epsilon)


class HeadAttention(nn.Module):
    """See `AttentionSpec`. Gates, queries, keys and values are one product, in this order."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        layer: int,
        place: Placement,
        cache_layer: int | None = None,
        read_vectors: int = 1,
    ) -> None:
        """`cache_layer` counts layers with keys and values, if others have none; see `LayerSpec.read_vectors`."""
        super().__init__()
        self.spec, self.layer = spec, layer
        self.cache_layer = layer if cache_layer is None else cache_layer
        width, values = spec.head_width, spec.width_of_values
        # Of keys of its own.
        self._keys = spec.kv_heads if spec.has_keys else 0
        parts = [(2 * spec.heads if spec.gated else spec.heads) * width]
        if self._keys:
            parts += [self._keys * width] if spec.keys_are_values else [self._keys * width, self._keys * values]
        self.qkv = Linear(read_vectors * hidden_size, parts, place, bias=spec.qkv_bias)
        self.out = Linear(spec.heads * values, [hidden_size], place, bias=spec.out_bias)
        norm = spec.head_norm
        self.query_norm = HeadNorm(norm, spec.heads, width, place) if norm else None
        self.key_norm = HeadNorm(norm, spec.kv_heads, width, place) if norm and self._keys else None
        self.value_norm = Normalization(spec.value_norm, values, place) if spec.value_norm and self._keys else None
        self.output_gate = OutputGate(spec, hidden_size, place) if spec.output_gate else None
        self.sinks = place.empty(spec.heads, dtype=torch.float32) if spec.sinks else None
        self.pairs = HeadPairs(spec, place) if spec.differential is not None else None
        self.adapter: Adapter | None = None  # of the first product
        slopes = torch.tensor(spec.slopes, dtype=torch.float32, device=place.device) if spec.slopes else None
        self.variant = AttentionVariant(spec.window, spec.score_cap, self.sinks, spec.chunked, slopes)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass | UncachedPass) -> Tensor:
        """[R, read_vectors * H] -> [R, H]. `angles` are None where the layer embeds no positions."""
        query, key, value, gate = self._attending(rows, angles)
        attended = attend(self, query, key, value, step)
        if self.pairs is not None:
            attended = self.pairs.outputs(attended)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        if self.output_gate is not None:
            attended = attended * self.output_gate(rows)
        output: Tensor = self.out(attended.flatten(1))
        return output

    def cache_rows(self, rows: Tensor, angles: Angles | None, step: PagedPass) -> None:
        """Write the keys and values of rows [R, read_vectors * H] as `forward` does, and attend to none."""
        _, key, value, _ = self._attending(rows, angles)
        cache_keys(self, key, value, step)

    def _attending(self, rows: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [R, Hq, D], keys [R, Hkv, D] and values [R, Hkv, Dv] as they attend, and gates of the output."""
        spec = self.spec
        product: Tensor = self.qkv(rows)
        rotating, value, gate = self._heads(product if self.adapter is None else product + self.adapter(rows))
        late = spec.head_norm is not None and spec.head_norm.after_rotary
        rotating = rotating if late else self._normed(rotating)
        if self.value_norm is not None:
            value = self.value_norm(value)
        if spec.value_scale != 1.0:
            value = value * spec.value_scale
        if spec.clip is not None:
            rotating, value = rotating.clamp(-spec.clip, spec.clip), value.clamp(-spec.clip, spec.clip)
        if angles is not None:
            rotating = rotate_heads(rotating, angles)
        rotating = self._normed(rotating) if late else rotating
        query, key = rotating[:, : spec.heads], rotating[:, spec.heads :]
        if angles is not None and angles.query_scale is not None:
            query = scaled_queries(query, angles.query_scale)
        if angles is not None and angles.place_keys is not None:
            query = functional.pad(query, (0, 1), value=1.0)
            key = torch.cat([key, angles.place_keys[..., None].to(key.dtype)], dim=-1)
        if self.pairs is not None:
            value = self.pairs.values(value)
        return query, key, value, gate

    def _normed(self, heads: Tensor) -> Tensor:
        """Queries and keys [R, heads, D], each normed where the layer does that."""
        if self.query_norm is None:
            return heads
        query = self.query_norm(heads[:, : self.spec.heads])
        return query if self.key_norm is None else torch.cat([query, self.key_norm(heads[:, self.spec.heads :])], dim=1)

    def _heads(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys [R, heads, D], values [R, Hkv, Dv] and gates [R, Hq, D] of the product [R, ..]. Without keys
        of its own the layer has queries alone, and no values."""
        spec, count = self.spec, len(product)
        queries = 2 * spec.heads if spec.gated else spec.heads
        turning = (queries + self._keys) * spec.head_width
        heads, gate = product[:, :turning].view(count, -1, spec.head_width), None
        values = (
            heads[:, queries:]
            if spec.keys_are_values
            else product[:, turning:].view(count, self._keys, spec.width_of_values)
        )
        if spec.gated:
            gate, heads = heads[:, : spec.heads], heads[:, spec.heads :]
        return heads, values, gate

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        spec, layer = self.spec, self.layer
        order = self._order(names)
        # One name is of all parts.
        published = names.qkv if len(names.qkv) == 1 else names.qkv[: len(self.qkv.parts)]
        yield from self.qkv.slots([names.in_layer(name, layer) for name in published], copy, order)
        yield from self.out.slots([names.in_layer(names.out, layer)], copy)
        if self.output_gate is not None:
            yield from self.output_gate.product.slots([names.in_layer(names.output_gate, layer)], copy)
        if self.pairs is not None:
            for name, numbers in zip(names.lambdas, self.pairs.lambdas, strict=True):
                yield in_place(names.in_layer(name, layer), numbers, copy)
        if self.sinks is not None:
            yield in_place(names.in_layer(names.sinks, layer), self.sinks, copy)
        norms = (self.query_norm, names.query_norm, spec.heads), (self.key_norm, names.key_norm, spec.kv_heads)
        for norm, name, heads in norms:
            if norm is not None:
                within = halves_order(spec.rotary, heads, spec.head_width)
                yield from norm.slots(names.in_layer(name, layer), copy, within)

    def _order(self, names: WeightNames) -> Tensor | None:
        """Of the rows of gates, queries, keys and values; see `halves_order`. Each head's published query and gate are
        neighbours."""
        spec, rows = self.spec, torch.arange(sum(self.qkv.parts))
        if spec.gated:
            if spec.rotary is not None and spec.rotary.interleaved:
                raise FamilyRefused("neighbouring pairs are not rotated beside gates")
            queries, gates = torch.arange(2 * spec.heads * spec.head_width).view(spec.heads, 2, -1).unbind(1)
            return torch.cat([gates.flatten(), queries.flatten(), rows[2 * queries.numel() :]])
        rotating = halves_order(spec.rotary, spec.heads + self._keys, spec.head_width)
        if rotating is not None and spec.keys_are_values:
            raise FamilyRefused("neighbouring pairs of keys that are values are not rotated")
        if spec.shards:
            queries, values, keys = rows.view(spec.shards, 3, -1).unbind(1)
            order = torch.cat([part.flatten() for part in (queries, keys, values)])
        elif names.qkv_by_group:
            groups = rows.view(spec.kv_heads, -1, spec.head_width)
            order = torch.cat([part.flatten() for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])
        else:
            return None if rotating is None else torch.cat([rotating, rows[len(rotating) :]])
        return order if rotating is None else torch.cat([order[rotating], order[len(rotating) :]])


def compressed_shape(spec: AttentionSpec) -> StateShape:
    """What a layer keeps of a sequence beside keys and values."""
    rotating, values = _channels(spec)
    return StateShape(2 * rotating + values, _TAPS)


def _channels(spec: AttentionSpec) -> tuple[int, int]:
    """Numbers of queries and keys together, and of values that are of the token before."""
    values = spec.kv_heads * spec.head_width
    return (spec.heads + spec.kv_heads) * spec.head_width, values if spec.compressed == "sums" else values // 2


class CompressedAttention(StateLayer):
    """See `AttentionSpec.compressed`. Symbols: G query and key heads together, D their width.

    Queries and keys go through two convolutions of two taps, the first of each number by itself, the second of each
    head. The first one's outputs for a token and for the one before are both outputs of one convolution of three taps,
    and so is the value of the token before: all of them are one call over a tree's ancestors. What the second makes of
    the two is added to a query and its key averaged, and each head is normed; keys are then scaled.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        layer: int,
        place: Placement,
        cache_layer: int,
        state_layer: int,
    ) -> None:
        """`cache_layer` counts layers with keys and values."""
        super().__init__(layer, state_layer)
        if spec.kv_heads * spec.head_width % 2 or spec.qkv_bias or spec.out_bias:
            raise FamilyRefused("compressed attention with biases is not served")
        self.spec, self.cache_layer = spec, cache_layer
        self.variant = AttentionVariant(spec.window)
        rotating, half = _channels(spec)
        count = spec.heads + spec.kv_heads
        # Queries, keys, and the halves of values that are of the token and of the one before.
        parts = [spec.heads * spec.head_width, spec.kv_heads * spec.head_width, half, half]
        self.products = Linear(hidden_size, parts, place)
        # Of the first convolution for the token before, the same for the token, and of values of the token before.
        self.weight = place.empty(2 * rotating + half, _TAPS)
        self.weight.data[2 * rotating :] = torch.tensor([0.0, 1.0, 0.0], device=place.device)
        self.bias = place.empty(2 * rotating + half)
        self.bias.data[2 * rotating :] = 0.0
        self.convolution = ShortConvolution(self.weight, self.bias)
        self.mixing = place.empty(count, spec.head_width, 2 * spec.head_width)
        self.mixing_bias = place.empty(count, spec.head_width)
        self.key_scales = place.empty(spec.kv_heads)
        self.out = Linear(spec.heads * spec.head_width, [hidden_size], place)

    def forward(self, rows: Tensor, angles: Angles | None, step: PagedPass | UncachedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        assert isinstance(step, PagedPass) and angles is not None, "states are those of a pass"
        spec = self.spec
        product: Tensor = self.products(rows)
        rotating, half = _channels(spec)
        heads, current, delayed = torch.split(product, [rotating, half, half], dim=-1)
        convolved = self.convolved(torch.cat([heads, heads, delayed], dim=-1), step).rows
        before = convolved[:, 2 * rotating :]
        both = current + before if spec.compressed == "sums" else torch.cat([current, before], dim=-1)
        value = both.view(len(rows), spec.kv_heads, -1)
        turned = rotate_heads(self._normed(heads, convolved[:, : 2 * rotating]), angles)
        attended = attend(self, turned[:, : spec.heads], turned[:, spec.heads :], value, step)
        output: Tensor = self.out(attended.flatten(1))
        return output

    def _normed(self, heads: Tensor, convolved: Tensor) -> Tensor:
        """Queries and keys [R, G, D] of their products [R, G * D] and of both outputs [R, 2 * G * D] of the first
        convolution, those for the token before in front."""
        spec, width = self.spec, self.spec.head_width
        both = convolved.view(len(heads), 2, -1, width).permute(2, 0, 1, 3).flatten(2)
        mixed = torch.baddbmm(self.mixing_bias[:, None], both, self.mixing.transpose(1, 2)).transpose(0, 1)
        query, key = torch.split(heads.view(len(heads), -1, width), [spec.heads, spec.kv_heads], dim=1)
        group = spec.heads // spec.kv_heads
        query = (query + key.repeat_interleave(group, dim=1)) * 0.5
        key = query.view(len(heads), spec.kv_heads, group, width).mean(dim=2)
        # Keeps a norm of nothing finite; transformers limits the length of a head from below instead.
        normed = functional.rms_norm(mixed + torch.cat([query, key], dim=1), (width,), None, 1e-20)
        scaled = normed[:, spec.heads :] * self.key_scales[:, None]
        return torch.cat([normed[:, : spec.heads], scaled], dim=1)

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        of = partial(names.in_layer, layer=self.layer)
        rotating, _ = _channels(self.spec)
        count, width, _ = self.mixing.shape
        yield from self.products.slots([of(name) for name in names.qkv], copy)
        first, second = of(names.convolution), of(names.head_convolution)
        weight, bias = self.weight[: 2 * rotating], self.bias[: 2 * rotating]
        yield rearranged(f"{first}.weight", (rotating, 1, 2), weight, _of_both_tokens, copy)
        yield rearranged(f"{first}.bias", (rotating,), bias, lambda one: one.repeat(2), copy)
        by_tap = partial(_by_tap, count)
        yield rearranged(f"{second}.weight", (rotating, width, 2), self.mixing, by_tap, copy)
        yield in_place(f"{second}.bias", self.mixing_bias.view(-1), copy)
        yield in_place(of(names.key_norm), self.key_scales, copy)
        yield from self.out.slots([of(names.out)], copy)


def _of_both_tokens(weight: Tensor) -> Tensor:
    """[2 * C, 3] of a convolution [C, 1, 2]: for the token before, and for the token."""
    before, now = functional.pad(weight[:, 0], (0, 1)), functional.pad(weight[:, 0], (1, 0))
    return torch.cat([before, now])


def _by_tap(heads: int, weight: Tensor) -> Tensor:
    """[heads, D, 2 * D] of a convolution [heads * D, D, 2]: inputs of the token before in front."""
    parts: Tensor = weight.unflatten(0, (heads, -1))  # type: ignore[no-untyped-call]
    return parts.transpose(2, 3).flatten(2)
