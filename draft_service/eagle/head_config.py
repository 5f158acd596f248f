"""What an EAGLE head is, in one form for every checkpoint layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draft_service.checkpoints.facts import HeadRefused, HeadShape

HeadKind = Literal["eagle", "eagle3", "mtp"]


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of multi-head latent attention (arXiv 2412.19437, section 2.1.1), of one head where heads have them.

    Attributes:
        query_rank: of the queries' latent; 0 where queries are projected at once.
        key_rank: of the latent that keys and values are made of.
        plain: part of a query and a key without positions.
        rotary: the part with rotary positions, one key of which all heads share.
        value: of a value.
        interleaved: rotary pairs are neighbours in the projections' outputs, not halves.
    """

    query_rank: int
    key_rank: int
    plain: int
    rotary: int
    value: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.rotary % 2 or self.value > self.plain + self.rotary:
            raise HeadRefused(f"latent attention with rotary parts of {self.rotary} and values of {self.value}")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts as DeepSeek-V3 routes it (arXiv 2412.19437, section 2.1.2).

    Attributes:
        experts: that rows are routed to.
        shared: experts that see every row, joined in one MLP.
        width: inner width of one expert.
        chosen: experts of a row.
        groups, chosen_groups: experts lie in groups, and a row's come from its best ones.
        normed: a row's weights are made to sum to 1.
        scale: factor of them then.
    """

    experts: int
    shared: int
    width: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    normed: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.experts % self.groups or self.experts // self.groups < 2 or self.chosen_groups > self.groups:
            raise HeadRefused(f"{self.experts} experts in {self.groups} groups, {self.chosen_groups} of them chosen")
        if self.chosen > self.experts // self.groups * self.chosen_groups:
            raise HeadRefused(f"{self.chosen} experts of a row, from {self.chosen_groups} of {self.groups} groups")


@dataclass(frozen=True, slots=True)
class HeadConfig(HeadShape):
    """The shape of an EAGLE head, or of an MTP module.

    Attributes:
        kind: "eagle" for EAGLE-1 and EAGLE-2, which share their weights' form; "eagle3" for EAGLE-3 and EAGLE-3.1;
            "mtp" for a target's own multi-token-prediction module.
        num_features: hidden states that are captured for one token: 3 for EAGLE-3, 1 otherwise.
        feature_layers: decoder layers of the target whose outputs are captured, counted from 0; the number of layers
            stands for the state after the last norm. None leaves it to the target's number of layers.
        rope: transformers' `rope_parameters`: rope_theta, rope_type and what that type takes.
        fc_norm: EAGLE-3.1: an RMSNorm for each captured state before `fc`.
        norm_before_fc: one RMSNorm over the joined states before `fc`.
        norm_output: EAGLE-3.1: the state after the last norm is fed to the next step, not the one before it.
        norm_before_residual: the first layer's residual is the normed feature.
        input_norm: an EAGLE-1 head whose first layer has an input_layernorm; published ones have none.
        fc_bias, qkv_bias, o_bias, mlp_bias, qk_norm: which optional weights there are.
        latent, experts: of an MTP module whose layer has latent attention, or a mixture of experts.
        tied_lm_head: an EAGLE-1 or EAGLE-2 head, or an EAGLE-3 head without its own: its logits come from the target's.
    """

    kind: HeadKind
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    num_features: int = 1
    feature_layers: tuple[int, ...] | None = None
    max_positions: int = 2048
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    input_norm: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    tied_lm_head: bool = False

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
        """Of the part of a query or key that has rotary positions: the first numbers, or a latent head's own part."""
        if self.latent is not None:
            return self.latent.rotary
        return int(self.head_dim * float(self.rope.get("partial_rotary_factor", 1.0)))

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layers to capture of a target with so many, counted as in `feature_layers`.

        The default of EAGLE-3 is the outputs of layers 1, n // 2 - 1 and n - 4, which its code names as the inputs of
        2, n // 2 and n - 3. Raises `HeadRefused` for layers that the target does not have.
        """
        layers = self.feature_layers
        if layers is None:
            layers = (1, target_layers // 2 - 1, target_layers - 4) if self.kind == "eagle3" else (target_layers,)
        if any(not 0 <= layer <= target_layers for layer in layers) or len(layers) != self.num_features:
            raise HeadRefused(f"the head reads layers {layers} of a target that has {target_layers}")
        return layers
