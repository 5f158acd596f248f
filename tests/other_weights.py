"""A model with other weights than the one it is made of."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel


def other_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with every parameter, biases among them, moved by a third of a standard normal."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return other
