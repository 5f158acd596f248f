"""What a decoder computes, as data: kinds of layers in order, norms, residuals, scales, rotary embedding, experts.

Symbols: R rows, H hidden size, Hq query heads, Hkv key heads, D width of a head, E experts, I width of an MLP.

A description has no tensor names and no library's types: `tree_models.families` makes one of a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "xielu"]
# What a norm of queries and keys runs over: each head with the same weights, each head with its own weights, or all
# heads together.
HeadNormScope = Literal["head", "each_head", "all_heads"]


class FamilyRefused(ValueError):
    """A configuration describes what our layers do not compute; the message names it, in one line."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the hidden size, or over heads."""

    # "none" leaves rows as they are, and "affine" norms nothing: (row + bias) * weight.
    kind: Literal["rms", "layer", "none", "affine"]
    epsilon: float
    offset: float = 0.0  # added to the stored weight: Gemma and Nemotron store a weight less one
    scale: float = 1.0  # of the stored weight
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """A norm of queries and of keys, before they are rotated."""

    norm: NormSpec
    scope: HeadNormScope = "head"
    after_rotary: bool = False  # once they are rotated


@dataclass(frozen=True, slots=True)
class PositionScale:
    """Queries times 1 + beta * log(1 + floor((position + ahead) / length)), as Llama 4 and Ministral 3 have it."""

    beta: float
    length: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary embedding of the first numbers of a head."""

    frequencies: tuple[float, ...]  # the angle per position of each pair of numbers; twice as many numbers are rotated
    scaling: float = 1.0  # of cosines and sines
    # Whether a pair is numbers 2 i and 2 i + 1; else i and i + half of the rotated ones.
    interleaved: bool = False
    backwards: bool = False  # pairs turn the other way
    query_scale: PositionScale | None = None
    # By key head: one number more of each key is its position times this, in bfloat16, and of each query is one. Scores
    # so fall with distance as transformers' Falcon rounds it (ALiBi).
    place_slopes: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers of a head are rotated."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class OutputGateSpec:
    """A gate of attention's output, a product of the rows that queries are made of."""

    activation: Literal["sigmoid", "softplus"]
    per_head: bool = False  # one number for each head, else one for each number of a head


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over all earlier tokens, or those within a window.

    `compressed`: queries and keys are convolved over three tokens, and half of the values are of the token before, so
    that the layer keeps a state beside keys and values (CCA, arXiv 2510.04476); see `CompressedAttention`. Where ranks
    have some heads each, values are "sums" of both halves, of which one is zero.
    """

    heads: int
    kv_heads: int
    head_width: int
    scaling: float  # of the scores
    rotary: RotarySpec | None  # None where positions are not embedded
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: HeadNormSpec | None = None
    clip: float | None = None  # queries, keys and values are limited to this size
    window: int | None = None  # tokens that are seen, a row's own among them; None for all
    chunked: bool = False  # they are those of its chunk of so many positions; see `AttentionVariant`
    sinks: bool = False  # a logit of each head, one more term in its softmax's sum
    score_cap: float | None = None  # scores are cap * tanh(score / cap)
    shards: int = 0  # that the published product lies in, each of queries, values and keys (CodeGen); 0 for none
    slopes: tuple[float, ...] = ()  # by head, of what scores fall by with each position between (ALiBi); () for none
    gated: bool = False  # the output is multiplied by the sigmoid of a gate, made beside each head's query
    output_gate: OutputGateSpec | None = None
    value_scale: float = 1.0  # values are multiplied by it
    value_width: int = 0  # of a value's head; 0 for `head_width`
    value_norm: NormSpec | None = None  # of each value's head, without weights
    keys_are_values: bool = False  # values are the products that make keys, before these are normed and rotated
    # Where heads are pairs, one of each half (DiffLlama): what the factor begins with of a second head's output, which
    # is taken from the first's. Both read the values of two key heads side by side.
    differential: float | None = None
    pair_epsilon: float = 0.0  # of the norm of a pair's output
    keys_of: int | None = None  # the layer whose keys and values this one attends to, for it has none of its own
    # The same of a layer of another model, by its place in that one's cache. Rows of this layer have no keys at all.
    keys_in: int | None = None
    compressed: Literal["", "halves", "sums"] = ""

    @property
    def has_keys(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.keys_of is None and self.keys_in is None

    @property
    def width_of_keys(self) -> int:
        """Width of a key's head in the cache."""
        return self.head_width + bool(self.rotary and self.rotary.place_slopes)

    @property
    def width_of_cached_values(self) -> int:
        """Width of a value's head in the cache."""
        return self.width_of_values * (1 if self.differential is None else 2)

    @property
    def width_of_values(self) -> int:
        """Width of a value's head."""
        return self.value_width or self.head_width


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are products of one latent beside one rotary key."""

    heads: int
    latent: int  # width of the latent
    plain: int  # width of a head's query and key without their rotary part
    value: int  # width of a head's value
    scaling: float
    rotary: RotarySpec
    query_latent: int | None = None  # width of the queries' latent; None where one product makes them
    bias: bool = False  # of the products that make latents, and of the last
    latent_epsilon: float = 1e-6
    latent_scale: float = 1.0  # of the normed latent, of which keys and values are products

    @property
    def query_width(self) -> int:
        """Width of a head's query and key."""
        return self.plain + self.rotary.width


