"""An EAGLE head: the part that the target may run (`Projection`), and the part that drafts. Also used for MTP modules.

Symbols: H is the head's hidden size, W the target's, F the captured states of one token, V' the draft vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from draft_service.checkpoints.vocabulary import check_token_ids
from draft_service.eagle.deepseek_layers import ExpandedLatentAttention, Experts
from draft_service.eagle.head_config import HeadConfig
from draft_service.eagle.layers import FusedLayer, Layer, Rotary
from draft_service.neural.network import RowOutput
from draft_service.neural.tail_attention import Attend


class Projection(nn.Module):
    """Fuses a token's captured hidden states into one feature: norms, then `fc`. The identity except for EAGLE-3.

    A separate module so that the target can run it and send one vector per token. Weights: `fc.weight` [H, F * W], and
    optionally `fc.bias` [H], `fc_norm.{i}.weight` [W] or `input_norm.weight` [F * W].
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_width = config.num_features * config.target_hidden_size
        self._features = config.num_features
        joined, eps = self.input_width, config.rms_norm_eps
        fused = config.kind == "eagle3"
        self.fc = nn.Linear(joined, config.hidden_size, bias=config.fc_bias) if fused else nn.Identity()
        self.input_norm = nn.RMSNorm(joined, eps) if config.norm_before_fc else nn.Identity()
        norms = [nn.RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_features)]
        self.fc_norm = nn.ModuleList(norms if config.fc_norm else ())

    def forward(self, states: Tensor) -> Tensor:
        """[.., F * W], the captured states side by side, to features [.., H]."""
        states = self.input_norm(states)
        if self.fc_norm:
            parts = states.chunk(self._features, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(states))


class EagleHead(nn.Module):
    """A head in Outrider's own form, whichever layout it was loaded from.

    Position i pairs the feature of token i with the embedding of token i + 1, at rotary position i, and predicts token
    i + 2. Features of committed tokens are the target's; those of drafted tokens are the head's own (`RowOutput`).

    `embed_tokens.weight` [vocab_size, H] is the target's embedding unless the head has its own. `token_ids` [V'] are
    the target ids of the draft vocabulary, or None for the whole vocabulary.
    """

    def __init__(self, config: HeadConfig, token_ids: Tensor | None = None) -> None:
        """Random weights. `token_ids` [draft_vocab_size] int64 in ascending order; None for the whole vocabulary.
        Raises `HeadRefused` if the two do not fit."""
        super().__init__()
        check_token_ids(config, token_ids)
        self.config = config
        self.projection = Projection(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        fused, width = config.kind == "eagle3", config.hidden_size
        if not fused:
            # EAGLE-1, EAGLE-2 and MTP fuse embedding and feature here; MTP norms both.
            self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
            self.token_norm, self.feature_norm = (
                nn.RMSNorm(width, config.rms_norm_eps) if config.kind == "mtp" else nn.Identity() for _ in range(2)
            )
        attention = None if config.latent is None else ExpandedLatentAttention(config, config.latent)
        mlp = None if config.experts is None else Experts(config, config.experts)
        first = FusedLayer(config) if fused else Layer(config, 0, attention, mlp)
        self.layers = nn.ModuleList([first, *(Layer(config, layer) for layer in range(1, config.num_layers))])
        self.norm = nn.Identity() if config.kind == "eagle" else nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.token_ids: Tensor | None

    def project(self, states: Tensor) -> Tensor:
        """Captured hidden states [.., F * W], layers side by side, to features [.., H]."""
        return cast(Tensor, self.projection(states))

    def forward(self, token_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> RowOutput:
        """One pass over rows of a token, [..] target ids, and the feature [.., H] of the token before it, whose index
        is in `positions` [..]. Features are the target's, after `project`, or those of an earlier pass."""
        embeddings = self.embed_tokens(token_ids).to(features.dtype)
        rotation = self.rotary(positions)
        if self.config.kind == "eagle3":
            rows = self.layers[0](embeddings, features, rotation, attend)
        else:
            joined = torch.cat([self.token_norm(embeddings), self.feature_norm(features)], dim=-1)
            rows = self.layers[0](self.fc(joined), rotation, attend)
        for layer in self.layers[1:]:
            rows = layer(rows, rotation, attend)
        normed = self.norm(rows)
        return RowOutput(normed if self.config.norm_output else rows, normed)

    def logits(self, lm_input: Tensor) -> Tensor:
        """[.., H] to logits [.., V'] over the draft vocabulary."""
        return cast(Tensor, self.lm_head(lm_input))
