"""Which part of each of a checkpoint's tensors a rank reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tree_models.names import WeightNames
from tree_models.ranks.share import kv_heads_of
from tree_models.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    GatedConvolutionSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    RecurrentSpec,
    StateSpaceSpec,
)
from tree_models.weights.checkpoint import StoredTensor, TensorSource


class Cut(Protocol):
    """A rank's part of a tensor."""

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor of this shape."""

    def part(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of one dimension, put one behind another, and so many zeros behind them."""

    dimension: int
    spans: tuple[range, ...]
    zeros: int = 0

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """See `Cut`."""
        return self._with(whole, sum(map(len, self.spans)) + self.zeros)

    def part(self, whole: Tensor) -> Tensor:
        """See `Cut`."""
        parts = [whole.narrow(self.dimension, span.start, len(span)) for span in self.spans]
        if self.zeros:
            parts.append(whole.new_zeros(self._with(whole.shape, self.zeros)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)

    def _with(self, whole: Sequence[int], length: int) -> tuple[int, ...]:
        return (*whole[: self.dimension], length, *whole[self.dimension + 1 :])


@dataclass(frozen=True, slots=True)
class Zeros:
    """Nothing of a bias that is added once, by the first rank."""

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """See `Cut`."""
        return tuple(whole)

    def part(self, whole: Tensor) -> Tensor:
        """See `Cut`."""
        return torch.zeros_like(whole)


class RankTensors:
    """A checkpoint's tensors as one rank reads them. A `TensorSource`."""

    def __init__(self, whole: TensorSource, cuts: Mapping[str, Cut]) -> None:
        """`whole` has the tensors of the whole decoder, in their shapes; those without a cut are read whole."""
        self._whole, self._cuts = whole, cuts
        self.stored = {
            name: StoredTensor(cuts[name].shape(one.shape), one.dtype) if name in cuts else one
            for name, one in whole.stored.items()
        }

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        tensor = self._whole.read(name)
        return self._cuts[name].part(tensor) if name in self._cuts else tensor


def cuts_of(spec: DecoderSpec, names: WeightNames, rank: int, ranks: int) -> dict[str, Cut]:
    """The cuts of a rank by whole names, of tensors that a checkpoint may have."""
    cutter = _Cutter(rank, ranks, spec.hidden_size)
    rows = -(-spec.vocabulary_size // ranks)
    own = range(min(spec.vocabulary_size, rank * rows), min(spec.vocabulary_size, (rank + 1) * rows))
    tokens = Spans(0, (own,), rows - len(own))
    cuts: dict[str, Cut] = {
        f"{names.embedding}.weight": tokens,
        f"{names.head}.weight": tokens,
        f"{names.head}.bias": tokens,
    }
    for index, layer in enumerate(spec.layers):
        for name, cut in (*cutter.attention(layer, names), *cutter.mlp(layer.mlp, names)):
            cuts |= {names.in_layer(name, index, expert): cut for expert in _experts(layer.mlp, name)}
    return cuts


def _experts(mlp: object, name: str) -> range:
    return range(mlp.count if isinstance(mlp, ExpertsSpec) and "{expert}" in name else 1)


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Names within a layer, and their cuts."""

    rank: int
    ranks: int
    hidden_size: int

    def attention(self, layer: LayerSpec, names: WeightNames) -> Iterator[tuple[str, Cut]]:
        spec = layer.attention
        assert spec is not None and not isinstance(spec, StateSpaceSpec), "`rank_share` refuses them"
        if isinstance(spec, RecurrentSpec):
            yield from self._recurrent(spec, names)
            return
        heads = self._block(spec.heads)
        if isinstance(spec, LatentSpec):
            for name in (names.query, names.query_expanding):
                yield f"{name}.weight", Spans(0, (_scaled(heads, spec.query_width),))
            yield f"{names.expanding}.weight", Spans(0, (_scaled(heads, spec.plain + spec.value),))
            yield from self._last(names.out, _scaled(heads, spec.value))
            return
        keys = kv_heads_of(spec.kv_heads, self.rank, self.ranks)
        yield from _with_bias(_above_another(names.qkv, self._projections(spec, heads, keys)))
        yield from self._last(names.out, _scaled(heads, spec.width_of_values))
        yield names.sinks, Spans(0, (heads,))
        if spec.output_gate is not None:
            each = 1 if spec.output_gate.per_head else spec.width_of_values
            yield f"{names.output_gate}.weight", Spans(0, (_scaled(heads, each),))
        if spec.head_norm is not None and spec.head_norm.scope == "each_head":
            for name, own in ((names.query_norm, heads), (names.key_norm, keys)):
                yield from ((f"{name}.{suffix}", Spans(0, (own,))) for suffix in ("weight", "bias"))

    def _projections(self, spec: AttentionSpec, heads: range, keys: range) -> list[tuple[int, range]]:
        """Rows of queries, keys and values, and which of them are the rank's."""
        # Each head's query and gate are neighbours.
        width, queries = spec.head_width, spec.head_width * (2 if spec.gated else 1)
        own_keys, own_values = ((spec.kv_heads * one, _scaled(keys, one)) for one in (width, spec.width_of_values))
        return [(spec.heads * queries, _scaled(heads, queries)), own_keys, own_values]

    def _recurrent(self, spec: GatedConvolutionSpec | DeltaNetSpec, names: WeightNames) -> Iterator[tuple[str, Cut]]:
        if isinstance(spec, GatedConvolutionSpec):
            own = self._block(self.hidden_size)
            yield from _with_bias(_above_another(names.mixer_in, [(self.hidden_size, own)] * 3))
            yield from _with_bias([(names.convolution, Spans(0, (own,)))])
            yield from self._last(names.mixer_out, own)
            return
        key_heads, heads, group = self._block(spec.key_heads), self._block(spec.heads), spec.heads // spec.key_heads
        keys = spec.key_heads * spec.key_width, _scaled(key_heads, spec.key_width)
        values = spec.heads * spec.value_width, _scaled(heads, spec.value_width)
        channels = [keys, keys, values]
        if len(names.mixer_in) > 1:
            of_channels, of_gate = names.mixer_in
            yield from _with_bias([*_above_another([of_channels], channels), *_above_another([of_gate], [values])])
        else:
            # Each key head's rows of all parts are neighbours.
            each = 2 * (spec.key_width + group * spec.value_width)
            yield f"{names.mixer_in[0]}.weight", Spans(0, (_scaled(key_heads, each),))
        beside = len(names.mixer_gates) == 1
        for name in names.mixer_gates:
            yield f"{name}.weight", Spans(0, (_scaled(key_heads, 2 * group) if beside else heads,))
        yield from _with_bias(_above_another([names.convolution], channels))
        yield from ((name, Spans(0, (heads,))) for name in (names.decay, names.decay_bias))
        yield from self._last(names.mixer_out, values[1])

    def mlp(self, spec: object, names: WeightNames) -> Iterator[tuple[str, Cut]]:
        assert isinstance(spec, MLPSpec | ExpertsSpec), "`rank_share` refuses others"
        if isinstance(spec, MLPSpec):
            yield from self._feed_forward(spec, names.gate_up, names.down)
            return
        if spec.shared is not None:
            yield from self._feed_forward(spec.shared, names.shared_gate_up, names.shared_down)
        own, each = self._block(spec.width), "{expert}" in names.expert_down
        if names.experts_transposed:
            # Each number of a gate is beside its up.
            both = _scaled(own, 2)
            yield f"{names.expert_gate_up[0]}{names.expert_suffix}", Spans(2, (both,))
            yield names.expert_gate_up_bias, Spans(1, (both,))
            yield f"{names.expert_down}{names.expert_suffix}", Spans(1, (own,))
            if self.rank:
                yield names.expert_down_bias, Zeros()
            return
        # One tensor of all experts has them in its first dimension.
        before, suffix = (0, ".weight") if each else (1, names.expert_suffix)
        for name, cut in _above_another(names.expert_gate_up, [(spec.width, own)] * 2, before):
            yield f"{name}{suffix}", cut
        yield f"{names.expert_down}{suffix}", Spans(before + 1, (own,))

    def _feed_forward(self, spec: MLPSpec, gate_up: Sequence[str], down: str) -> Iterator[tuple[str, Cut]]:
        own = self._block(spec.width)
        rows = [(spec.width, own)] * (2 if spec.gated else 1)
        yield from _with_bias(_above_another(gate_up if spec.gated else gate_up[-1:], rows))
        yield from self._last(down, own)

    def _last(self, name: str, inputs: range) -> Iterator[tuple[str, Cut]]:
        """Cuts of a product whose outputs are summed over ranks."""
        yield f"{name}.weight", Spans(1, (inputs,))
        if self.rank:
            yield f"{name}.bias", Zeros()

    def _block(self, whole: int) -> range:
        each = whole // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)


def _scaled(span: range, width: int) -> range:
    return range(span.start * width, span.stop * width)


def _above_another(
    names: Sequence[str], rows: Sequence[tuple[int, range]], dimension: int = 0
) -> Iterator[tuple[str, Cut]]:
    """Cuts of tensors of so many rows each, of which the ranges are the rank's; or of the one tensor that has them
    all."""
    spans, start = [], 0
    for length, own in rows:
        spans.append(range(start + own.start, start + own.stop))
        start += length
    for place, name in enumerate(names):
        cut = Spans(dimension, tuple(spans)) if len(names) == 1 else Spans(dimension, (rows[place][1],))
        yield name, cut


def _with_bias(modules: Iterable[tuple[str, Cut]]) -> Iterator[tuple[str, Cut]]:
    """Cuts of the rows of modules as those of their weights and biases."""
    for name, cut in modules:
        yield from ((f"{name}.{suffix}", cut) for suffix in ("weight", "bias"))
