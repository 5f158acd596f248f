"""Latent attention over a paged cache of latents: `plan` once per step, `run` once per layer."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from tree_kernels.attention import AttentionPlan
from tree_kernels.attention.dispatch import PlannedAttention, Planner

LatentBackend = Literal["reference", "torch", "triton"]


class _Implementation(Planner, Protocol):
    def run(self, plan: AttentionPlan, query: Tensor, cache: Tensor, latent: int, scale: float) -> Tensor: ...


class LatentAttention(PlannedAttention[_Implementation]):
    """Attention of ragged tree rows over a paged cache of latents, in absorbed form.

    Symbols: R rows of all sequences, H query heads, L width of a latent, P width of the rotary key.

    Of the backends "reference" is the fp32 definition, and "torch" the fast path on a CPU; "triton" needs a GPU, and
    its package or it raises `ImportError`."""

    def __init__(self, backend: LatentBackend = "torch", device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        super().__init__(backend, device, _create(backend, device))

    def run(self, plan: AttentionPlan, query: Tensor, cache: Tensor, latent: int, scale: float) -> Tensor:
        """Attend in one layer: [R, H, L], in query's dtype, attended latents for `expanded_values`. The tail's vectors
        must be in the cache already (`write_latents`). Raises `ValueError` where a shape does not fit the plan.

        Args:
            plan: what `plan` of this object returned for this step.
            query: [R, H, L + P], absorbed (`absorbed_queries`).
            cache: [pages, page_size, L + P], contiguous: the latent, then the rotary key. The whole vector is the key
                of every head, and the latent its value.
            latent: L.
            scale: factor of the scores, by the width of a head's own query, not of an absorbed one; positive.
        """
        batch = plan.batch
        rows, heads, width = query.shape
        if batch.queries_only:
            raise ValueError("rows without keys attend to keys and values, not to latents")
        if rows != batch.rows or width != cache.shape[-1] or not 0 < latent < width:
            raise ValueError(f"expected query [{batch.rows}, heads, {cache.shape[-1]}], got {list(query.shape)}")
        if cache.dim() != 3 or cache.shape[1] != batch.page_size:
            raise ValueError(f"expected a cache [pages, {batch.page_size}, width], got {list(cache.shape)}")
        if rows == 0:
            return query.new_empty(0, heads, latent)
        return self._implementation.run(plan, query, cache, latent, scale)


def _create(backend: LatentBackend, device: torch.device) -> _Implementation:
    """Imports a backend only when it is chosen: triton may be absent."""
    if backend == "reference":
        from tree_kernels.latent_attention.reference import ReferenceLatentAttention

        return ReferenceLatentAttention()
    if backend == "torch":
        from tree_kernels.latent_attention.torch_backend import TorchLatentAttention

        return TorchLatentAttention(device)
    if backend == "triton":
        from tree_kernels.latent_attention.triton_backend import TritonLatentAttention

        return TritonLatentAttention(device)
    raise ValueError(f"expected a backend among {get_args(LatentBackend)}, got {backend!r}")
