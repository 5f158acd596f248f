"""The hidden states that a target sends, read off transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[tokens, F * W] of the outputs of layers side by side; the number of layers stands for the last norm's."""
    last: list[Tensor] = []
    handle = model.get_decoder().layers[-1].register_forward_hook(lambda _module, _inputs, output: last.append(output))
    output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    handle.remove()
    # transformers has the last layer's only behind the norm.
    _, *between, normed = output.hidden_states
    outputs = [*between, last[0], normed]
    return torch.cat([outputs[layer][0] for layer in layers], dim=-1)
