"""What Gemma 3n and 4 carry beside hidden rows: a vector of each token for each layer, made of the token and of its
embedding, and added in the layer. And of 3n alone alternating updates (AltUp, arXiv 2301.13310): several streams of
hidden rows [R, N, H] of which a layer computes the first, and predicts and corrects all; and learned augmented
residuals (LAuReL, arXiv 2411.07501). The blocks that layers of Zamba share, which read embedded rows too. And what
ModernBERT's decoder has between its last norm and its head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from tree_models.decoder_spec import HeadTransformSpec
from tree_models.layers.attention import HeadAttention
from tree_models.layers.linear import Adapter, Linear
from tree_models.layers.mlp import FUNCTIONS, MLP
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass, UncachedPass
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import Angles
from tree_models.names import WeightNames
from tree_models.rank_group import looked_up
from tree_models.slots import Copy, WeightSlot, in_place
from tree_models.spec import (
    AddedInputSpec,
    AttentionSpec,
    LaurelSpec,
    LayerInputsSpec,
    SharedBlockSpec,
    StreamsSpec,
)


class LayerInputs(nn.Module):
    """See `LayerInputsSpec`. What is looked up by the token lies beside the embedding, of which it is no part."""

    def __init__(self, spec: LayerInputsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self._shape, self._ranks, self._known = (spec.layers, spec.width), place.ranks, spec.known
        self.table = place.empty(spec.vocabulary_size, spec.layers * spec.width)
        self.projection = Linear(hidden_size, [spec.layers * spec.width], place)
        self.norm = Normalization(spec.norm, spec.width, place)
        # Rounded as the rows are.
        self._scale = float(torch.tensor(spec.width**0.5, dtype=place.dtype))
        self._projection_scale = hidden_size**-0.5

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[R, layers, width] of token ids [R] and their embeddings [R, H]."""
        if self._known is not None:
            token_ids = torch.where(token_ids < self._known, token_ids, 0)
        own = looked_up(self.table, token_ids, self._ranks) * self._scale
        projected: Tensor = self.projection(embedded) * self._projection_scale
        normed: Tensor = self.norm(projected.view(-1, *self._shape))
        return (normed + own.view_as(normed)) * 2**-0.5

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        yield in_place(f"{names.layer_inputs}.weight", self.table, copy)
        yield from self.projection.slots([names.layer_inputs_projection], copy)
        yield from self.norm.slots(names.layer_inputs_norm, copy)


