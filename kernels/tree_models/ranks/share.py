"""What one rank computes, and what it reads for it: the whole decoder with fewer heads, narrower MLPs and fewer tokens.

Every rank's share is alike, so all ranks run the same shapes. Where there are fewer key heads than ranks, several ranks
have the same one. Norms of hidden rows, routers, gates, products to and from a latent, and what a layer adds of its own
vector are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from typing import Any

from tree_models.decoder_spec import DecoderSpec
from tree_models.names import WeightNames
from tree_models.ranks.cuts import Cut, Spans, Zeros
from tree_models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    DenseAndExpertsSpec,
    ExpertsSpec,
    FamilyRefused,
    GatedConvolutionSpec,
    GriffinSpec,
    KimiDeltaSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    MatrixMemorySpec,
    MLPSpec,
    SelectiveSpec,
    SharedBlockSpec,
    StateSpaceSpec,
)

# Cuts by names, of tensors that a checkpoint may have.
_Cuts = Iterable[tuple[str, Cut]]


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's part of a decoder: its description, and the cuts of tensors by their whole names."""

    spec: DecoderSpec
    cuts: Mapping[str, Cut]


def share_of(spec: DecoderSpec, names: WeightNames, rank: int, ranks: int) -> RankShare:
    """The share of a rank of so many. Raises `FamilyRefused` where the decoder cannot be divided so."""
    divider = _Divider(names, rank, ranks, spec.hidden_size)
    tokens, cut = divider.tokens(spec.vocabulary_size)
    cuts: dict[str, Cut] = {
        f"{names.embedding}.weight": cut,
        f"{names.head}.weight": cut,
        f"{names.head}.bias": cut,
    }
    inputs = spec.layer_inputs
    if inputs is not None:
        rows, cuts[f"{names.layer_inputs}.weight"] = divider.tokens(inputs.vocabulary_size)
        inputs = replace(inputs, vocabulary_size=rows)
    layers, of_layers = share_of_layers(spec.layers, names, rank, ranks, spec.hidden_size)
    divided_spec = replace(spec, vocabulary_size=tokens, layers=layers, layer_inputs=inputs, unread_tokens=0)
    return RankShare(divided_spec, cuts | of_layers)


def share_of_layers(
    layers: Sequence[LayerSpec], names: WeightNames, rank: int, ranks: int, hidden_size: int
) -> tuple[tuple[LayerSpec, ...], dict[str, Cut]]:
    """As `share_of`, of layers one behind another alone: their descriptions, and the cuts of their tensors."""
    divider, cuts = _Divider(names, rank, ranks, hidden_size), dict[str, Cut]()
    divided = {layer: divider.layer(layer) for layer in dict.fromkeys(layers)}
    for index, layer in enumerate(layers):
        for name, cut in divided[layer][1]:
            if names.by_columns and name.endswith(".weight") and isinstance(cut, Spans):
                cut = replace(cut, dimension=1 - cut.dimension)
            numbers = range(len(layers)) if layer.shared is not None else _experts(layer.ahead or layer.mlp, name)
            cuts |= {names.in_layer(name, index, number): cut for number in numbers}
    return tuple(divided[layer][0] for layer in layers), cuts


def _experts(mlp: MLPSpec | ExpertsSpec | DenseAndExpertsSpec | None, name: str) -> range:
    experts = mlp.experts if isinstance(mlp, DenseAndExpertsSpec) else mlp
    return range(experts.count if isinstance(experts, ExpertsSpec) and "{expert}" in name else 1)


