"""Medusa heads: K small networks over the target's last hidden state, each of which predicts one token further ahead.

Symbols: K heads, H the target's hidden size, V' the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.checkpoints.facts import HeadShape
from draft_service.checkpoints.vocabulary import check_token_ids
from draft_service.eagle.head import IN_FP32
from outrider.heads import HeadRefused
from tree_models.layers.linear import Linear
from tree_models.layers.placing import Placement
from tree_models.slots import Copy, WeightSlot, published


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape(HeadShape):
    """The shape of Medusa heads, which have the target's width."""

    num_heads: int  # depths that are predicted
    num_layers: int = 1  # residual blocks of each head
    target_layers: int = 0  # the target's decoder layers; 0 when unknown

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layer whose output is read, counted as in `FeatureRequest`: the state after the last norm."""
        if self.target_layers not in (0, target_layers):
            raise HeadRefused(f"the heads' target has {self.target_layers} layers, this one {target_layers}")
        return (target_layers,)


class ResidualBlock(nn.Module):
    """`x + silu(linear(x))`: the identity while the weights are zero."""

    def __init__(self, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.linear = Linear(hidden_size, [hidden_size], place, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        return states + functional.silu(self.linear(states))


class MedusaHead(nn.Module):
    """All heads of a target. Names of weights are the published ones: `heads.{k}.{layer}.linear.*` are head k's
    residual blocks, and `heads.{k}.{num_layers}.weight` [V', H] is its lm_head.

    From the state of token i the target's lm_head predicts token i + 1, and head k, counted from 0, token i + 2 + k.
    The last state that the target has is that of the token before the root, so head k predicts depth k + 1 of a tree.
    `token_ids` [V'] are the target ids of the draft vocabulary, or None for the whole vocabulary.
    """

    def __init__(self, config: MedusaShape, token_ids: Tensor | None = None, place: Placement = IN_FP32) -> None:
        """Weights are unwritten until every slot of `slots` has been. `token_ids` [draft_vocab_size] int64; None for
        the whole vocabulary. Raises `HeadRefused` if the two do not fit."""
        super().__init__()
        check_token_ids(config, token_ids)
        self.config, self.place, width = config, place, config.target_hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(width, place) for _ in range(config.num_layers)),
                Linear(width, [config.draft_vocab_size], place),
            )
            for _ in range(config.num_heads)
        )
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.token_ids: Tensor | None

    @property
    def lm_heads(self) -> tuple[Linear, ...]:
        return tuple(cast(Linear, cast(nn.Sequential, head)[-1]) for head in self.heads)

    def slots(self, copy: Copy = Tensor.copy_) -> list[WeightSlot]:
        """Slots of every weight."""
        slots: list[WeightSlot] = []
        for number, head in enumerate(self.heads):
            *blocks, lm_head = cast(nn.Sequential, head)
            for layer, block in enumerate(blocks):
                slots += cast(ResidualBlock, block).linear.slots([f"heads.{number}.{layer}.linear"], copy)
            slots += cast(Linear, lm_head).slots([f"heads.{number}.{len(blocks)}"], copy)
        return slots

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its name, in the heads' own memory."""
        return published(self.slots())

    def lm_input(self, states: Tensor) -> Tensor:
        """Inputs of the lm_heads: states [.., H] to [K, .., H]."""
        return torch.stack([cast(nn.Sequential, head)[:-1](states) for head in self.heads])

    def forward(self, states: Tensor) -> Tensor:
        """States [.., H] to the logits of all heads, [K, .., V'] over the draft vocabulary."""
        return torch.stack([head(states) for head in self.heads])
