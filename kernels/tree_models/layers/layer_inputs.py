"""A vector of each token for each layer (Gemma 4): made of the token and of its embedding, and added in the layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tree_models.layers.linear import Linear
from tree_models.layers.mlp import FUNCTIONS
from tree_models.layers.norm import Normalization
from tree_models.layers.placing import Placement
from tree_models.layers.rank_group import looked_up
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, in_place
from tree_models.spec import AddedInputSpec, LayerInputsSpec


class LayerInputs(nn.Module):
    """See `LayerInputsSpec`. What is looked up by the token lies beside the embedding, of which it is no part."""

    def __init__(self, spec: LayerInputsSpec, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self._shape, self._ranks = (spec.layers, spec.width), place.ranks
        self.table = place.empty(spec.vocabulary_size, spec.layers * spec.width)
        self.projection = Linear(hidden_size, [spec.layers * spec.width], place)
        self.norm = Normalization(spec.norm, spec.width, place)
        # Rounded as the rows are.
        self._scale = float(torch.tensor(spec.width**0.5, dtype=place.dtype))
        self._projection_scale = hidden_size**-0.5

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[R, layers, width] of token ids [R] and their embeddings [R, H]."""
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
        """[R, H], of which the residual is a part."""
        added: Tensor = self.norm(self.projection(FUNCTIONS[self.activation](self.gate(hidden)) * vectors))
        return hidden + added

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the module's tensors."""
        yield from self.gate.slots([names.in_layer(names.input_gate, layer)], copy)
        yield from self.projection.slots([names.in_layer(names.input_projection, layer)], copy)
        yield from self.norm.slots(names.in_layer(names.input_norm, layer), copy)
