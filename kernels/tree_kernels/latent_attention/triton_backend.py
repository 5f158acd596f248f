"""Latent attention in Triton: plans, schedules and merging of tree attention around a kernel of its own."""

from __future__ import annotations

import triton
from torch import Tensor

from tree_kernels.attention import AttentionPlan
from tree_kernels.attention.triton_merge import merge_kernel
from tree_kernels.attention.triton_planning import LOG2_E, HeadLayout, TritonPlan, TritonPlanner, max_output_rows
from tree_kernels.latent_attention.triton_kernels import latent_kernel
from tree_kernels.latent_attention.triton_tiling import choose_latent_tiling

# Columns of an output that one program merges: those of the values that merging is tuned for.
_MERGE_COLUMNS = 128


def _merged_at_a_time(by_group: bool, parts: int) -> tuple[int, int]:
    """Rows and partials that a program of the merge takes at a time, where a group has `parts` partials on average.

    Partials are read one after the other, a round trip to L2 each, and where a whole GPU reads one sequence there are
    as many as programs: so fewer rows and more partials are taken at a time. The numbers follow from the 64 registers
    of a thread that they take; they were not measured.
    """
    if not by_group:
        return 4, 8
    return (1, 64) if parts >= 64 else (1, 32) if parts >= 32 else (2, 16)


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
            FAR=cache.numel() >= 1 << 31, num_warps=tiling.warps, num_stages=tiling.stages, **self._launch,
        )  # fmt: skip
        by_group = len(schedule.groups) <= schedule.max_chunks
        rows, parts = _merged_at_a_time(by_group, schedule.max_chunks // max(1, len(schedule.groups)))
        columns = triton.next_power_of_2(latent) if latent % _MERGE_COLUMNS else _MERGE_COLUMNS
        groups = len(schedule.groups) if by_group else schedule.max_chunks
        merge_kernel[(groups, tiling.block_rows // rows, triton.cdiv(latent, columns))](
            output, schedule.partials, schedule.partial_lse, schedule.groups, schedule.chunk_table, schedule.totals,
            GROUP=layout.group, KV_HEADS=1, DV=latent, BLOCK_DV=columns, BLOCK_M=tiling.block_rows, ROWS=rows,
            PARTS=parts, BY_GROUP=by_group, num_warps=4, **self._launch,
        )  # fmt: skip
        return output

    def _layout(self, plan: TritonPlan, query: Tensor, cache: Tensor, latent: int) -> HeadLayout:
        if self._settings.split_keys:
            raise ValueError("expected no split_keys: a program of latent attention takes one chunk")
        if not (cache.is_contiguous() and query.stride(-1) == 1):
            raise ValueError("expected a contiguous cache and a query whose last dimension is contiguous")
        if query.dtype != cache.dtype:
            raise ValueError(f"expected one dtype, got {query.dtype} and {cache.dtype}")
        heads = query.shape[1]
        tiling = self._settings.tiling or choose_latent_tiling(
            max_output_rows(plan) * heads, latent, query.element_size()
        )
        return HeadLayout(heads, 1, cache.shape[2], latent, tiling)
