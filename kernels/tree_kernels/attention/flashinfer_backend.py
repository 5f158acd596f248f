"""Tree attention through FlashInfer's paged prefill kernel (FA2), with a custom mask where the batch holds a tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain

import flashinfer
import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan
from tree_kernels.attention.reference import sequence_mask
from tree_kernels.attention.variant import AttentionVariant
from tree_kernels.window_frames import WindowFrames


@dataclass
class _FlashInferPlan(AttentionPlan):
    """Index tensors of the sequences that have rows. FlashInfer reads the starts and lengths on the host."""

    query_starts: Tensor
    page_starts: Tensor
    page_table: Tensor
    last_page_lengths: Tensor
    mask: Tensor | None  # [sum of rows * keys] bool; None where every tail is causal, which needs no mask


class FlashInferAttention:
    """See `tree_kernels.attention.TreeAttention`. FlashInfer plans on the host, at the first layer of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        # The plan and heads that the wrapper is planned for; holding the plan keeps its identity unique.
        self._planned: tuple[AttentionPlan, tuple[object, ...]] | None = None

    def plan_in_frames(self, plan: AttentionPlan, frames: WindowFrames) -> AttentionPlan:  # noqa: ARG002
        raise ValueError("flashinfer takes plain attention alone")

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        if batch.queries_only:
            raise ValueError("flashinfer takes rows with keys alone")
        present = [b for b in range(batch.sequences) if batch.row_counts[b]]
        keys = [batch.prefix_lengths[b] + batch.row_counts[b] for b in present]
        pages = [batch.pages[b][: -(-count // batch.page_size)] for b, count in zip(present, keys, strict=True)]
        trees = [batch.parents[b] for b in present]
        causal = all(parents is None or parents[1:] == tuple(range(len(parents) - 1)) for parents in trees)
        masks = [] if causal else [sequence_mask(batch, b).flatten() for b in present]
        return _FlashInferPlan(
            batch,
            query_starts=_integers(accumulate((batch.row_counts[b] for b in present), initial=0)),
            page_starts=_integers(accumulate(map(len, pages), initial=0)),
            page_table=_integers(chain.from_iterable(pages)).to(self._device),
            last_page_lengths=_integers((count - 1) % batch.page_size + 1 for count in keys),
            mask=torch.cat(masks).to(self._device) if masks else None,
        )

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        assert isinstance(plan, _FlashInferPlan)
        if not variant.is_plain:
            # Its windows go by slots, which siblings do not share; its FA2 kernel has no sinks.
            raise ValueError("flashinfer takes no windows, capped scores, sinks or slopes: use triton")
        heads = (query.shape[1], *key_cache.shape[2:], value_cache.shape[3], scale, query.dtype)
        if self._planned is None or self._planned[0] is not plan or self._planned[1] != heads:
            self._wrapper.plan(
                plan.query_starts,
                plan.page_starts,
                plan.page_table,
                plan.last_page_lengths,
                query.shape[1],
                key_cache.shape[2],
                key_cache.shape[3],
                key_cache.shape[1],
                head_dim_vo=value_cache.shape[3],
                custom_mask=plan.mask,
                causal=plan.mask is None,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=key_cache.dtype,
            )
            self._planned = (plan, heads)
        output: Tensor = self._wrapper.run(query, (key_cache, value_cache))
        return output


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
