"""Grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.attention import AttentionVariant
from tree_kernels.linear import Activation, ActivationKind
from tree_kernels.linear.layers import activated
from tree_models.layers.linear import Adapter, Linear
from tree_models.layers.norm import HeadNorm, Normalization
from tree_models.layers.paged import PagedPass, UncachedPass, attend, cache_keys
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import Angles, halves_order, rotate_heads, scaled_queries
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, in_place
from tree_models.spec import AttentionSpec, FamilyRefused


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
        self._keys = spec.kv_heads if spec.keys_of is None else 0
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
