"""Medusa heads: K small networks over the target's last hidden state, the k-th of which guesses k tokens further ahead.

Symbols: K heads, H the target's hidden size, V' the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.eagle.head_config import HeadRefused, TargetFacts


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """What the heads are, in one form for every checkpoint layout.

    Attributes:
        hidden_size: of the target.
        vocab_size: of the target.
        draft_vocab_size: token ids that the heads can say.
        num_heads: depths that are guessed.
        num_layers: residual blocks of a head.
        target: name or folder of the target they were made for; empty when unknown.
        target_layers: the target's decoder layers; 0 when unknown.
        tokenizer_fingerprint: of the target's tokenizer; empty when unknown.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int = 1
    target: str = ""
    target_layers: int = 0
    tokenizer_fingerprint: str = ""

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layer whose output is read, counted as in `FeatureRequest`: the state after the target's last norm."""
        return (target_layers,)


def check_fits(shape: MedusaShape, target: TargetFacts) -> None:
    """Raise `HeadRefused` with the reason unless the heads were made for a target like this one."""
    if shape.vocab_size != target.vocab_size:
        raise HeadRefused(f"the heads have a vocabulary of {shape.vocab_size}, the target one of {target.vocab_size}")
    if shape.hidden_size != target.hidden_size:
        raise HeadRefused(
            f"the heads read hidden states of width {shape.hidden_size}, the target's have {target.hidden_size}"
        )
    if shape.target_layers not in (0, target.num_layers):
        raise HeadRefused(f"the heads' target has {shape.target_layers} layers, this one {target.num_layers}")


class ResidualBlock(nn.Module):
    """`x + silu(linear(x))`: as it says nothing at first, heads may begin as the target's own lm_head."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        return states + functional.silu(self.linear(states))


class MedusaHead(nn.Module):
    """All heads of a target, named as published: `heads.{k}.{layer}.linear.*` are head k's residual blocks, and
    `heads.{k}.{num_layers}.weight` [V', H] is its lm_head.

    From the state of token i the target's lm_head guesses token i + 1, and head k, counted from 0, token i + 2 + k. The
    target knows the state of the token before the root, so head k guesses what stands k + 1 below the root.
    `token_ids` [V'] are the target's ids of the tokens that the heads can say, or None when they can say every token.
    """

    def __init__(self, config: MedusaShape, token_ids: Tensor | None = None) -> None:
        """Random weights. `token_ids` [draft_vocab_size] int64; needed when that is not the whole vocabulary.

        Raises `HeadRefused` when the two do not fit.
        """
        super().__init__()
        _check_token_ids(config, token_ids)
        self.config = config
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)),
                nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False),
            )
            for _ in range(config.num_heads)
        )
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.token_ids: Tensor | None

    @property
    def lm_heads(self) -> tuple[nn.Linear, ...]:
        """The last part of every head."""
        return tuple(cast(nn.Linear, cast(nn.Sequential, head)[-1]) for head in self.heads)

    def lm_input(self, states: Tensor) -> Tensor:
        """What every head's lm_head reads: states [.., H] to [K, .., H]."""
        return torch.stack([cast(nn.Sequential, head)[:-1](states) for head in self.heads])

    def forward(self, states: Tensor) -> Tensor:
        """States [.., H] to the logits of all heads, [K, .., V'] over the draft vocabulary."""
        return torch.stack([head(states) for head in self.heads])


def _check_token_ids(config: MedusaShape, token_ids: Tensor | None) -> None:
    if token_ids is None:
        if config.draft_vocab_size != config.vocab_size:
            raise HeadRefused(
                f"the heads say {config.draft_vocab_size} of {config.vocab_size} tokens, and nothing says which (d2t)"
            )
        return
    if token_ids.shape != (config.draft_vocab_size,):
        raise HeadRefused(f"{len(token_ids)} token ids are mapped, the heads say {config.draft_vocab_size}")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size:
        raise HeadRefused(f"the token map leaves the vocabulary of {config.vocab_size}")
    if len(set(token_ids.tolist())) != len(token_ids):
        raise HeadRefused("the token map names a token twice")
