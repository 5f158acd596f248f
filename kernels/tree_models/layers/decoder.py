"""A decoder: embedding, layers, last norm and head, over R rows of any sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_models.layers.attention import HeadAttention
from tree_models.layers.experts import MixtureOfExperts
from tree_models.layers.latent import LatentHeads
from tree_models.layers.linear import Linear
from tree_models.layers.mlp import MLP
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import Angles, RotaryEmbedding
from tree_models.names import WeightNames
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place
from tree_models.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, RotarySpec

# Gets the outputs [R, H] of one decoder layer.
Tap = Callable[[Tensor], None]


class DecoderLayer(nn.Module):
    """See `LayerSpec`: [R, H] -> [R, H]."""

    def __init__(self, spec: LayerSpec, hidden_size: int, layer: int, place: Placement) -> None:
        super().__init__()
        self.spec = spec
        if isinstance(spec.attention, AttentionSpec):
            self.attention: HeadAttention | LatentHeads = HeadAttention(spec.attention, hidden_size, layer, place)
        else:
            self.attention = LatentHeads(spec.attention, hidden_size, layer, place)
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp: MLP | MixtureOfExperts = MixtureOfExperts(spec.mlp, hidden_size, layer, place)
        else:
            self.mlp = MLP(spec.mlp, hidden_size, place)
        norms = spec.before_attention, spec.after_attention, spec.before_mlp, spec.after_mlp
        made = (None if norm is None else Normalization(norm, hidden_size, place) for norm in norms)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = made

    def forward(self, hidden: Tensor, angles: Angles | None, positions: Tensor, step: PagedPass) -> Tensor:
        """[R, H] -> [R, H]."""
        rows = hidden if self.before_attention is None else self.before_attention(hidden)
        attended: Tensor = self.attention(rows, angles, positions, step)
        if self.spec.parallel:
            return self._added(self._added(hidden, attended, self.after_attention), self.mlp(rows), self.after_mlp)
        hidden = self._added(hidden, attended, self.after_attention)
        rows = hidden if self.before_mlp is None else self.before_mlp(hidden)
        return self._added(hidden, self.mlp(rows), self.after_mlp)

    def _added(self, residual: Tensor, output: Tensor, norm: Normalization | None) -> Tensor:
        """The residual with what attention or MLP adds. Between `output`, the last product, and the sum is the place of
        an all-reduce."""
        if norm is not None:
            output = norm(output)
        if self.spec.residual_scale != 1.0:
            output = output * self.spec.residual_scale
        return residual + output

    def slots(self, names: WeightNames, layer: int, copy: Copy) -> Iterator[WeightSlot]:
        """Slots of the layer's tensors."""
        norms = (
            (names.before_attention, self.before_attention),
            (names.after_attention, self.after_attention),
            (names.before_mlp, self.before_mlp),
            (names.after_mlp, self.after_mlp),
        )
        for name, norm in norms:
            if norm is not None:
                yield from norm.slots(names.in_layer(name, layer), copy)
        yield from self.attention.slots(names, copy)
        if isinstance(self.mlp, MixtureOfExperts):
            yield from self.mlp.slots(names, copy)
        else:
            gate_up = [names.in_layer(name, layer) for name in names.gate_up]
            activation = names.in_layer(names.activation, layer)
            yield from self.mlp.slots(gate_up, names.in_layer(names.down, layer), activation, copy)


class Decoder(nn.Module):
    """See `DecoderSpec`: token ids to logits. Weights are unwritten until every slot of `slots` has been."""

    def __init__(self, spec: DecoderSpec, names: WeightNames, place: Placement) -> None:
        """Raises `FamilyRefused` for what is described and not computed."""
        super().__init__()
        spec.check()
        self.spec, self.names, self.place = spec, names, place
        self.embedding = place.empty(spec.vocabulary_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, spec.hidden_size, index, place) for index, layer in enumerate(spec.layers)
        )
        # Rounded as the rows are: the square root of 3,072, which Gemma takes, is 55.5 in bf16.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=place.dtype))
        self.norm = Normalization(spec.final_norm, spec.hidden_size, place)
        self.head = Linear(spec.hidden_size, [spec.vocabulary_size], place, bias=spec.head_bias)
        if spec.tied and self.head.plain is not None:
            self.head.plain.weight = self.embedding
        kinds = dict.fromkeys(rotary_of(layer) for layer in spec.layers)
        self._rotary_kinds: list[RotarySpec] = [kind for kind in kinds if kind is not None]
        self.rotaries = nn.ModuleList(RotaryEmbedding(kind, place.device) for kind in self._rotary_kinds)
        # The place of each layer's rotary embedding among these; None where it has none.
        places = {kind: place for place, kind in enumerate(self._rotary_kinds)}
        self._rotary_places = [None if (kind := rotary_of(layer)) is None else places[kind] for layer in spec.layers]
        # By layer, from 0; the number of layers stands for the rows after the last norm.
        self.taps: dict[int, Tap] = {}

    def forward(self, token_ids: Tensor, positions: Tensor, step: PagedPass, rows: Tensor | int = 0) -> Tensor:
        """Logits [.., V] of the given rows, 0 for all, of token ids [R] and positions [R]."""
        hidden = self.hidden(token_ids, positions, step)
        return self.logits(hidden if isinstance(rows, int) else hidden[rows])

    def hidden(self, token_ids: Tensor, positions: Tensor, step: PagedPass) -> Tensor:
        """[R, H] after the last norm."""
        hidden = self.embedded(token_ids)
        angles = [rotary(positions) for rotary in self.rotaries]
        for index, (layer, kind) in enumerate(zip(self.layers, self._rotary_places, strict=True)):
            hidden = layer(hidden, None if kind is None else angles[kind], positions, step)
            if index in self.taps:
                self.taps[index](hidden)
        normed: Tensor = self.norm(hidden)
        if len(self.layers) in self.taps:
            self.taps[len(self.layers)](normed)
        return normed

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[R, H] of token ids [R]."""
        hidden = functional.embedding(token_ids, self.embedding)
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., V] of rows [.., H] after the last norm."""
        logits: Tensor = self.head(hidden)
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        if self.spec.logits_cap is not None:
            logits = (logits / self.spec.logits_cap).tanh() * self.spec.logits_cap
        return logits

    def slots(self, copy: Copy = Tensor.copy_) -> list[WeightSlot]:
        """Slots of every tensor of a checkpoint, by the names of the decoder's family."""
        names = self.names
        slots = [in_place(f"{names.embedding}.weight", self.embedding, copy)]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots += layer.slots(names, index, copy)
        slots += self.norm.slots(names.final_norm, copy)
        return slots + self._head_slots(copy)

    def _head_slots(self, copy: Copy) -> list[WeightSlot]:
        """Slots of the head. A tied one may be missing in a checkpoint, and then is the embedding."""
        slots = list(self.head.slots([self.names.head], copy))
        if not self.spec.tied:
            return slots
        name, tied = f"{self.names.head}.weight", f"{self.names.embedding}.weight"
        return [
            WeightSlot(
                {own: TensorSpec(one.shape, one.dtype, tied if own == name else "") for own, one in slot.specs.items()},
                slot.write,
            )
            for slot in slots
        ]


def rotary_of(layer: LayerSpec) -> RotarySpec | None:
    """The rotary embedding of a layer, if it has one."""
    return layer.attention.rotary
