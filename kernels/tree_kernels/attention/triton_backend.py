"""Tree attention in Triton: one launch prepares the step, one attends and mostly merges; nothing is read back."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from tree_kernels.attention.batch import AttentionPlan
from tree_kernels.attention.tree_mask import mask_words
from tree_kernels.attention.triton_kernels import attention_kernel
from tree_kernels.attention.triton_planning import (
    LOG2_E,
    HeadLayout,
    PartialRows,
    TritonPlan,
    TritonPlanner,
    TritonSettings,
    split,
)
from tree_kernels.attention.triton_tiling import Tiling, choose_tiling
from tree_kernels.attention.variant import PLAIN, AttentionVariant
from tree_kernels.hopper import runs_on

# One tiling and one split for every step: a prompt's chunk, a tree and a single row are summed in the same order.
INVARIANT = TritonSettings(
    split_keys=512, tiling=Tiling(block_rows=64, block_keys=32, warps=4, stages=3, programs_per_sm=1)
)


class TritonAttention(TritonPlanner):
    """See `tree_kernels.attention.TreeAttention`."""

    def run(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant = PLAIN,
    ) -> Tensor:
        assert isinstance(plan, TritonPlan)
        if scale <= 0:
            # The kernel takes the maximum of the scores before scaling.
            raise ValueError(f"expected a positive scale, got {scale}")
        output = query.new_empty(*query.shape[:2], value_cache.shape[3])
        if plan.common is None or self._settings.split_keys or variant.window is not None or variant.slopes is not None:
            # Positions of rows are those behind all of their keys; and fixed splits depend on no other sequence.
            self._attend(plan, query, key_cache, value_cache, scale, variant, output)
            return output
        if plan.parts is None:
            plan.parts = split(plan)
        both = []
        # A sink is among a row's own keys.
        for part, kind in ((plan.parts.shared, replace(variant, sinks=None)), (plan.parts.own, variant)):
            rows = PartialRows(
                torch.empty_like(output, dtype=torch.float32), output.new_empty(output.shape[:2], dtype=torch.float32)
            )
            self._attend(part, query, key_cache, value_cache, scale, kind, *rows)
            both.append(rows)
        self.combine(both[0], both[1], plan, output)
        return output

    def _attend(
        self,
        plan: TritonPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
        output: Tensor,
        output_lse: Tensor | None = None,
    ) -> None:
        """Attend to the keys of a plan, into `output` [R, Hq, Dv], and the logarithms of the softmax's sums, in base 2,
        into `output_lse` [R, Hq] fp32 if it is given."""
        layout = self._layout(plan, query, key_cache, value_cache, variant)
        schedule, tiling = self.schedule_of(plan, layout), layout.tiling
        lse = schedule.partial_lse if output_lse is None else output_lse
        tensors = (query, key_cache, value_cache, output, lse, schedule.partials, schedule.partial_lse)
        scaling = (scale * LOG2_E, query.stride(0), query.stride(1))
        sizes = {
            "GROUP": layout.group, "KV_HEADS": layout.kv_heads, "D": layout.width, "PAGE_SIZE": plan.batch.page_size,
            "BLOCK_N": tiling.block_keys, "WORDS": plan.words.shape[1],
            "FAR": max(key_cache.numel(), value_cache.numel()) >= 1 << 31, "LSE": output_lse is not None,
            "num_warps": tiling.warps, **self._dependent,
        }  # fmt: skip
        programs = (self._programs(tiling),)
        if tiling.specialised:
            # Only here: Gluon's kernels cannot be interpreted.
            from tree_kernels.hopper.attention import specialised_kernel

            specialised_kernel[programs](
                *tensors, plan.page_table, plan.words.view(torch.int32), schedule.groups, schedule.chunk_table,
                *scaling, STAGES=tiling.stages, **sizes,
            )  # fmt: skip
        else:
            value_block = triton.next_power_of_2(layout.value_width)
            attention_kernel[programs](
                *tensors, schedule.arrivals, plan.page_table, plan.words, plan.depths,
                plan.depths if variant.sinks is None else variant.sinks,
                plan.depths if variant.slopes is None else variant.slopes,
                schedule.groups, schedule.chunk_table, schedule.totals, *scaling, DV=layout.value_width,
                BLOCK_D=triton.next_power_of_2(layout.width), BLOCK_DV=value_block, BLOCK_M=tiling.block_rows,
                FIXED=bool(self._settings.split_keys), APART=tiling.apart and not layout.window, WINDOW=layout.window,
                CAP=variant.score_cap or 0.0, SINKS=variant.sinks is not None, SLOPES=variant.slopes is not None,
                MERGE_ROWS=tiling.merge_rows, MERGE_PARTS=tiling.merge_parts(value_block), num_stages=tiling.stages,
                TAIL=not plan.batch.queries_only, **sizes,
            )  # fmt: skip
        if not tiling.merge_rows:
            self.merge(output, schedule, layout, output_lse)

    def _layout(
        self, plan: TritonPlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant
    ) -> HeadLayout:
        batch = plan.batch
        if not (key_cache.is_contiguous() and value_cache.is_contiguous() and query.stride(-1) == 1):
            raise ValueError("expected contiguous caches and a query whose last dimension is contiguous")
        if not query.dtype == key_cache.dtype == value_cache.dtype:
            raise ValueError(f"expected one dtype, got {query.dtype}, {key_cache.dtype} and {value_cache.dtype}")
        group = query.shape[1] // key_cache.shape[2]
        kv_heads, most = key_cache.shape[2], variant.window or max(batch.prefix_lengths, default=0)
        window = (variant.window or 0) * (-1 if variant.chunked else 1)
        tiling = self._settings.tiling or choose_tiling(
            plan.max_output_rows,
            group,
            key_cache.shape[3],
            query.element_size(),
            keys=sum(min(prefix, most) for prefix in batch.prefix_lengths),
            sequences=batch.present,
            kv_heads=kv_heads,
            processors=self.processors,
            words=mask_words(batch),
            specialised=not batch.queries_only and self._is_specialised(key_cache, value_cache, variant),
        )
        return HeadLayout(group, kv_heads, key_cache.shape[3], value_cache.shape[3], tiling, window)

    def _is_specialised(self, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant) -> bool:
        """Whether `specialised_kernel` computes the layer: its products are Hopper's own."""
        if not runs_on(key_cache.device):
            return False
        if not variant.is_plain or self._settings.split_keys or key_cache.element_size() != 2:
            return False
        return (key_cache.shape[3], value_cache.shape[3]) in {(64, 64), (128, 128)}
