"""The configuration of an EAGLE head, in one form for every checkpoint layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draft_service.checkpoints.facts import HeadShape
from outrider.heads import HeadRefused

HeadKind = Literal["eagle", "eagle3", "mtp"]


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of multi-head latent attention (arXiv 2412.19437, section 2.1.1)."""

    query_rank: int  # of the queries' latent; 0 if queries are projected directly
    key_rank: int  # of the latent of keys and values
    plain: int  # the part of a head's query and key without positions
    rotary: int  # the part with rotary positions, whose key all heads share
    value: int  # a head's value
    interleaved: bool = True  # rotary pairs are neighbours in the projections' outputs, not halves

    def __post_init__(self) -> None:
        if self.rotary % 2 or self.value > self.plain + self.rotary:
            raise HeadRefused(f"latent attention with rotary parts of {self.rotary} and values of {self.value}")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts as DeepSeek-V3 routes it (arXiv 2412.19437, section 2.1.2)."""

    experts: int  # routed ones
    shared: int  # experts that read every row, joined in one MLP
    width: int  # inner width of one expert
    chosen: int  # experts for each row
    groups: int = 1
    chosen_groups: int = 1  # best groups, which a row's experts come from
    normed: bool = True  # the weights of a row are normalised to a sum of 1
    scale: float = 1.0  # factor of the weights after that

    def __post_init__(self) -> None:
        if self.experts % self.groups or self.experts // self.groups < 2 or self.chosen_groups > self.groups:
            raise HeadRefused(f"{self.experts} experts in {self.groups} groups, {self.chosen_groups} of them chosen")
        if self.chosen > self.experts // self.groups * self.chosen_groups:
            raise HeadRefused(f"{self.chosen} experts of a row, from {self.chosen_groups} of {self.groups} groups")


@dataclass(frozen=True, slots=True)
class HeadConfig(HeadShape):
    """The shape of an EAGLE head, or of an MTP module."""

    # "eagle" for EAGLE-1 and EAGLE-2, which have the same weights; "eagle3" for EAGLE-3 and EAGLE-3.1; "mtp" for a
    # target's own multi-token-prediction module.
    kind: HeadKind
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    num_features: int = 1  # hidden states that are captured for each token: 3 for EAGLE-3, 1 otherwise
    # Decoder layers of the target whose outputs are captured, counted from 0; the number of layers stands for the state
    # after the last norm. None derives them from the target's number of layers.
    feature_layers: tuple[int, ...] | None = None
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    # transformers' `rope_parameters`: rope_theta, rope_type and that type's parameters.
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm for each captured state before `fc`
    norm_before_fc: bool = False  # one RMSNorm over the joined states before `fc`
    norm_output: bool = False  # EAGLE-3.1: the next step reads the state after the last norm, not the one before it
    norm_before_residual: bool = False  # the first layer's residual is the normed feature
    input_norm: bool = False  # an EAGLE-1 head whose first layer has an input_layernorm; published ones have none
    # Which optional weights exist.
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # For an MTP module whose layer has latent attention, or a mixture of experts.
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    tied_lm_head: bool = False  # the lm_head is the target's, as in EAGLE-1 and EAGLE-2 and some EAGLE-3 heads

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise HeadRefused(
                f"{self.num_heads} heads over {self.num_kv_heads} key heads of width {self.head_dim} are no attention"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise HeadRefused(f"a draft vocabulary of {self.draft_vocab_size} does not lie in one of {self.vocab_size}")
        if self.kind != "eagle3" and (self.num_features != 1 or self.target_hidden_size != self.hidden_size):
            raise HeadRefused(
                "an EAGLE-1 or EAGLE-2 head, or an MTP module, reads one hidden state, as wide as its own"
            )
        if self.feature_layers is not None and len(self.feature_layers) != self.num_features:
            raise HeadRefused(
                f"{self.num_features} hidden states are fused, but layers {self.feature_layers} are named"
            )
        rope_type = self.rope.get("rope_type", "default")
        if rope_type not in ("default", "linear", "llama3", "yarn"):
            raise HeadRefused(f"rotary positions of type {rope_type!r} are not served")
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_dim:
            raise HeadRefused(f"rotary positions over {self.rotary_width} of {self.head_dim} numbers are not served")
        if self.kind != "mtp" and self.rotary_width != self.head_dim:
            raise HeadRefused("rotary positions over a part of a head's width are not served")

    @property
    def rotary_width(self) -> int:
        """Width of a query's or key's part with rotary positions: its first numbers, or a latent head's rotary part."""
        if self.latent is not None:
            return self.latent.rotary
        return int(self.head_dim * float(self.rope.get("partial_rotary_factor", 1.0)))

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layers to capture in a target with `target_layers` layers, counted as in `feature_layers`.

        The default of EAGLE-3 is the outputs of layers 1, n // 2 - 1 and n - 4; its code names them as the inputs of 2,
        n // 2 and n - 3. Raises `HeadRefused` for layers that the target does not have.
        """
        layers = self.feature_layers
        if layers is None:
            layers = (1, target_layers // 2 - 1, target_layers - 4) if self.kind == "eagle3" else (target_layers,)
        if any(not 0 <= layer <= target_layers for layer in layers) or len(layers) != self.num_features:
            raise HeadRefused(f"the head reads layers {layers} of a target that has {target_layers}")
        return layers
