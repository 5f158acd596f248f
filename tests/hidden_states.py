"""The hidden states that a target sends, read off transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[tokens, F * W] of the outputs of layers side by side; for the last layer and past it, after the last norm."""
    hidden = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[min(layer + 1, len(hidden) - 1)][0] for layer in layers], dim=-1)