class _Unturned:
    """What is in place of attention and embeds no positions."""

    __slots__ = ()

    @property
    def rotary(self) -> None:
        """None, for whatever has it."""
        return None


@dataclass(frozen=True, slots=True)
class GatedConvolutionSpec(_Unturned):
    """A short causal convolution in place of attention, between two gates: out(c * convolve(b * x))."""

    taps: int
    bias: bool = False  # of the products and of the convolution
    width: int | None = None  # of what is convolved; None for that of hidden rows


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(_Unturned):
    """A gated delta net in place of attention: queries, keys and values go through a short convolution and SiLU, and
    the state of each head is changed by the delta rule. Heads of values share those of keys, in groups."""

    key_heads: int
    heads: int
    key_width: int
    value_width: int
    taps: int
    epsilon: float  # of the norm of the heads' outputs, which is gated
    beta_scale: float = 1.0  # 2 where the rule may turn a state's sign


@dataclass(frozen=True, slots=True)
class StateSpaceSpec(_Unturned):
    """Mamba2 in place of attention: like a delta net, but tokens are added to the state of each head as they are."""

    groups: int  # heads of keys and queries, which are called B and C there
    heads: int
    state_width: int  # of a key
    value_width: int
    taps: int
    epsilon: float  # of the norm of the gated output
    bias: bool = False  # of the products
    convolution_bias: bool = True
    step_limits: tuple[float, float] = (0.0, float("inf"))  # of the factor of a token and of its decay
    normed: bool = True  # whether the gated output is
    # Of heads, each normed by itself, and 1 for all together; also where ranks have some of the heads each.
    norm_groups: int = 1
    # Of the first product's parts: the output's gates, values, keys, queries, steps; and of the output.
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SelectiveSpec(_Unturned):
    """Mamba's selective scan in place of attention: each channel has a state of its own, and steps, keys and queries
    are products of all channels' convolved values."""

    channels: int
    state_width: int  # of a key
    taps: int
    step_rank: int  # width of what channels' steps are products of
    norm: NormSpec | None  # of that, of keys and of queries
    bias: bool = False  # of the first product and the last
    convolution_bias: bool = True
    # Of channels, each with steps, keys and queries that are products of its own values; 0 where all have the same.
    heads: int = 0


@dataclass(frozen=True, slots=True)
class GriffinSpec:
    """Griffin's recurrent block in place of attention (arXiv 2402.19427): a short convolution, and behind it a gated
    linear recurrence of each channel by itself (RG-LRU), times the activation of a gate."""

    channels: int
    blocks: int  # of channels, of which the gates of the recurrence are products, each of its own
    taps: int
    activation: Activation
    rotary: RotarySpec  # of the model's attention: a text's first token is known by its angles


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec(_Unturned):
    """Kimi Delta Attention in place of attention: a delta net each number of whose keys decays by a gate of its own."""

    heads: int
    width: int  # of a head's query, key and value, and of what gates are products of
    taps: int
    epsilon: float  # of the norm of the heads' outputs, which is gated


