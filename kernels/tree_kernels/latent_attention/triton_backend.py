"""Latent attention in Triton: plans, schedules and merging of tree attention around a kernel of its own."""

from __future__ import annotations

import triton
from torch import Tensor

from tree_kernels.attention import AttentionPlan
from tree_kernels.attention.triton_planning import LOG2_E, HeadLayout, TritonPlan, TritonPlanner
from tree_kernels.latent_attention.triton_kernels import latent_kernel
from tree_kernels.latent_attention.triton_tiling import choose_latent_tiling


class TritonLatentAttention(TritonPlanner):
    """See `tree_kernels.latent_attention.LatentAttention`."""

    def run(self, plan: AttentionPlan, query: Tensor, cache: Tensor, latent: int, scale: float) -> Tensor:
        assert isinstance(plan, TritonPlan)
        if scale <= 0:
            # The kernel takes the maximum of the scores before scaling.
            raise ValueError(f"expected a positive scale, got {scale}")
        layout = self._layout(plan, query, cache, latent)
        output = query.new_empty(query.shape[0], query.shape[1], latent)
        schedule, tiling = self.schedule_of(plan, layout), layout.tiling
        rotary = layout.width - latent
        latent_kernel[(self._programs(tiling),)](
            query, cache, output, schedule.partials, schedule.partial_lse, plan.page_table, plan.words,
            schedule.groups, schedule.chunk_table, scale * LOG2_E, query.stride(0), query.stride(1),
            GROUP=layout.group, LATENT=latent, ROTARY=rotary, BLOCK_LATENT=max(16, triton.next_power_of_2(latent)),
            BLOCK_ROTARY=max(16, triton.next_power_of_2(rotary)), PAGE_SIZE=plan.batch.page_size,
            BLOCK_M=tiling.block_rows, BLOCK_N=tiling.block_keys, WORDS=plan.words.shape[1],
            FAR=cache.numel() >= 1 << 31, num_warps=tiling.warps, num_stages=tiling.stages, **self._dependent,
        )  # fmt: skip
        self.merge(output, schedule, layout)
        return output

    def _layout(self, plan: TritonPlan, query: Tensor, cache: Tensor, latent: int) -> HeadLayout:
        if self._settings.split_keys:
            raise ValueError("expected no split_keys: a program of latent attention takes one chunk")
        if not (cache.is_contiguous() and query.stride(-1) == 1):
            raise ValueError("expected a contiguous cache and a query whose last dimension is contiguous")
        if query.dtype != cache.dtype:
            raise ValueError(f"expected one dtype, got {query.dtype} and {cache.dtype}")
        heads = query.shape[1]
        rows = plan.max_output_rows * heads
        tiling = self._settings.tiling or choose_latent_tiling(rows, latent, query.element_size())
        return HeadLayout(heads, 1, cache.shape[2], latent, tiling)
