"""Linear layers of many rows: cuBLAS's products, with one launch of ours behind each.

Meaning, shapes and errors are those of `tree_kernels.linear.RowLinears`. A product is rounded to the rows' dtype, as
`nn.Linear` does, before what follows is computed in fp32. Kernels of few rows do not round there: in half precision
that is one rounding more, in fp32 none. So that products fit float16, a norm is done whole before its product.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.rows import HeadRows, Norm, ScaledRows
from tree_kernels.linear.triton_backend import TritonLinears, check_contiguous, check_heads, check_product, or_other
from tree_kernels.linear.triton_epilogues import add_epilogue_kernel, gated_epilogue_kernel, rotary_epilogue_kernel

# Elements of one program: sixteen bytes a thread.
_BLOCK = 1024
# Columns of a row above which a program of four warps would hold too many numbers a thread.
_FOUR_WARPS = 2048


class CublasLinears(TritonLinears):
    """See `tree_kernels.linear.RowLinears`. For any number of rows; made for more than a tile of `TritonLinears`.

    No weight is prefetched: a product of many rows leaves the memory no time for it. Nor are they invariant or of a
    given tiling: how a product treats its rows is the library's own matter.
    """

    def scale_rows(self, hidden: Tensor, norm: Norm) -> ScaledRows:
        return ScaledRows(self.norm_rows(hidden, norm), None, norm.epsilon)

    def add_linear(
        self,
        rows: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        following: Weight | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, ScaledRows | None]:
        check_contiguous(bias=bias, residual=residual, norm=None if norm is None else norm.weight)
        output = _product(rows, weight)
        if bias is None and residual is None and norm is None:
            return output, None
        scaled = None if norm is None else ScaledRows(torch.empty_like(output), None, norm.epsilon)
        width = weight.shape[0]
        add_epilogue_kernel[(len(rows),)](
            output, or_other(bias, output), or_other(residual, output), output if norm is None else norm.weight,
            output if scaled is None else scaled.rows, 0.0 if norm is None else norm.epsilon,
            HAS_BIAS=bias is not None, ADDS=residual is not None, NORMS=norm is not None,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= _FOUR_WARPS else 8,
            **self._order(),
        )  # fmt: skip
        return output, scaled

    def gated_linear(self, rows: ScaledRows, weight: Weight) -> Tensor:
        count, outputs = len(rows.rows), weight.shape[0] // 2
        output = rows.rows.new_empty(count, outputs)
        gated_epilogue_kernel[(count, triton.cdiv(outputs, _BLOCK))](
            _normed_product(rows, weight), output, OUTPUTS=outputs, BLOCK=_BLOCK, num_warps=4, **self._order()
        )  # fmt: skip
        return output

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        following: Weight | None = None,  # noqa: ARG002
    ) -> Tensor:
        check_contiguous(bias=bias)
        check_heads(heads)
        kv_heads, width = heads.key_cache.shape[-2:]
        count, total = len(rows.rows), weight.shape[0] // width
        query = rows.rows.new_empty(count, total - 2 * kv_heads, width)
        block_half = triton.next_power_of_2(width // 2)
        block_heads = min(max(1, _BLOCK // block_half), triton.next_power_of_2(total))
        rotary_epilogue_kernel[(count, triton.cdiv(total, block_heads))](
            _normed_product(rows, weight), or_other(bias, query), heads.cosines, heads.sines, heads.slots, query,
            heads.key_cache, heads.value_cache,
            HAS_BIAS=bias is not None, HEADS=total - 2 * kv_heads, KV_HEADS=kv_heads, WIDTH=width,
            BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, num_warps=4, **self._order(),
        )  # fmt: skip
        return query


def _normed_product(rows: ScaledRows, weight: Weight) -> Tensor:
    """[R, N] of rows that are normed whole."""
    if rows.squares is not None:
        raise ValueError("expected rows that are normed whole, as this class norms them")
    return _product(rows.rows, weight)


def _product(rows: Tensor, weight: Weight) -> Tensor:
    """[R, N] of rows [R, K]."""
    if isinstance(weight, Int8Weight):
        raise ValueError("expected a weight of the rows' dtype: cuBLAS has no product with int8 weights")
    check_product(rows, weight)
    return functional.linear(rows, weight)