@dataclass(frozen=True, slots=True)
class LightningSpec(_Unturned):
    """Lightning attention in place of attention (MiniMax-01): queries, keys and values go through SiLU, tokens are
    added to the state of each head as they are, and states decay by factors that are fixed by head and layer."""

    heads: int
    width: int  # of a head's query, key and value
    epsilon: float  # of the norm of all heads' outputs together, which is gated
    layers: int  # of the decoder
    # The heads are some of so many, where ranks have some each.
    all_heads: int
    first_head: int = 0


@dataclass(frozen=True, slots=True)
class MatrixMemorySpec(_Unturned):
    """xLSTM's matrix memory in place of attention (mLSTM, arXiv 2405.04517): tokens are added to the state of each head
    by an exponential gate, and what is read is divided by what the same gates make of keys alone."""

    heads: int
    key_width: int
    value_width: int
    epsilon: float  # of the norm of each head's output, which is gated
    gate_cap: float  # both gates are cap * tanh(gate / cap)


# What keeps a state of a fixed size in place of keys and values.
RecurrentSpec = (
    GatedConvolutionSpec
    | DeltaNetSpec
    | StateSpaceSpec
    | LightningSpec
    | SelectiveSpec
    | KimiDeltaSpec
    | GriffinSpec
    | MatrixMemorySpec
)


@dataclass(frozen=True, slots=True)
class GateSpec:
    """What is done to gate and up around the activation; see `tree_kernels.linear.GateForm`."""

    limit: float = 0.0  # of the size of up, and the most that gate is; 0 for none
    limits_activated: bool = False  # what is limited is activation(gate), not gate
    offset: float = 0.0  # added to up
    scale: float = 1.0  # of gate


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """A feed-forward layer: down(activation(gate) * up), or down(activation(up)) without a gate."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate: GateSpec = GateSpec()
    scale: float = 1.0  # of the output
    # Standard deviations above a row's mean gate: where gates are below it they become 0, else what they are above.
    cutoff: float | None = None


@dataclass(frozen=True, slots=True)
class RouterMLPSpec:
    """What a router reads in place of rows (ZAYA): a product of these, with that of the layer before times stored
    numbers, goes through a norm and two products with GELU, all with biases."""

    width: int
    norm: NormSpec
    reads: bool  # whether there is a layer before
    passes: bool  # whether there is one behind


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How rows choose their experts and weigh them."""

    # "sparsemixer" is Phi-MoE's: the two best, each weighed among those whose scores are close to its own.
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalised: bool = True  # weights of the chosen sum to one
    least_sum: float = 0.0  # added to that sum
    clamped_sum: float = 0.0  # the least that it counts as
    bias: bool = False  # of the product
    correction: bool = False  # a bias that affects the choice and not the weights
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best expert's, or the sum of its two best
    scaling: float = 1.0  # of the weights
    wide: bool = False  # logits are computed in fp32
    rounded: bool = False  # weights are rounded to the model's type
    jitter: float = 0.0  # of sparsemixer: twice this relative distance is close
    norm: NormSpec | None = None  # of the rows, without weights, which are then multiplied by stored numbers / sqrt(H)
    expert_scales: bool = False  # weights are multiplied by a stored number of each expert
    mlp: RouterMLPSpec | None = None


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of the MLP."""

    count: int
    top_k: int
    width: int
    router: RouterSpec
    activation: Activation = "silu"
    gated: bool = True
    gate: GateSpec = GateSpec()
    bias: bool = False
    latent: int = 0  # width that experts read and write, between two products of the rows; 0 where that is the rows'
    shared: MLPSpec | None = None  # for every row
    shared_gate: bool = False  # whose output is weighed by the sigmoid of a product
    idle: int = 0  # behind the others, of which rows come back as they are
    idle_returns: bool = True  # or as nothing
    weighs_inputs: bool = False  # a row is multiplied by the weight of its only expert before that reads it (Llama 4)


@dataclass(frozen=True, slots=True)
class DenseAndExpertsSpec:
    """An MLP and a mixture of experts side by side, each between norms of its own; the router reads rows that neither
    has normed (Gemma 4)."""

    dense: MLPSpec
    experts: ExpertsSpec
    norm: NormSpec  # before and behind each


@dataclass(frozen=True, slots=True)
class AddedInputSpec:
    """What a layer adds last: norm(projection(activation(gate(rows)) * vectors))."""

    width: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """Where the vectors of a token for each layer come from: one is looked up by the token, another projected from its
    embedding and normed."""

    vocabulary_size: int
    layers: int
    width: int
    norm: NormSpec
    known: int | None = None  # tokens from here on read what token 0 does


@dataclass(frozen=True, slots=True)
class NormedResidualSpec:
    """The residual of each half is the normed rows that it reads, and is weighed as its output is (MiniMax-01):
    kept * rows + added * output."""

    attention: tuple[float, float]  # kept, added
    mlp: tuple[float, float]


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several streams of hidden rows, of which layers compute the first and mix all by a router (AltUp, arXiv
    2301.13310). An added input is added to all others."""

    count: int
    norm: NormSpec  # of what the router reads
    scaled: bool  # whether an added input reads the first stream times stored numbers


