"""What an EAGLE head is, in one form for every checkpoint layout, and what it needs of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.errors import NotSupported

HeadKind = Literal["eagle", "eagle3"]


class HeadRefused(NotSupported):
    """The head cannot be loaded, or does not fit its target; the message says why."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a head.

    Attributes:
        kind: "eagle" for EAGLE-1 and EAGLE-2, which share their weights' form; "eagle3" for EAGLE-3 and EAGLE-3.1.
        vocab_size: of the target, whose token ids the head reads.
        draft_vocab_size: token ids that the head can say.
        target_hidden_size: width of one captured hidden state.
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
        tied_lm_head: an EAGLE-1 or EAGLE-2 head, or an EAGLE-3 head without its own: it speaks through the target's.
        target: name or folder of the target it was made for; empty when unknown.
        tokenizer_fingerprint: of the target's tokenizer; empty when unknown.
    """

    kind: HeadKind
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
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
    tied_lm_head: bool = False
    target: str = ""
    tokenizer_fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise HeadRefused(
                f"{self.num_heads} heads over {self.num_kv_heads} key heads of width {self.head_dim} are no attention"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise HeadRefused(f"a draft vocabulary of {self.draft_vocab_size} does not lie in one of {self.vocab_size}")
        if self.kind == "eagle" and (self.num_features != 1 or self.target_hidden_size != self.hidden_size):
            raise HeadRefused("an EAGLE-1 or EAGLE-2 head reads one hidden state, as wide as its own")
        if self.feature_layers is not None and len(self.feature_layers) != self.num_features:
            raise HeadRefused(
                f"{self.num_features} hidden states are fused, but layers {self.feature_layers} are named"
            )
        rope_type = self.rope.get("rope_type", "default")
        if rope_type not in ("default", "linear", "llama3", "yarn"):
            raise HeadRefused(f"rotary positions of type {rope_type!r} are not served")
        if self.rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise HeadRefused("rotary positions over a part of a head's width are not served")

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


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What is known of the target: from its config.json, and its tokenizer's fingerprint; empty when unknown."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    tokenizer_fingerprint: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tokenizer_fingerprint: str = "") -> TargetFacts:
        """From the entries of a transformers config.json. Raises `HeadRefused` when one is missing."""
        text: Mapping[str, Any] = config.get("text_config") or config
        try:
            return cls(
                int(text["vocab_size"]),
                int(text["hidden_size"]),
                int(text["num_hidden_layers"]),
                tokenizer_fingerprint,
            )
        except KeyError as missing:
            raise HeadRefused(f"the target's config.json has no {missing}") from None


def check_fits(head: HeadConfig, target: TargetFacts) -> None:
    """Raise `HeadRefused` with the reason unless the head was made for a target like this one."""
    if head.vocab_size != target.vocab_size:
        raise HeadRefused(f"the head has a vocabulary of {head.vocab_size}, the target one of {target.vocab_size}")
    if head.target_hidden_size != target.hidden_size:
        raise HeadRefused(
            f"the head reads hidden states of width {head.target_hidden_size}, the target's have {target.hidden_size}"
        )
    head.layers_of(target.num_layers)
    known = {head.tokenizer_fingerprint, target.tokenizer_fingerprint} - {""}
    if len(known) > 1:
        raise HeadRefused("the head was made for another tokenizer")
