"""Launches by rings of weights, on Hopper. Meaning, shapes and errors are those of `tree_kernels.linear.RowLinears`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tree_kernels.conditional_launch import conditional_launch
from tree_kernels.hopper.products import ring_activated_kernel, ring_add_kernel, ring_rotary_kernel
from tree_kernels.hopper.ring_tiling import PART, RingKind, RingTiling, choose_ring_tiling
from tree_kernels.linear.forms import LLAMA_HEADS, Activation, HeadForm
from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.rows import HeadRows, Norm, ScaledRows
from tree_kernels.linear.triton_backend import (
    TritonLinears,
    check_contiguous,
    check_heads,
    check_product,
    is_mappable,
    norms_of,
    or_other,
    parts_of_rows,
    room_for_norm,
    sum_tensors,
)

# What `hopper.products` computes of `forms.ActivationKind`.
RING_ACTIVATIONS = frozenset({"silu", "gelu_tanh"})
_HEAD_WIDTH = 128
# Blocks in shared memory as a warpgroup reads them, numbers of 16 bits.
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class RingLinears(TritonLinears):
    """The layers of few rows, whose products in 16 bits are rings of weights where these are faster. All else is as in
    `TritonLinears`.

    Launches of one object must not run concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        form: HeadForm = LLAMA_HEADS,
    ) -> Tensor:
        kv_heads, width = heads.key_cache.shape[-2:]
        norms = norms_of(form, width)
        usual = heads.cosines.shape[1] == width == _HEAD_WIDTH and not form.interleaved and form.value_epsilon == 0
        tiling = self._ring(RingKind.HEADS, rows.rows, weight) if usual and norms != "all" else None
        if tiling is None:
            return super().rotary_linear(rows, weight, bias, heads, form)
        check_contiguous(rows=rows.rows, squares=rows.squares, bias=bias)
        check_heads(heads)
        query_heads = weight.shape[0] // width - 2 * kv_heads
        query = heads.room_for_queries(rows.rows, query_heads)
        query_norm, key_norm = form.query_norm, form.key_norm
        grid, options = self._launch_ring(tiling, RingKind.HEADS, rows.rows, weight)
        ring_rotary_kernel[grid](
            or_other(rows.squares, query), or_other(bias, query),
            query if query_norm is None else query_norm.weight, query if key_norm is None else key_norm.weight,
            heads.cosines, heads.sines, heads.slots, query, heads.key_cache, heads.value_cache,
            epsilon=rows.epsilon, query_epsilon=0.0 if query_norm is None else query_norm.epsilon,
            key_epsilon=0.0 if key_norm is None else key_norm.epsilon, HAS_BIAS=bias is not None,
            NORMS=norms == "heads", HEADS=query_heads, KV_HEADS=kv_heads, **_sums_of(rows), **options,
        )  # fmt: skip
        return query

    def _add(
        self,
        rows: Tensor,
        weight: Weight,
        output: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> ScaledRows | None:
        tiling = self._ring(RingKind.SUM, rows, weight)
        if tiling is None:
            return super()._add(rows, weight, output, bias, residual, norm, multiplier)
        outputs = weight.shape[0]
        scaled = room_for_norm(output, norm, outputs // PART)
        grid, options = self._launch_ring(tiling, RingKind.SUM, rows, weight)
        ring_add_kernel[grid](
            *sum_tensors(output, bias, residual, norm, scaled),
            HAS_BIAS=bias is not None, MULTIPLIER=multiplier, ADDS=residual is not None, SCALES=norm is not None,
            OUTPUTS=outputs, **options,
        )  # fmt: skip
        return scaled

    def _activated(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Tensor:
        usual = gated and str(activation.kind) in RING_ACTIVATIONS
        tiling = self._ring(RingKind.GATED, rows.rows, weight) if usual else None
        if tiling is None:
            return super()._activated(rows, weight, bias, activation, gated=gated)
        check_contiguous(rows=rows.rows, squares=rows.squares, bias=bias)
        outputs = weight.shape[0] // 2
        output = rows.rows.new_empty(len(rows.rows), outputs)
        grid, options = self._launch_ring(tiling, RingKind.GATED, rows.rows, weight)
        ring_activated_kernel[grid](
            or_other(rows.squares, output), or_other(bias, output), output, epsilon=rows.epsilon,
            HAS_BIAS=bias is not None, ACTIVATION=str(activation.kind), OUTPUTS=outputs, **_sums_of(rows), **options,
        )  # fmt: skip
        return output

    def _ring(self, kind: RingKind, rows: Tensor, weight: Weight) -> RingTiling | None:
        """None where another kernel multiplies: for weights in int8, launches that may be left out, and numbers that
        tensor maps cannot read."""
        check_product(rows, weight)
        if isinstance(weight, Int8Weight) or rows.element_size() != 2 or not is_mappable(rows, weight):
            return None
        if conditional_launch(rows)["CONDITIONAL"]:
            return None
        return choose_ring_tiling(kind, len(rows), *weight.shape, processors=self._processors)

    def _launch_ring(
        self, tiling: RingTiling, kind: RingKind, rows: Tensor, weight: Weight
    ) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """The grid, and the arguments that all products have in common."""
        assert not isinstance(weight, Int8Weight), "see `_ring`"
        (count, inner), size = rows.shape, kind.parts * PART
        blocks, tiles = triton.cdiv(count, tiling.block_rows), weight.shape[0] // size
        numbers = blocks * tiles * tiling.splits * size * tiling.block_rows if tiling.splits > 1 else 1
        return (blocks, tiles, tiling.splits), {
            "partials": torch.empty(numbers, dtype=torch.float32, device=rows.device),
            "counters": self._counters,
            "rows_map": TensorDescriptor.from_tensor(rows, [tiling.block_rows, tiling.block_inner], _LAYOUT),
            "weight_map": TensorDescriptor.from_tensor(weight, [PART, tiling.block_inner], _LAYOUT),
            "count": count,
            "INNER": inner,
            "SPLITS": tiling.splits,
            "BLOCK_M": tiling.block_rows,
            "BLOCK_K": tiling.block_inner,
            "STAGES": tiling.stages,
            "num_warps": 4,
            "launch_pdl": True,
        }


def _sums_of(rows: ScaledRows) -> dict[str, int]:
    """How many sums of squares a row has; none where it is normed whole."""
    # A tile has parts too, which are others.
    sums = parts_of_rows(rows)
    return {"SUMS": sums["PARTS"], "BLOCK_SUMS": sums["BLOCK_PARTS"]}
