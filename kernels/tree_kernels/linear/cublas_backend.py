"""Linear layers of many rows: cuBLAS's products, with one launch of ours behind each; and gate and up of up to 128 rows
in one launch.

Meaning, shapes and errors are those of `tree_kernels.linear.RowLinears`. A product is rounded to the rows' dtype, as
`nn.Linear` does, before what follows is computed in fp32. Kernels that also multiply do not round there: in half
precision that is one rounding more, in fp32 none. So that products fit float16, a norm is done whole before its
product.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from tree_kernels.linear.forms import LLAMA_HEADS, PLAIN_SUM, Activation, ActivationKind, HeadForm, SumForm
from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.rows import HeadRows, Norm, ScaledRows
from tree_kernels.linear.triton_backend import (
    BLOCK,
    TritonLinears,
    check_contiguous,
    check_heads,
    check_product,
    check_sum,
    or_other,
)
from tree_kernels.linear.triton_epilogues import gated_epilogue_kernel


class CublasLinears(TritonLinears):
    """See `tree_kernels.linear.RowLinears`. For any number of rows; made for more than a tile of `TritonLinears`. Gate
    and up are multiplied there too where one of its tiles has all rows and reads by tensor maps.

    They are not invariant, nor of a given tiling: how a product treats its rows is the library's own matter.
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
        form: SumForm = PLAIN_SUM,
        into: Tensor | None = None,
    ) -> tuple[Tensor, ScaledRows | None]:
        check_sum(bias, residual, norm, form)
        output = _product(rows, weight, into)
        if bias is None and residual is None and norm is None and form == PLAIN_SUM:
            return output, None
        return self._finish_sum(output, bias, residual, norm, form, output)

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        form: HeadForm = LLAMA_HEADS,
    ) -> Tensor:
        check_contiguous(bias=bias)
        check_heads(heads)
        return self._finish_heads(_normed_product(rows, weight), rows, bias, heads, form)

    def _activated(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Tensor:
        if gated and rows.squares is None and self._mapped_tiling(rows.rows, weight, gated=True) is not None:
            return super()._activated(rows, weight, bias, activation, gated=True)
        product = _normed_product(rows, weight)
        if not gated and bias is None and activation.kind is ActivationKind.NONE:
            return product
        check_contiguous(bias=bias, parameters=activation.parameters)
        count, outputs = len(product), product.shape[1] // (2 if gated else 1)
        output = product.new_empty(count, outputs)
        gated_epilogue_kernel[(count, triton.cdiv(outputs, BLOCK))](
            product, or_other(bias, output), or_other(activation.parameters, output), output,
            HAS_BIAS=bias is not None, GATED=gated, ACTIVATION=str(activation.kind), OUTPUTS=outputs, BLOCK=BLOCK,
            num_warps=4, **self._dependent,
        )  # fmt: skip
        return output


def _normed_product(rows: ScaledRows, weight: Weight) -> Tensor:
    """[R, N] of rows that are normed whole."""
    if rows.squares is not None:
        raise ValueError("expected rows that are normed whole, as this class norms them")
    return _product(rows.rows, weight)


def _product(rows: Tensor, weight: Weight, into: Tensor | None = None) -> Tensor:
    """[R, N] of rows [R, K], in new memory or `into` [R, N]."""
    if isinstance(weight, Int8Weight):
        raise ValueError("expected a weight of the rows' dtype: cuBLAS has no product with int8 weights")
    check_product(rows, weight)
    return functional.linear(rows, weight) if into is None else torch.mm(rows, weight.t(), out=into)
