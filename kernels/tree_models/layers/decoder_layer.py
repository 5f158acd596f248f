"""One decoder layer, over R rows of any sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tree_models.layers.attention import CompressedAttention, HeadAttention
from tree_models.layers.beside_rows import AddedInput, AlternatingUpdates, AugmentedResidual, SharedBlock
from tree_models.layers.experts import DenseAndExperts, MixtureOfExperts, RouterMLP
from tree_models.layers.latent import LatentHeads
from tree_models.layers.mlp import MLP
from tree_models.layers.norm import Normalization
from tree_models.layers.paged import PagedPass, UncachedPass
from tree_models.layers.placing import Placement
from tree_models.layers.recurrent import StateLayer
from tree_models.layers.rotary import Angles
from tree_models.layers.scans import STATE_LAYERS
from tree_models.names import WeightNames
from tree_models.slots import Copy, WeightSlot, by_columns, in_place
from tree_models.spec import AttentionSpec, DenseAndExpertsSpec, ExpertsSpec, LatentSpec, LayerSpec

_Mixer = HeadAttention | CompressedAttention | LatentHeads | StateLayer


class DecoderLayer(nn.Module):
    """See `LayerSpec`: [R, H] -> [R, H], or [R, N, H] -> [R, N, H] of N streams. Between a layer with experts ahead and
    the next one rows are [R, 2, H]."""

    def __init__(
        self,
        spec: LayerSpec,
        hidden_size: int,
        layer: int,
        place: Placement,
        kept: int,
        kept_beside: int = 0,
        sharing: SharedBlock | None = None,
    ) -> None:
        """`kept` counts the layers whose keys and values, or whose states, are kept beside this one's; `kept_beside`
        those with states beside what this one has beside its attention, or in it. `sharing` has the weights of its
        block, if it is not the first of those with them."""
        super().__init__()
        self.spec, self._ranks = spec, place.ranks
        of = hidden_size, layer, place
        self.attention: _Mixer | None
        self.shared: SharedBlock | None = None
        if spec.shared is not None:
            assert isinstance(spec.attention, AttentionSpec), "what the block has"
            self.shared = SharedBlock(spec.shared, spec.attention, *of, kept, sharing)
        if spec.attention is None or spec.shared is not None:
            self.attention = None
        elif isinstance(spec.attention, AttentionSpec) and spec.attention.compressed:
            self.attention = CompressedAttention(spec.attention, *of, kept, kept_beside)
        elif isinstance(spec.attention, AttentionSpec):
            self.attention = HeadAttention(spec.attention, *of, kept, spec.read_vectors)
        elif isinstance(spec.attention, LatentSpec):
            self.attention = LatentHeads(spec.attention, *of, kept)
        else:
            self.attention = STATE_LAYERS[type(spec.attention)](spec.attention, *of, kept)
        self.beside = STATE_LAYERS[type(spec.beside)](spec.beside, *of, kept_beside) if spec.beside else None
        self.mlp: MLP | MixtureOfExperts | DenseAndExperts | None
        if spec.mlp is None:
            self.mlp = None
        elif isinstance(spec.mlp, ExpertsSpec):
            self.mlp = MixtureOfExperts(spec.mlp, hidden_size, layer, place)
        elif isinstance(spec.mlp, DenseAndExpertsSpec):
            self.mlp = DenseAndExperts(spec.mlp, hidden_size, layer, place)
        else:
            self.mlp = MLP(spec.mlp, hidden_size, place)
        norms = spec.before_attention, spec.after_attention, spec.before_mlp, spec.after_mlp
        made = (None if norm is None else Normalization(norm, hidden_size, place) for norm in norms)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = made
        norm = spec.residual_norm
        self.residual_norms: Sequence[Normalization] | None = None
        if norm is not None:
            both = nn.ModuleList(Normalization(norm, hidden_size, place) for _ in range(2))
            self.residual_norms = both  # type: ignore[assignment]
        self.router_mlp = RouterMLP(spec.router_mlp, hidden_size, place) if spec.router_mlp else None
        self.ahead = MixtureOfExperts(spec.ahead, hidden_size, layer, place) if spec.ahead else None
        self.added_input = AddedInput(spec.added_input, hidden_size, place) if spec.added_input else None
        self.scale = place.empty(1) if spec.scaled else None
        self.laurel = AugmentedResidual(spec.laurel, hidden_size, place) if spec.laurel else None
        self.streams = AlternatingUpdates(spec.streams, hidden_size, place) if spec.streams else None

    def forward(
        self,
        hidden: Tensor,
        angles: Angles | None,
        step: PagedPass | UncachedPass,
        given: Tensor | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """[R, H] -> [R, H], or of streams. `given` [R, read_vectors * H] is what attention reads in place of normed
        hidden rows, `vectors` [R, W] what the layer adds where it has an added input."""
        if self.streams is None:
            hidden, late = hidden.unbind(1) if hidden.dim() == 3 else (hidden, None)
            routed, late = (None, late) if self.router_mlp is None else (late, None)
            hidden = self._halves(hidden, angles, step, given, vectors, routed)
            hidden = hidden if late is None else hidden + late
            if self.added_input is not None:
                hidden = hidden + self.added_input(hidden, vectors)
        else:
            predicted = self.streams.predicted(hidden)
            hidden = self.streams.corrected(predicted, self._halves(predicted[:, 0], angles, step, given))
            if self.added_input is not None:
                added = self.added_input(self.streams.read_by_input(hidden), vectors)
                hidden = self.streams.with_added(hidden, added)
        return hidden if self.scale is None else hidden * self.scale

    def cache_rows(self, hidden: Tensor, angles: Angles | None, step: PagedPass, given: Tensor | None = None) -> None:
        """Write the keys and values, or latents, of rows [R, H], as `forward` does; of a layer that has some and one
        stream."""
        assert isinstance(self.attention, HeadAttention | LatentHeads) and self.streams is None, (
            "as in heads that draft"
        )
        rows = given
        if rows is None:
            rows = hidden if self.before_attention is None else self.before_attention(hidden)
        self.attention.cache_rows(rows, angles, step)

    def _halves(
        self,
        hidden: Tensor,
        angles: Angles | None,
        step: PagedPass | UncachedPass,
        given: Tensor | None,
        embedded: Tensor | None = None,
        routed: Tensor | None = None,
    ) -> Tensor:
        """[R, H] -> [R, H]: attention and MLP, or what reads the output of a block that is shared. [R, 2, H] with what
        the next layer is to add, or with what its router is to read; `routed` [R, H] is that of the layer before."""
        if self.shared is not None:
            assert self.beside is not None and self.before_attention is not None and embedded is not None, "of a block"
            read = self.before_attention(hidden + self.shared(hidden, embedded, angles, step))
            return self._added(hidden, self.beside(read, angles, step), None)
        rows, normed = given, self.spec.normed_residual
        if rows is None:
            rows = hidden if self.before_attention is None else self.before_attention(hidden)
        aside = self.before_mlp(hidden) if self.spec.parallel and self.before_mlp is not None else rows
        if self.attention is not None:
            mixed: Tensor = self.attention(rows, angles, step)
            if self.beside is not None:
                mixed = mixed + self.beside(rows, angles, step)
            if normed is not None:
                hidden, mixed = rows * normed.attention[0], mixed * normed.attention[1]
            hidden = self._added(self._kept(hidden, 0), mixed, self.after_attention)
            if self.laurel is not None:
                hidden = self.laurel(hidden, rows)
        if self.spec.parallel:
            rows = aside
        else:
            rows = hidden if self.before_mlp is None else self.before_mlp(hidden)
        if self.mlp is not None:
            if self.router_mlp is not None:
                return self._routed(hidden, rows, routed)
            summed, fed = isinstance(self.mlp, DenseAndExperts), self.mlp(rows)
            if normed is not None:
                hidden, fed = rows * normed.mlp[0], fed * normed.mlp[1]
            hidden = self._added(self._kept(hidden, 1), fed, self.after_mlp, summed=summed)
        if self.ahead is not None:
            made: Tensor = self.ahead(rows)
            return torch.stack([hidden, made if self._ranks is None else self._ranks.summed(made)], dim=1)
        return hidden

    def _routed(self, hidden: Tensor, rows: Tensor, before: Tensor | None) -> Tensor:
        """[R, H] with what experts make of normed rows, or [R, 2, H] with what the next layer's router is to read."""
        assert self.router_mlp is not None and self.mlp is not None, "experts with such a router"
        states, read = self.router_mlp(rows, before)
        hidden = self._added(self._kept(hidden, 1), self.mlp(rows, read), self.after_mlp)
        return torch.stack([hidden, states], dim=1) if self.router_mlp.spec.passes else hidden

    def _kept(self, residual: Tensor, half: int) -> Tensor:
        """The residual of a half as it is added to."""
        return residual if self.residual_norms is None else self.residual_norms[half](residual)

    def _added(self, residual: Tensor, output: Tensor, norm: Normalization | None, *, summed: bool = False) -> Tensor:
        """The residual with what attention or MLP adds, of which each rank has made a part unless it is `summed`."""
        if self._ranks is not None and not summed:
            output = self._ranks.summed(output)
        if norm is not None:
            output = norm(residual + output if self.spec.norms_sums else output)
            if self.spec.norms_sums:
                return output
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
        for name, own in zip(names.residual_norms, self.residual_norms or (), strict=False):
            yield from own.slots(names.in_layer(name, layer), copy)
        if self.router_mlp is not None:
            yield from self.router_mlp.slots(names, layer, copy)
        turned = by_columns if names.by_columns else iter
        if self.attention is not None:
            yield from turned(self.attention.slots(names, copy))
        if self.shared is not None:
            yield from self.shared.slots(names, copy)
        if self.beside is not None:
            yield from self.beside.slots(names, copy)
        if self.added_input is not None:
            yield from self.added_input.slots(names, layer, copy)
        if self.laurel is not None:
            yield from self.laurel.slots(names, layer, copy)
        if self.streams is not None:
            yield from self.streams.slots(names, layer, copy)
        if self.scale is not None:
            yield in_place(names.in_layer(names.layer_scale, layer), self.scale, copy)
        if self.ahead is not None:
            yield from self.ahead.slots(names, copy)
        if self.mlp is not None and not isinstance(self.mlp, MLP):
            yield from self.mlp.slots(names, copy)
        elif self.mlp is not None:
            gate_up = [names.in_layer(name, layer) for name in names.gate_up]
            activation = names.in_layer(names.activation, layer)
            yield from turned(self.mlp.slots(gate_up, names.in_layer(names.down, layer), activation, copy))
