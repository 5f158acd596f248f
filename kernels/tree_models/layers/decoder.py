"""A decoder: embedding, layers, last norm and head, over R rows of any sequences; and layers one behind another alone,
as heads that draft have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tree_kernels.linear import ScaledRows
from tree_kernels.recurrence import StateShape
from tree_models.decoder_spec import DecoderSpec
from tree_models.layers.attention import compressed_shape
from tree_models.layers.beside_rows import HeadTransform, LayerInputs, StreamEnds
from tree_models.layers.decoder_layer import DecoderLayer
from tree_models.layers.linear import Linear
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import CacheShape, PagedPass, UncachedPass, expanded_shape, keeps_own, kept_places
from tree_models.layers.placing import Placement
from tree_models.layers.recurrent import state_shape
from tree_models.layers.rotary import Angles, RotaryEmbedding, sines_of
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, in_place, rearranged
from tree_models.spec import AttentionSpec, LatentSpec, LayerSpec

# Gets the outputs [R, H] of one decoder layer.
Tap = Callable[[Tensor], None]


class LayerForm(Protocol):
    """Another way to compute a decoder layer, for some numbers of rows."""

    def compute_layer(
        self, hidden: Tensor, carried: Any, angles: Angles | None, step: PagedPass, vectors: Tensor | None = None
    ) -> tuple[Tensor, Any] | None:
        """[R, H] -> [R, H], with `vectors` as a layer has them, and what the next layer's form may take as `carried`;
        None for so many rows."""

    def cache_rows(self, hidden: Tensor, carried: Any, angles: Angles | None, step: PagedPass) -> bool:
        """Write what the layer caches of rows [R, H], and compute no more; False for so many rows."""


class FinalForm(Protocol):
    """Another way to compute the last norm and the head, for some numbers of rows."""

    def norm(self, hidden: Tensor) -> Tensor | None:
        """[R, H] -> [R, H]; None for so many rows."""

    def head(self, rows: Tensor) -> Tensor | None:
        """[R, H] -> [R, V]; None where the head is not computed so."""


class LayerStack(nn.Module):
    """Decoder layers one behind another, of a model or of a head that drafts for one."""

    def __init__(
        self, specs: Sequence[LayerSpec], hidden_size: int, longest_context: int, place: Placement, kept: int = 0
    ) -> None:
        """`kept` layers of others come before these in the cache. Raises `FamilyRefused` for what is described and not
        computed."""
        super().__init__()
        self.place, self.layer_specs, self.longest_context = place, tuple(specs), longest_context
        made: list[DecoderLayer] = []
        for index, (layer, (own, beside)) in enumerate(zip(specs, kept_places(specs), strict=True)):
            sharing = made[layer.shared.first].shared if layer.shared and layer.shared.first < index else None
            made.append(DecoderLayer(layer, hidden_size, index, place, kept + own, beside, sharing))
        self.layers: Sequence[DecoderLayer] = nn.ModuleList(made)  # type: ignore[assignment]
        # One for each kind that there is, and the place of each layer's among them; None where it has none.
        kinds = list(dict.fromkeys(kind for layer in specs if (kind := layer.rotary) is not None))
        self.rotaries: Sequence[RotaryEmbedding]
        self.rotaries = nn.ModuleList(RotaryEmbedding(kind, place.device) for kind in kinds)  # type: ignore[assignment]
        self._rotary_places = [None if (kind := layer.rotary) is None else kinds.index(kind) for layer in specs]
        # Other ways to compute layers, the last norm and the head.
        self.forms: list[LayerForm | None] = [None] * len(made)
        self.final_form: FinalForm | None = None
        # By layer, from 0; the number of layers stands for the rows after the last norm.
        self._taps: dict[int, list[Tap]] = {}
        # Layers that passes compute.
        self._computed: Sequence[int] = range(len(made))

    @property
    def latent(self) -> bool:
        """Whether latents are cached."""
        return self.place.latent and all(isinstance(layer.attention, LatentSpec) for layer in self.layer_specs)

    @property
    def cache_shapes(self) -> Sequence[CacheShape]:
        """Of the cache of each layer that keeps keys and values, or latents."""
        if not self.latent:
            return self.expanded_shapes
        kept = [spec for spec in self._keeping if isinstance(spec, LatentSpec)]
        return [CacheShape(1, spec.latent + spec.rotary.width, 0) for spec in kept]

    @property
    def expanded_shapes(self) -> Sequence[CacheShape]:
        """Of a cache with keys and values of heads, of each layer that keeps some."""
        return [expanded_shape(spec) for spec in self._keeping]

    @property
    def _keeping(self) -> list[AttentionSpec | LatentSpec]:
        """Layers with keys and values, or latents, of their own."""
        specs = [layer.attention for layer in self.layer_specs]
        return [spec for spec in specs if keeps_own(spec)]

    def angles(self, positions: Tensor) -> list[Angles]:
        """Of positions [R], by each kind of rotary embedding."""
        return [rotary(positions) for rotary in self.rotaries]

    def angles_of(self, layer: int, positions: Tensor) -> Angles | None:
        """Angles of a layer's rotary embedding at positions [R]; None where it has none."""
        kind = self._rotary_places[layer]
        return None if kind is None else self.rotaries[kind](positions)

    def compute_layers(
        self,
        hidden: Tensor,
        every: Sequence[Angles],
        step: PagedPass | UncachedPass,
        given: ScaledRows | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """[R, H] of hidden rows [R, H], with `angles` of their positions. `given` [R, read_vectors * H] is what the
        first layer's attention reads, normed whole, where that is not its own norm of the hidden rows; `vectors`
        [R, layers, W] what each layer adds where they have added inputs."""
        return self._computed_by(self._computed, hidden, every, step, given, vectors)[0]

    def cache_rows(
        self, hidden: Tensor, every: Sequence[Angles], step: PagedPass, given: ScaledRows | None = None
    ) -> None:
        """Write what layers with keys and values, or latents, cache of hidden rows [R, H]; `every` and `given` as in
        `compute_layers`. The last layer computes nothing else: no attention, and no MLP."""
        *before, last = self._computed
        hidden, carried = self._computed_by(before, hidden, every, step, given)
        form, kind = self.forms[last], self._rotary_places[last]
        angles = None if kind is None else every[kind]
        if form is None or not form.cache_rows(hidden, carried, angles, step):
            self.layers[last].cache_rows(hidden, angles, step, given.rows if given is not None and last == 0 else None)

    def _computed_by(
        self,
        layers: Sequence[int],
        hidden: Tensor,
        every: Sequence[Angles],
        step: PagedPass | UncachedPass,
        given: ScaledRows | None,
        vectors: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """[R, H] of these layers, and what the last one's form carries to the next."""
        carried: Any = given
        for index in layers:
            layer, form, kind = self.layers[index], self.forms[index], self._rotary_places[index]
            angles = None if kind is None else every[kind]
            own = None if vectors is None else vectors[:, index]
            # Its own forms read what a pass has; without a cache layers are plain.
            done = None
            if form is not None and isinstance(step, PagedPass):
                done = form.compute_layer(hidden, carried, angles, step, own)
            if done is None:
                rows = given.rows if given is not None and index == 0 else None
                done = layer(hidden, angles, step, rows, own), None
            hidden, carried = done
            for tap in self._taps.get(index, ()):
                # Of streams the one that layers compute.
                tap(hidden if hidden.dim() == 2 else hidden[:, 0])
        return hidden, carried

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """While the block runs, passes compute two layers of each kind, one behind the other where there are such, and
        the last one: these launch every kernel that all layers do."""
        count, kept = len(self.layers), set[int]()
        for kind in dict.fromkeys(self.layer_specs):
            of_kind = [index for index, spec in enumerate(self.layer_specs) if spec == kind]
            kept |= {of_kind[0], min(of_kind[0] + 1, count - 1), of_kind[-1], max(of_kind[-1] - 1, 0)}
        self._computed = sorted(kept)
        try:
            yield
        finally:
            self._computed = range(count)

    def tap(self, layer: int, keep: Tap) -> Callable[[], None]:
        """Give the output of a layer to `keep` in every pass; the number of layers stands for the rows after the last
        norm. Returns what ends that."""
        self._taps.setdefault(layer, []).append(keep)
        return lambda: self._taps[layer].remove(keep)


class Decoder(LayerStack):
    """See `DecoderSpec`: token ids to logits. Weights are unwritten until every slot of `slots` has been."""

    def __init__(self, spec: DecoderSpec, names: WeightNames, place: Placement) -> None:
        """Raises `FamilyRefused` for what is described and not computed."""
        super().__init__(spec.layers, spec.hidden_size, spec.max_positions, place)
        self.spec, self.names = spec, names
        self.embedding = place.empty(spec.vocabulary_size, spec.hidden_size)
        # Rounded as the rows are: the square root of 3,072, which Gemma takes, is 55.5 in bf16.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=place.dtype))
        self.embedding_norm: Normalization | None = None
        if spec.embedding_norm is not None:
            self.embedding_norm = Normalization(spec.embedding_norm, spec.hidden_size, place)
        self.position_table = place.empty(spec.positions.rows, spec.hidden_size) if spec.positions else None
        if self.position_table is not None and spec.positions is not None and spec.positions.sines:
            self.position_table.copy_(sines_of(*self.position_table.shape))
        self.norm = Normalization(spec.final_norm, spec.hidden_size, place)
        self.head_transform: HeadTransform | None = None
        if spec.head_transform is not None:
            self.head_transform = HeadTransform(spec.head_transform, spec.hidden_size, place)
        self.head = Linear(spec.hidden_size, [spec.vocabulary_size], place, bias=spec.head_bias)
        if spec.tied and self.head.plain is not None:
            self.head.plain.weight = self.embedding
        self.layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputs(spec.layer_inputs, spec.hidden_size, place)
        self.stream_ends = StreamEnds(spec.streams, spec.hidden_size, place) if spec.streams else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.place.device

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden rows and logits."""
        return self.place.dtype

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return self.spec.vocabulary_size

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.spec.hidden_size

    @property
    def layer_count(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def windows(self) -> Sequence[int | None]:
        """By layer with keys and values, how many tokens a row sees; None for all."""
        return [spec.window if isinstance(spec, AttentionSpec) else None for spec in self._keeping]

    @property
    def recurrent_layers(self) -> tuple[int, StateShape] | None:
        """How many layers keep states, and of which shape; None where there are none."""
        shapes = [
            compressed_shape(spec) if isinstance(spec, AttentionSpec) else state_shape(spec, self.hidden_size)
            for layer in self.spec.layers
            for spec in layer.states
        ]
        return (len(shapes), shapes[0]) if shapes else None

    def forward(self, token_ids: Tensor, positions: Tensor, step: PagedPass, rows: Tensor | int = 0) -> Tensor:
        """Logits [.., V] of the given rows, 0 for all, of token ids [R] and positions [R]."""
        hidden = self.hidden(token_ids, positions, step)
        return self.logits(hidden if isinstance(rows, int) else hidden[rows])

    def hidden(self, token_ids: Tensor, positions: Tensor, step: PagedPass) -> Tensor:
        """[R, H] after the last norm."""
        embedded, vectors = self.embedded(token_ids, positions), None
        if self.layer_inputs is not None:
            vectors = self.layer_inputs(token_ids, embedded)
        elif any(layer.shared for layer in self.layer_specs):
            vectors = embedded[:, None].expand(-1, len(self.layers), -1)
        hidden = self.compute_layers(self.spread(embedded), self.angles(positions), step, vectors=vectors)
        normed = self.normed(self.joined(hidden))
        for tap in self._taps.get(len(self.layers), ()):
            tap(normed)
        return normed

    def normed(self, hidden: Tensor) -> Tensor:
        """[R, H] after the last norm, of rows [R, H] of the last layer."""
        normed = None if self.final_form is None else self.final_form.norm(hidden)
        if normed is None:
            normed = self.norm(hidden)
        return normed

    def spread(self, embedded: Tensor) -> Tensor:
        """What the first layer reads of embedded rows [R, H]: these, or streams [R, N, H]."""
        return embedded if self.stream_ends is None else self.stream_ends.spread(embedded)

    def joined(self, hidden: Tensor) -> Tensor:
        """[R, H] of what the last layer made: rows [R, H], or streams [R, N, H]."""
        return hidden if self.stream_ends is None else self.stream_ends.joined(hidden)

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[R, H] of token ids [R] at positions [R]."""
        hidden = self.embedding_rows(token_ids)
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        hidden = hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale
        if self.position_table is None or self.spec.positions is None:
            return hidden
        return hidden + functional.embedding(positions + self.spec.positions.offset, self.position_table)

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """[R, H] of token ids [R], before they are normed or scaled."""
        return functional.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., V] of rows [.., H] after the last norm."""
        if self.head_transform is not None:
            hidden = self.head_transform(hidden)
        logits = None if self.final_form is None else self.final_form.head(hidden)
        if logits is None:
            logits = self.head(hidden)
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        if self.spec.logits_cap is not None:
            logits = (logits / self.spec.logits_cap).tanh() * self.spec.logits_cap
        return logits

    def slots(self, copy: Copy = Tensor.copy_) -> list[WeightSlot]:
        """Slots of every tensor of a checkpoint, by the names of the decoder's family."""
        names = self.names
        slots = [self._tied(self._embedding_slot(copy), names.embedding, names.head)]
        for index, layer in enumerate(self.layers):
            slots += layer.slots(names, index, copy)
        slots += self.norm.slots(names.final_norm, copy)
        if self.position_table is not None and self.spec.positions and not self.spec.positions.sines:
            slots.append(in_place(f"{names.positions}.weight", self.position_table, copy))
        if self.embedding_norm is not None:
            slots += self.embedding_norm.slots(names.embedding_norm, copy)
        if self.head_transform is not None:
            slots += self.head_transform.slots(names, copy)
        if self.layer_inputs is not None:
            slots += self.layer_inputs.slots(names, copy)
        if self.stream_ends is not None:
            slots += self.stream_ends.slots(names, copy)
        return slots + [self._tied(slot, names.head, names.embedding) for slot in self.head.slots([names.head], copy)]

    def _embedding_slot(self, copy: Copy) -> WeightSlot:
        name, (rows, width) = f"{self.names.embedding}.weight", self.embedding.shape
        if not self.spec.unread_tokens:
            return in_place(name, self.embedding, copy)
        return rearranged(name, (rows + self.spec.unread_tokens, width), self.embedding, lambda all: all[:rows], copy)

    def _tied(self, slot: WeightSlot, name: str, other: str) -> WeightSlot:
        """The slot, in which the weight of the module `name` is tied to that of `other`, where the decoder's are."""
        own, tied = f"{name}.weight", f"{other}.weight"
        if not self.spec.tied or own not in slot.specs:
            return slot
        return WeightSlot({**slot.specs, own: replace(slot.specs[own], tied_to=tied)}, slot.write)