class AddedInput(nn.Module):
    """See `AddedInputSpec`: hidden rows [R, H] and a layer's vectors [R, W] -> [R, H]."""

    def __init__(self, spec: AddedInputSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate = Linear(hidden_size, [spec.width], place)
        self.projection = Linear(spec.width, [hidden_size], place)
        self.norm = Normalization(spec.norm, hidden_size, place)

    def forward(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        """[R, H], what is added."""
        added: Tensor = self.norm(self.projection(FUNCTIONS[self.activation](self.gate(hidden)) * vectors))
        return added

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        yield from self.gate.slots([names.in_layer(names.input_gate, layer)], copy)
        yield from self.projection.slots([names.in_layer(names.input_projection, layer)], copy)
        yield from self.norm.slots(names.in_layer(names.input_norm, layer), copy)


class HeadTransform(nn.Module):
    """See `HeadTransformSpec`: [.., H] -> [.., H]."""

    def __init__(self, spec: HeadTransformSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.activation = spec.activation
        self.product = Linear(hidden_size, [hidden_size], place, bias=spec.bias)
        self.norm = Normalization(spec.norm, hidden_size, place)

    def forward(self, rows: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        transformed: Tensor = self.norm(FUNCTIONS[self.activation](self.product(rows)))
        return transformed

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        yield from self.product.slots([names.head_transform], copy)
        yield from self.norm.slots(names.head_norm, copy)


class StreamEnds(nn.Module):
    """What makes streams of embedded rows, and rows of streams."""

    def __init__(self, spec: StreamsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        others = range(1, spec.count)
        self.spreading: nn.ModuleList = nn.ModuleList(Linear(hidden_size, [hidden_size], place) for _ in others)
        self.joining: nn.ModuleList = nn.ModuleList(Linear(hidden_size, [hidden_size], place) for _ in others)

    def spread(self, rows: Tensor) -> Tensor:
        """[R, N, H] of rows [R, H], which are the first stream; the others are products of them, as large."""
        return torch.stack([rows, *(_as_large(product(rows), rows) for product in self.spreading)], dim=1)

    def joined(self, streams: Tensor) -> Tensor:
        """[R, H] of streams [R, N, H]: the mean of the first and of products of the others, as large."""
        first, *others = streams.unbind(1)
        made = [_as_large(product(own), first) for product, own in zip(self.joining, others, strict=True)]
        return torch.stack([first, *made]).mean(0)

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        ends = (self.spreading, names.stream_spreading), (self.joining, names.stream_joining)
        for products, name in ends:
            for place, product in enumerate(products):
                assert isinstance(product, Linear)
                yield from product.slots([f"{name}.{place}"], copy)


class AlternatingUpdates(nn.Module):
    """See `StreamsSpec`: what a layer does with streams around its own computation."""

    def __init__(self, spec: StreamsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.spec = spec
        self.router_norm = Normalization(spec.norm, hidden_size, place)
        self.router = Linear(hidden_size, [spec.count], place)
        self.predictions = Linear(spec.count, [spec.count**2], place)
        self.corrections = Linear(spec.count, [spec.count], place)
        self.scale = place.empty(hidden_size)
        self._router_scale = 1.0 / hidden_size

    def predicted(self, streams: Tensor) -> Tensor:
        """[R, N, H] of streams [R, N, H]."""
        count = self.spec.count
        mixing: Tensor = self.predictions(self._routed(streams[:, 0]))
        return streams + torch.bmm(mixing.view(-1, count, count), streams)

    def corrected(self, predicted: Tensor, made: Tensor) -> Tensor:
        """[R, N, H] of predicted streams [R, N, H] and what the layer made [R, H] of the first."""
        shares: Tensor = self.corrections(self._routed(made)) + 1.0
        return predicted + shares[:, :, None] * (made - predicted[:, 0])[:, None]

    def read_by_input(self, streams: Tensor) -> Tensor:
        """[R, H] of streams, what an added input's gate reads."""
        return streams[:, 0] * self.scale if self.spec.scaled else streams[:, 0]

    def with_added(self, streams: Tensor, added: Tensor) -> Tensor:
        """[R, N, H]: streams with rows [R, H] added to all but the first."""
        return torch.cat([streams[:, :1], streams[:, 1:] + added[:, None]], dim=1)

    def _routed(self, rows: Tensor) -> Tensor:
        """[R, N], by which streams are mixed."""
        routed: Tensor = self.router(self.router_norm(rows) * self._router_scale)
        return torch.tanh(routed.float()).to(rows.dtype)

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        yield from self.router_norm.slots(names.in_layer(names.stream_router_norm, layer), copy)
        yield from self.router.slots([names.in_layer(names.stream_router, layer)], copy)
        yield from self.predictions.slots([names.in_layer(names.stream_predictions, layer)], copy)
        yield from self.corrections.slots([names.in_layer(names.stream_corrections, layer)], copy)
        yield in_place(names.in_layer(names.stream_scale, layer), self.scale, copy)


class AugmentedResidual(nn.Module):
    """See `LaurelSpec`: [R, H] -> [R, H]."""

    def __init__(self, spec: LaurelSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.left = Linear(hidden_size, [spec.rank], place)
        self.right = Linear(spec.rank, [hidden_size], place)
        self.norm = Normalization(spec.norm, hidden_size, place)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[R, H] of hidden rows [R, H] behind attention, and of the normed rows [R, H] that attention read."""
        own: Tensor = rows + self.norm(self.right(self.left(rows)))
        return (hidden + own) / math.sqrt(2)

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        yield from self.left.slots([names.in_layer(names.laurel_left, layer)], copy)
        yield from self.right.slots([names.in_layer(names.laurel_right, layer)], copy)
        yield from self.norm.slots(names.in_layer(names.laurel_norm, layer), copy)


def _as_large(rows: Tensor, measure: Tensor) -> Tensor:
    """Rows [R, H], each scaled to the root mean square of the row of `measure` [R, H]."""
    wanted = measure.square().mean(-1, keepdim=True).sqrt()
    return rows * wanted / rows.square().mean(-1, keepdim=True).clamp_min(1e-5).sqrt()


class SharedBlock(nn.Module):
    """See `SharedBlockSpec`: hidden rows and embedded ones, [R, H] each -> [R, H]."""

    def __init__(
        self,
        spec: SharedBlockSpec,
        attention: AttentionSpec,
        hidden_size: int,
        layer: int,
        place: Placement,
        cache_layer: int,
        other: SharedBlock | None,
    ) -> None:
        """`other` has the weights that are shared, where that is not this one."""
        super().__init__()
        self.spec, self._layer, self._ranks = spec, layer, place.ranks
        own = place if other is None else replace(place, device=torch.device("meta"))
        self.attention = HeadAttention(attention, hidden_size, spec.first, own, cache_layer, read_vectors=2)
        self.mlp = MLP(spec.mlp, hidden_size, own)
        self.norm = Normalization(spec.norm, 2 * hidden_size, own)
        self.mlp_norm = Normalization(spec.mlp_norm, hidden_size, own)
        self._has_weights = other is None
        if other is not None:
            self.norm, self.mlp_norm = other.norm, other.mlp_norm
            self.attention.qkv, self.attention.out = other.attention.qkv, other.attention.out
            self.mlp.gate_up, self.mlp.down = other.mlp.gate_up, other.mlp.down
        if spec.adapter:
            outputs = [heads * attention.head_width for heads in (attention.heads, *[attention.kv_heads] * 2)]
            self.attention.adapter = Adapter(2 * hidden_size, spec.adapter, outputs, place)
        if spec.mlp_adapter:
            self.mlp.adapter = Adapter(hidden_size, spec.mlp_adapter, [2 * spec.mlp.width], place)
        self.last = Linear(hidden_size, [hidden_size], place)

    def forward(
        self, hidden: Tensor, embedded: Tensor, angles: Angles | None, step: PagedPass | UncachedPass
    ) -> Tensor:
        """[R, H] and [R, H] -> [R, H]."""
        mixed = self._summed(self.attention(self.norm(torch.cat([hidden, embedded], dim=-1)), angles, step))
        output: Tensor = self.last(self._summed(self.mlp(self.mlp_norm(mixed))))
        return output

    def _summed(self, part: Tensor) -> Tensor:
        return part if self._ranks is None else self._ranks.summed(part)

    def slots(self, names: WeightNames, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the block's tensors; those that are shared are the first layer's, and so are the adapters."""

        def of(name: str) -> str:
            return names.in_layer(name, self.spec.first, self.spec.place)

        if self._has_weights:
            yield from self.norm.slots(of(names.shared_norm), copy)
            yield from self.mlp_norm.slots(of(names.before_mlp), copy)
            yield from self.attention.slots(names, copy)
            yield from self.mlp.slots([of(name) for name in names.gate_up], of(names.down), "", copy)
        for owner, adapters in ((self.attention, names.qkv_adapters), (self.mlp, names.gate_up_adapters)):
            if owner.adapter is not None:
                yield from owner.adapter.slots([of(name) for name in adapters], copy)
        yield from self.last.slots([names.in_layer(names.shared_last, self._layer)], copy)