@dataclass(frozen=True, slots=True)
class _Divider:
    """A rank's part of each kind of description, with the cuts of its tensors by their names within a layer."""

    names: WeightNames
    rank: int
    ranks: int
    hidden_size: int

    def tokens(self, count: int) -> tuple[int, Cut]:
        """How many rows of a table of `count` tokens each rank has; the last one's are filled up with zeros."""
        rows = -(-count // self.ranks)
        own = range(min(count, self.rank * rows), min(count, (self.rank + 1) * rows))
        return rows, Spans(0, (own,), rows - len(own))

    def layer(self, layer: LayerSpec) -> tuple[LayerSpec, list[tuple[str, Cut]]]:
        parts = {name: getattr(layer, name) for name in ("attention", "beside", "mlp", "ahead")}
        block, cuts = layer.shared, list[tuple[str, Cut]]()
        if block is not None and isinstance(layer.attention, AttentionSpec):
            block, of_block = self._shared_block(block, layer.attention)
            cuts += of_block
        for name, part in parts.items():
            if part is not None:
                parts[name], of_part = self._part(part)
                cuts += of_part
        return replace(layer, **parts, shared=block), cuts

    @singledispatchmethod
    def _part(self, spec: Any) -> tuple[Any, _Cuts]:
        """The share of a mixer or of what follows it: the method of its kind."""
        raise NotImplementedError(type(spec))

    def _pairs(self, spec: AttentionSpec) -> tuple[AttentionSpec, _Cuts]:
        """Of heads that are pairs: the rank's own of each half."""
        names, width = self.names, spec.head_width
        heads = self._block(spec.heads // 2, "pairs of heads")
        keys = self._shared_heads(spec.kv_heads // 2, "pairs of key heads")
        rows = []
        for name, own, half in zip(names.qkv, (heads, keys, keys), (spec.heads, *[spec.kv_heads] * 2), strict=True):
            first = _scaled(own, width)
            start = half // 2 * width
            rows.append((name, Spans(0, (first, range(start + first.start, start + first.stop)))))
        cuts = [*_with_bias(rows), *self._last(names.out, heads, 2 * width)]
        return replace(spec, heads=2 * len(heads), kv_heads=2 * len(keys)), cuts

    def _compressed(self, spec: AttentionSpec) -> tuple[AttentionSpec, _Cuts]:
        """Half of the ranks have values of the token, the others those of the token before."""
        names, heads, width = self.names, self._block(spec.heads, "attention heads"), spec.head_width
        keys, half = self._block(spec.kv_heads, "key heads"), spec.kv_heads * width // 2
        if self.ranks % 2:
            raise FamilyRefused(f"{self.ranks} ranks: values of two tokens are not divided by an odd number")
        queries, own = _scaled(heads, width), _scaled(keys, width)
        is_first = own.stop <= half
        values = own if is_first else range(own.start - half, own.stop - half)
        some, none = Spans(0, (values,)), Spans(0, (), len(own))
        rows = Spans(0, (queries,)), Spans(0, (own,)), *((some, none) if is_first else (none, some))
        cuts = [*_with_bias(zip(names.qkv, rows, strict=True))]
        behind = spec.heads * width
        channels = Spans(0, (queries, range(behind + own.start, behind + own.stop)))
        cuts += _with_bias([(names.convolution, channels), (names.head_convolution, channels)])
        cuts += [(names.key_norm, Spans(0, (keys,))), *self._last(names.out, heads, width)]
        return replace(spec, heads=len(heads), kv_heads=len(keys), compressed="sums"), cuts

    @_part.register
    def _attention(self, spec: AttentionSpec) -> tuple[AttentionSpec, _Cuts]:
        if spec.differential is not None:
            return self._pairs(spec)
        if spec.compressed:
            return self._compressed(spec)
        names, heads = self.names, self._block(spec.heads, "attention heads")
        keys = self._shared_heads(spec.kv_heads, "key heads")
        # Each head's query and gate are neighbours.
        width, queries = spec.head_width, spec.head_width * (2 if spec.gated else 1)
        rows = [(spec.heads * queries, _scaled(heads, queries))]
        if spec.has_keys:
            rows.append((spec.kv_heads * width, _scaled(keys, width)))
            values = spec.width_of_values
            rows += [] if spec.keys_are_values else [(spec.kv_heads * values, _scaled(keys, values))]
        of_rows = _above_another(names.qkv, rows)
        if names.qkv_by_group:
            of_rows = iter([(names.qkv[0], _by_group(spec, heads, keys))])
        if spec.shards:
            # Whole ones, with their heads.
            own = _scaled(self._block(spec.shards, "shards of heads"), 3 * spec.heads * width // spec.shards)
            of_rows = iter([(names.qkv[0], Spans(0, (own,)))])
        cuts = [*_with_bias(of_rows), *self._last(names.out, heads, spec.width_of_values)]
        cuts.append((names.sinks, Spans(0, (heads,))))
        if spec.output_gate is not None:
            each = 1 if spec.output_gate.per_head else spec.width_of_values
            cuts.append((f"{names.output_gate}.weight", Spans(0, (_scaled(heads, each),))))
        if spec.head_norm is not None and spec.head_norm.scope != "head":
            each = width if spec.head_norm.scope == "all_heads" else 1
            norms = [(names.query_norm, Spans(0, (_scaled(heads, each),)))]
            norms.append((names.key_norm, Spans(0, (_scaled(keys, each),))))
            cuts += _with_bias(norms)
        slopes, turning = spec.slopes[heads.start : heads.stop], spec.rotary
        if turning is not None and turning.place_slopes:
            turning = replace(turning, place_slopes=turning.place_slopes[keys.start : keys.stop])
        shards = spec.shards // self.ranks
        divided = replace(spec, heads=len(heads), kv_heads=len(keys), shards=shards, slopes=slopes, rotary=turning)
        return divided, cuts

    def _shared_block(self, spec: SharedBlockSpec, attention: AttentionSpec) -> tuple[SharedBlockSpec, _Cuts]:
        """But for the attention's own tensors."""
        names, width = self.names, attention.head_width
        mlp, of_mlp = self._feed_forward(spec.mlp, names.gate_up, names.down, "an MLP")
        cuts, keys = list(of_mlp), self._shared_heads(attention.kv_heads, "key heads")
        every = self._block(attention.heads, "attention heads"), keys, keys
        cuts += [
            (f"{name}.1.weight", Spans(0, (_scaled(heads, width),)))
            for name, heads in zip(names.qkv_adapters, every, strict=False)
        ]
        own = self._block(spec.mlp.width, "numbers of an MLP")
        rows = [(spec.mlp.width, own)] * 2
        cuts += [(f"{name}.1.weight", next(_above_another([name], rows))[1]) for name in names.gate_up_adapters]
        return replace(spec, mlp=mlp), cuts

    @_part.register
    def _latent(self, spec: LatentSpec) -> tuple[LatentSpec, _Cuts]:
        names, heads = self.names, self._block(spec.heads, "attention heads")
        rows = Spans(0, (_scaled(heads, spec.query_width),))
        cuts: list[tuple[str, Cut]] = [(f"{name}.weight", rows) for name in (names.query, names.query_expanding)]
        cuts.append((f"{names.expanding}.weight", Spans(0, (_scaled(heads, spec.plain + spec.value),))))
        return replace(spec, heads=len(heads)), [*cuts, *self._last(names.out, heads, spec.value)]

    @_part.register
    def _convolution(self, spec: GatedConvolutionSpec) -> tuple[GatedConvolutionSpec, _Cuts]:
        names, own = self.names, self._block(self.hidden_size, "numbers of a convolution")
        rows = _above_another(names.mixer_in, [(self.hidden_size, own)] * 3)
        cuts = _with_bias([*rows, (names.convolution, Spans(0, (own,)))])
        return replace(spec, width=len(own)), [*cuts, *self._last(names.mixer_out, own)]

    @_part.register
    def _delta_net(self, spec: DeltaNetSpec) -> tuple[DeltaNetSpec, _Cuts]:
        # Heads of values stay with their head of keys.
        names, key_heads = self.names, self._block(spec.key_heads, "key heads of a delta net")
        group = spec.heads // spec.key_heads
        heads = _scaled(key_heads, group)
        keys = spec.key_heads * spec.key_width, _scaled(key_heads, spec.key_width)
        values = spec.heads * spec.value_width, _scaled(heads, spec.value_width)
        channels, cuts = [keys, keys, values], list[tuple[str, Cut]]()
        if len(names.mixer_in) > 2:
            cuts += _with_bias(_above_another(names.mixer_in, [*channels, values]))
        elif len(names.mixer_in) > 1:
            of_channels, of_gate = names.mixer_in
            cuts += _with_bias([*_above_another([of_channels], channels), *_above_another([of_gate], [values])])
        else:
            # Each key head's rows of all parts are neighbours.
            each = 2 * (spec.key_width + group * spec.value_width)
            cuts.append((f"{names.mixer_in[0]}.weight", Spans(0, (_scaled(key_heads, each),))))
        gates = Spans(0, (_scaled(key_heads, 2 * group) if len(names.mixer_gates) == 1 else heads,))
        cuts += [(f"{name}.weight", gates) for name in names.mixer_gates]
        cuts += _with_bias(_above_another([names.convolution], channels))
        cuts += [(name, Spans(0, (heads,))) for name in (names.decay, names.decay_bias)]
        cuts += self._last(names.mixer_out, heads, spec.value_width)
        return replace(spec, key_heads=len(key_heads), heads=len(heads)), cuts

    @_part.register
    def _lightning(self, spec: LightningSpec) -> tuple[LightningSpec, _Cuts]:
        names, heads = self.names, self._block(spec.heads, "heads of lightning attention")
        of_heads, of_gate = names.mixer_in
        rows = [(of_heads, Spans(0, (_scaled(heads, 3 * spec.width),)))]
        values = Spans(0, (_scaled(heads, spec.width),))
        cuts = list(_with_bias([*rows, (of_gate, values), (names.mixer_norm, values)]))
        cuts += self._last(names.mixer_out, heads, spec.width)
        return replace(spec, heads=len(heads), first_head=heads.start), cuts

    @_part.register
    def _matrix_memory(self, spec: MatrixMemorySpec) -> tuple[MatrixMemorySpec, _Cuts]:
        names, heads = self.names, self._block(spec.heads, "heads of matrix memories")
        keys = spec.heads * spec.key_width, _scaled(heads, spec.key_width)
        values = spec.heads * spec.value_width, _scaled(heads, spec.value_width)
        rows = [*_above_another(names.mixer_in, [keys, keys, values, values])]
        rows += _above_another(names.mixer_gates, [(spec.heads, heads)] * 2)
        cuts = [*_with_bias([*rows, (names.mixer_norm, Spans(0, (values[1],)))])]
        return replace(spec, heads=len(heads)), [*cuts, *self._last(names.mixer_out, heads, spec.value_width)]

    @_part.register
    def _kimi_delta(self, spec: KimiDeltaSpec) -> tuple[KimiDeltaSpec, _Cuts]:
        names, heads = self.names, self._block(spec.heads, "heads of Kimi Delta Attention")
        own, whole = _scaled(heads, spec.width), range(spec.width)
        channels = [(spec.heads * spec.width, own)] * 3
        rows = [*channels, (spec.width, whole), (spec.width, whole), (spec.heads, heads)]
        cuts = list(_with_bias([*_above_another(names.mixer_in, rows), *_above_another([names.convolution], channels)]))
        cuts += [(f"{name}.weight", Spans(0, (own,))) for name in names.mixer_gates]
        cuts += [(names.decay, Spans(2, (heads,))), (names.decay_bias, Spans(0, (own,)))]
        return replace(spec, heads=len(heads)), [*cuts, *self._last(names.mixer_out, heads, spec.width)]

    @_part.register
    def _selective(self, spec: SelectiveSpec) -> tuple[SelectiveSpec, _Cuts]:
        if spec.heads:
            return self._selective_heads(spec)
        names, own = self.names, self._block(spec.channels, "channels of a selective scan")
        rows = _above_another(names.mixer_in, [(spec.channels, own)] * 2)
        cuts = list(_with_bias([*rows, (names.convolution, Spans(0, (own,))), (names.steps, Spans(0, (own,)))]))
        cuts.append((f"{names.selection}.weight", Spans(1, (own,))))
        cuts += [(name, Spans(0, (own,))) for name in (names.decay, names.skip)]
        return replace(spec, channels=len(own)), [*cuts, *self._last(names.mixer_out, own)]

    def _selective_heads(self, spec: SelectiveSpec) -> tuple[SelectiveSpec, _Cuts]:
        names, heads = self.names, self._block(spec.heads, "heads of a selective scan")
        own = _scaled(heads, spec.channels // spec.heads)
        # Each channel's value is beside its gate.
        rows = [(name, Spans(0, (_scaled(own, 2),))) for name in names.mixer_in]
        cuts = list(_with_bias([*rows, (names.convolution, Spans(0, (own,)))]))
        of_heads = f"{names.selection}_weight", f"{names.steps}_weight", f"{names.steps}_bias", names.decay, names.skip
        cuts += [(name, Spans(0, (heads,))) for name in of_heads]
        return replace(spec, channels=len(own), heads=len(heads)), [*cuts, *self._last(names.mixer_out, own)]

    @_part.register
    def _griffin(self, spec: GriffinSpec) -> tuple[GriffinSpec, _Cuts]:
        names, blocks = self.names, self._block(spec.blocks, "blocks of a recurrence's channels")
        own = _scaled(blocks, spec.channels // spec.blocks)
        rows = _above_another(names.mixer_in, [(spec.channels, own)] * 2)
        cuts = list(_with_bias([*rows, (names.convolution, Spans(0, (own,)))]))
        cuts += [(f"{gate}_{of}", Spans(0, (blocks,))) for gate in names.mixer_gates for of in ("weight", "bias")]
        cuts.append((names.decay, Spans(0, (own,))))
        return replace(spec, channels=len(own), blocks=len(blocks)), [*cuts, *self._last(names.mixer_out, own)]

    @_part.register
    def _state_space(self, spec: StateSpaceSpec) -> tuple[StateSpaceSpec, _Cuts]:
        names, heads = self.names, self._block(spec.heads, "heads of Mamba2")
        groups = self._shared_heads(spec.groups, "groups of Mamba2")
        self._shared_heads(spec.norm_groups, "groups of heads that Mamba2 norms")
        keys = spec.groups * spec.state_width, _scaled(groups, spec.state_width)
        values = spec.heads * spec.value_width, _scaled(heads, spec.value_width)
        channels = [values, keys, keys]
        rows = _above_another(names.mixer_in, [values, *channels, (spec.heads, heads)])
        cuts = list(_with_bias([*rows, *_above_another([names.convolution], channels)]))
        cuts += [(name, Spans(0, (heads,))) for name in (names.decay, names.decay_bias, names.skip)]
        cuts.append((f"{names.mixer_norm}.weight", Spans(0, (values[1],))))
        cuts += self._last(names.mixer_out, heads, spec.value_width)
        return replace(spec, groups=len(groups), heads=len(heads)), cuts

    @_part.register
    def _mlp(self, spec: MLPSpec) -> tuple[MLPSpec, _Cuts]:
        return self._feed_forward(spec, self.names.gate_up, self.names.down, "an MLP")

    @_part.register
    def _dense_and_experts(self, spec: DenseAndExpertsSpec) -> tuple[DenseAndExpertsSpec, _Cuts]:
        dense, of_dense = self._mlp(spec.dense)
        experts, of_experts = self._mixture(spec.experts)
        return replace(spec, dense=dense, experts=experts), [*of_dense, *of_experts]

    @_part.register
    def _mixture(self, spec: ExpertsSpec) -> tuple[ExpertsSpec, _Cuts]:
        names, own, shared = self.names, self._block(spec.width, "numbers of an expert"), spec.shared
        cuts = list[tuple[str, Cut]]()
        if shared is not None:
            of_shared: _Cuts
            shared, of_shared = self._feed_forward(shared, names.shared_gate_up, names.shared_down, "the shared expert")
            cuts += of_shared
        if names.experts_lie == "flat":
            starts = range(0, spec.count * spec.width, spec.width)
            of_all = Spans(0, tuple(range(start + own.start, start + own.stop) for start in starts))
            cuts += [(f"{name}{names.expert_suffix}", of_all) for name in (*names.expert_gate_up, names.expert_down)]
        elif names.experts_lie == "by_columns":
            ((gate_up, cut),) = _above_another(names.expert_gate_up, [(spec.width, own)] * 2, 2)
            cuts.append((f"{gate_up}{names.expert_suffix}", cut))
            cuts.append((f"{names.expert_down}{names.expert_suffix}", Spans(1, (own,))))
        elif names.experts_lie == "by_neighbours":
            # Each number of a gate is beside its up.
            both = _scaled(own, 2)
            cuts.append((f"{names.expert_gate_up[0]}{names.expert_suffix}", Spans(2, (both,))))
            cuts.append((names.expert_gate_up_bias, Spans(1, (both,))))
            cuts.append((f"{names.expert_down}{names.expert_suffix}", Spans(1, (own,))))
            cuts += [(names.expert_down_bias, Zeros())] if self.rank else []
        else:
            # One tensor of all experts has them in its first dimension.
            before, suffix = (0, ".weight") if "{expert}" in names.expert_down else (1, names.expert_suffix)
            rows = [(spec.width, own)] * (2 if spec.gated else 1)
            cuts += [(f"{name}{suffix}", cut) for name, cut in _above_another(names.expert_gate_up, rows, before)]
            cuts.append((f"{names.expert_down}{suffix}", Spans(before + 1, (own,))))
        return replace(spec, width=len(own), shared=shared), cuts

    def _feed_forward(self, spec: MLPSpec, gate_up: Sequence[str], down: str, what: str) -> tuple[MLPSpec, _Cuts]:
        own = self._block(spec.width, f"numbers of {what}")
        rows = [(spec.width, own)] * (2 if spec.gated else 1)
        cuts = _with_bias(_above_another(gate_up if spec.gated else gate_up[-1:], rows))
        return replace(spec, width=len(own)), [*cuts, *self._last(down, own)]

    def _last(self, name: str, inputs: range, width: int = 1) -> _Cuts:
        """Cuts of a product of inputs of a width each, whose outputs are summed over ranks."""
        yield f"{name}.weight", Spans(1, (_scaled(inputs, width),))
        if self.rank:
            yield f"{name}.bias", Zeros()

    def _block(self, whole: int, what: str) -> range:
        if whole % self.ranks:
            raise FamilyRefused(f"{self.ranks} ranks: {whole} {what} cannot be divided by them")
        each = whole // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def _shared_heads(self, whole: int, what: str) -> range:
        """The rank's own, or the one that it has in common with others."""
        if whole % self.ranks == 0:
            return self._block(whole, what)
        if self.ranks % whole:
            raise FamilyRefused(f"{self.ranks} ranks: {whole} {what} can neither be divided nor repeated")
        own = self.rank * whole // self.ranks
        return range(own, own + 1)


def _scaled(span: range, width: int) -> range:
    return range(span.start * width, span.stop * width)


def _by_group(spec: AttentionSpec, heads: range, keys: range) -> Cut:
    """The cut of a tensor that has for each key head the queries that read it, its keys and its values."""
    group, width, spans = spec.heads // spec.kv_heads, spec.head_width, list[range]()
    for key in keys:
        first = key * group
        own = range(max(heads.start, first), min(heads.stop, first + group))
        start = 2 * key * width
        spans.append(range(start + own.start * width, start + own.stop * width))
        spans.append(range(start + (first + group) * width, start + (first + group + 2) * width))
    return Spans(0, tuple(spans))


def _above_another(
    names: Sequence[str], rows: Sequence[tuple[int, range]], dimension: int = 0
) -> Iterator[tuple[str, Cut]]:
    """Cuts of tensors of so many rows each, of which the ranges are the rank's; or of the one tensor that has them all.
    Names without rows are of tensors that are not there."""
    spans, start = [], 0
    for length, own in rows:
        spans.append(range(start + own.start, start + own.stop))
        start += length
    if len(names) == 1:
        yield names[0], Spans(dimension, tuple(spans))
        return
    for name, (_, own) in zip(names[: len(rows)], rows, strict=True):
        yield name, Spans(dimension, (own,))


def _with_bias(modules: _Cuts) -> Iterator[tuple[str, Cut]]:
    """Cuts of the rows of modules as those of their weights and biases."""
    for name, cut in modules:
        yield from ((f"{name}.{suffix}", cut) for suffix in ("weight", "bias"))
