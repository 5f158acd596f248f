"""The configuration of an EAGLE head or of an MTP module, in one form for every checkpoint layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

from draft_service.checkpoints.facts import HeadShape
from outrider.heads import HeadRefused
from tree_models.families.rotary import rotary
from tree_models.names import WeightNames
from tree_models.spec import AttentionSpec, HeadNormSpec, LayerSpec, MLPSpec, NormSpec, RotarySpec

HeadKind = Literal["eagle", "eagle3", "mtp"]
# Of a layer's weights in `EagleHead`, where they are Llama's.
LAYER_NAMES = WeightNames(embedding="embed_tokens", layer="layers.{layer}.")


@dataclass(frozen=True, slots=True)
class LayeredShape(HeadShape):
    """What heads with decoder layers have in common."""

    # "eagle" for EAGLE-1 and EAGLE-2, which have the same weights; "eagle3" for EAGLE-3 and EAGLE-3.1; "mtp" for a
    # target's own multi-token-prediction module.
    kind: HeadKind
    hidden_size: int
    _: KW_ONLY
    num_features: int = 1  # hidden states that are captured for each token: 3 for EAGLE-3, 1 otherwise
    # Decoder layers of the target whose outputs are captured, counted from 0; the number of layers stands for the state
    # after the last norm. None derives them from the target's number of layers.
    feature_layers: tuple[int, ...] | None = None
    max_positions: int = 2048
    norm_output: bool = False  # EAGLE-3.1: the next step reads the state after the last norm, not the one before it
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm for each captured state before `fc`
    norm_before_fc: bool = False  # one RMSNorm over the joined states before `fc`
    norm_before_residual: bool = False  # the first layer's residual is the normed feature, in EAGLE-3
    has_fc: bool = True  # an EAGLE-3 head without it reads one state, that after the target's last norm
    fc_bias: bool = False
    tied_lm_head: bool = False  # the lm_head is the target's, as in EAGLE-1 and EAGLE-2 and some EAGLE-3 heads

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise HeadRefused(f"a draft vocabulary of {self.draft_vocab_size} does not lie in one of {self.vocab_size}")
        if not self.is_projected and (self.num_features != 1 or self.target_hidden_size != self.hidden_size):
            raise HeadRefused(
                "an EAGLE-1 or EAGLE-2 head, one without fc, or an MTP module reads one state, as wide as its own"
            )
        if self.feature_layers is not None and len(self.feature_layers) != self.num_features:
            raise HeadRefused(
                f"{self.num_features} hidden states are fused, but layers {self.feature_layers} are named"
            )

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerSpec, ...]:
        """The decoder layers. Raises `HeadRefused` for what is not computed."""

    @property
    @abstractmethod
    def norm(self) -> NormSpec:
        """Of hidden rows, around the layers."""

    @property
    @abstractmethod
    def names(self) -> WeightNames:
        """Of the layers' weights in `EagleHead`."""

    @property
    def is_projected(self) -> bool:
        """Whether captured states are fused before the head reads them."""
        return self.kind == "eagle3" and self.has_fc

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layers to capture in a target with `target_layers` layers, counted as in `feature_layers`.

        The default of EAGLE-3 is the outputs of layers 1, n // 2 - 1 and n - 4; its code names them as the inputs of 2,
        n // 2 and n - 3. Raises `HeadRefused` for layers that the target does not have.
        """
        layers = self.feature_layers
        if layers is None:
            layers = (1, target_layers // 2 - 1, target_layers - 4) if self.is_projected else (target_layers,)
        if any(not 0 <= layer <= target_layers for layer in layers) or len(layers) != self.num_features:
            raise HeadRefused(f"the head reads layers {layers} of a target that has {target_layers}")
        return layers


@dataclass(frozen=True, slots=True)
class HeadConfig(LayeredShape):
    """The shape of an EAGLE head, whose layers are Llama's but for what the first one reads."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    _: KW_ONLY
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    # transformers' `rope_parameters`: rope_theta, rope_type and that type's parameters.
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    window: int | None = None  # tokens that a row's attention sees, itself among them; None for all
    input_norm: bool = False  # an EAGLE-1 head whose first layer has an input_layernorm; published ones have none
    # Which optional weights exist.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise HeadRefused(
                f"{self.num_heads} heads over {self.num_kv_heads} key heads of width {self.head_dim} are no attention"
            )
        if self.window is not None and self.window < 1:
            raise HeadRefused(f"a window of {self.window} tokens is no attention")
        LayeredShape.__post_init__(self)
        rope_type = self.rope.get("rope_type", "default")
        if rope_type not in ("default", "linear", "llama3", "yarn"):
            raise HeadRefused(f"rotary positions of type {rope_type!r} are not served")
        if float(self.rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise HeadRefused("rotary positions over a part of a head's width are not served")

    @property
    def norm(self) -> NormSpec:
        return NormSpec("rms", self.rms_norm_eps)

    @property
    def names(self) -> WeightNames:
        return LAYER_NAMES

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        norm = self.norm
        attention = AttentionSpec(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_width=self.head_dim,
            scaling=self.head_dim**-0.5,
            rotary=self._rotary,
            qkv_bias=self.qkv_bias,
            out_bias=self.o_bias,
            head_norm=HeadNormSpec(norm) if self.qk_norm else None,
            window=self.window,
        )
        usual = LayerSpec(attention, MLPSpec(self.intermediate_size, bias=self.mlp_bias), norm, norm)
        first = usual
        if self.kind == "eagle3":
            # The normed token embedding beside the normed feature.
            first = replace(usual, before_attention=None, read_vectors=2)
        elif not self.input_norm:
            first = replace(usual, before_attention=None)
        return (first, *(usual for _ in range(1, self.num_layers)))

    @property
    def _rotary(self) -> RotarySpec:
        longest = self.max_positions
        settings = {"original_max_position_embeddings": longest, **self.rope}
        try:
            return rotary(SimpleNamespace(rope_parameters=settings, max_position_embeddings=longest), self.head_dim)
        except KeyError as missing:
            raise HeadRefused(f"config.json scales rotary positions, but names no {missing.args[0]}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig(LayeredShape):
    """The shape of an MTP module: one layer as its target's family has them, and norms as around the target's own."""

    layer: LayerSpec
    outer_norm: NormSpec
    layer_names: WeightNames

    @property
    def norm(self) -> NormSpec:
        return self.outer_norm

    @property
    def names(self) -> WeightNames:
        return self.layer_names

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer,)
