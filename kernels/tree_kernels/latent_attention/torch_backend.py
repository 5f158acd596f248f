"""Latent attention in PyTorch, two matrix products for each sequence: the fast path on a CPU.

PyTorch's own attention cannot take a part of the keys as values: with whole vectors as values, and heads folded into
rows, it took 2 to 14 times as long in bf16 on a CPU, at 16 heads, 1 to 256 rows and 500 to 4000 keys of 512 + 64 (one
thread with AMX, torch 2.13, medians of 7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.attention import AttentionPlan
from tree_kernels.attention.torch_backend import MOST_SCORES, SequencePlan, TorchPlan, TorchPlanner, keys_of


class TorchLatentAttention(TorchPlanner):
    """All heads of all rows of a sequence are the rows of one product with its latents."""

    def run(self, plan: AttentionPlan, query: Tensor, cache: Tensor, latent: int, scale: float) -> Tensor:
        assert isinstance(plan, TorchPlan)
        output = query.new_empty(query.shape[0], query.shape[1], latent)
        for one in plan.sequences:
            vectors = keys_of(one, cache.unsqueeze(2))[0, 0]
            hidden = _hidden_in_tail(one, query.device)
            each = max(1, MOST_SCORES // (query.shape[1] * one.keys))
            for first in range(0, one.end - one.start, each):
                rows = slice(one.start + first, min(one.start + first + each, one.end))
                unseen = None if hidden is None else hidden[first : first + each]
                output[rows] = _attend(query[rows], vectors, unseen, latent, scale)
        return output


def _hidden_in_tail(one: SequencePlan, device: torch.device) -> Tensor | None:
    """[rows, rows] bool, true where a row does not see a key of the tail; None for a single row, which sees all."""
    rows = one.end - one.start
    if one.mask is not None:
        return ~one.mask[:, one.keys - rows :]
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1) if one.causal else None


def _attend(query: Tensor, vectors: Tensor, hidden: Tensor | None, latent: int, scale: float) -> Tensor:
    """[R, H, L] of queries [R, H, L + P] over the vectors [keys, L + P] of one sequence."""
    rows, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.flatten(0, 1) @ vectors.t()).view(rows, heads, -1).to(dtype) * scale
    if hidden is not None:
        scores[..., -hidden.shape[1] :].masked_fill_(hidden[:, None], float("-inf"))
    probs = scores.softmax(dim=-1).to(query.dtype)
    return (probs.flatten(0, 1) @ vectors[:, :latent]).view(rows, heads, latent)
