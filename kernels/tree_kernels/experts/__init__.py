"""Mixtures of experts: which experts each row goes to, and what they make of it."""

import torch

from tree_kernels.experts.layers import RowExperts
from tree_kernels.experts.types import Chosen, ExpertWeights, Routing

__all__ = ["Chosen", "ExpertWeights", "Routing", "RowExperts", "row_experts"]


def row_experts(device: torch.device, *, invariant: bool = False) -> RowExperts:
    """What computes experts on a device. On a GPU nothing waits for the host, so that it can be captured; with
    `invariant`, no bit of a row's result depends on how many rows there are there."""
    if device.type != "cuda":
        from tree_kernels.experts.torch_backend import GroupedExperts

        return GroupedExperts()
    # Only here: Triton may be absent.
    from tree_kernels.experts.triton_backend import TritonExperts

    return TritonExperts(device, invariant=invariant)