@dataclass(frozen=True, slots=True)
class LaurelSpec:
    """A learned augmented residual (LAuReL, arXiv 2411.07501): behind attention the rows are those and the normed rows
    with a product of low rank, normed, over the root of 2."""

    rank: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class SharedBlockSpec:
    """Attention and an MLP in front of a layer, whose weights several layers share (Zamba): of hidden rows beside
    embedded ones they make what is added to the rows that the layer's states read, and to no residual."""

    first: int  # of the layers with these weights
    place: int  # among all layers with a block: the adapters are the layer's own
    adapter: int  # width that adapters go through; 0 for none of attention's
    norm: NormSpec  # of both kinds of rows together
    mlp_norm: NormSpec
    mlp: MLPSpec
    mlp_adapter: int  # 0 for none


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    `parallel`: attention and MLP read the same normed rows, or the MLP those of a norm of its own, and both are added
    to the residual.
    """

    # One of both may be absent, and its norms with it.
    attention: AttentionSpec | LatentSpec | RecurrentSpec | None  # or what is in its place
    mlp: MLPSpec | ExpertsSpec | DenseAndExpertsSpec | None
    before_attention: NormSpec | None
    before_mlp: NormSpec | None
    after_attention: NormSpec | None = None
    after_mlp: NormSpec | None = None
    parallel: bool = False
    norms_sums: bool = False  # the norms behind are of the residual with the output
    residual_scale: float = 1.0  # of what attention and MLP add
    normed_residual: NormedResidualSpec | None = None
    residual_norm: NormSpec | None = None  # of the residual of each half, by weights of its own
    beside: StateSpaceSpec | SelectiveSpec | None = None  # what reads the same rows as attention, and is added with it
    # Experts that read what the MLP does; what they make is added behind the next layer (LongCat's shortcut).
    ahead: ExpertsSpec | None = None
    added_input: AddedInputSpec | None = None
    scaled: bool = False  # the layer's output is multiplied by a stored number
    streams: StreamsSpec | None = None
    laurel: LaurelSpec | None = None
    shared: SharedBlockSpec | None = None  # whose attention this is; then `beside` reads what it makes

    @property
    def states(self) -> list[RecurrentSpec | AttentionSpec]:
        """What keeps states."""
        own = self.attention
        compressed = [own] if isinstance(own, AttentionSpec) and own.compressed else []
        return [*compressed, *(spec for spec in (own, self.beside) if isinstance(spec, RecurrentSpec))]

    @property
    def router_mlp(self) -> RouterMLPSpec | None:
        """What its router reads, where that is not its rows."""
        return self.mlp.router.mlp if isinstance(self.mlp, ExpertsSpec) else None

    @property
    def rotary(self) -> RotarySpec | None:
        """That of attention; None where positions are not embedded."""
        return None if self.attention is None else self.attention.rotary

    # Vectors side by side that attention reads. More than one, as in the first layer of an EAGLE-3 head, are normed
    # outside and given.
    read_vectors: int = 1
