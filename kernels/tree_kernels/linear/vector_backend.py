"""Launches for a single row. Meaning, shapes and errors are those of `tree_kernels.linear.RowLinears`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tree_kernels.linear.forms import LLAMA_HEADS, Activation, HeadForm
from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.rows import HeadRows, Norm, ScaledRows
from tree_kernels.linear.triton_backend import (
    TritonLinears,
    check_contiguous,
    check_heads,
    check_product,
    head_options,
    norms_of,
    or_other,
    parts_of_rows,
    room_for_norm,
    sum_tensors,
)
from tree_kernels.linear.triton_tiling import VectorTiling, choose_vector_tiling
from tree_kernels.linear.triton_vectors import activated_vector_kernel, add_vector_kernel, rotary_vector_kernel


class VectorLinears(TritonLinears):
    """The layers of one row: a product is read through registers where its weight is in half precision and has rows of
    at least `MIN_INNER` numbers. All else is as in `TritonLinears`.

    Launches of one object must not run concurrently.
    """

    def __init__(self, device: torch.device, *, vectors: VectorTiling | None = None) -> None:
        """`vectors` is for all products; None chooses one by their sizes."""
        super().__init__(device)
        self._vectors = vectors

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        form: HeadForm = LLAMA_HEADS,
    ) -> Tensor:
        kv_heads, width = heads.key_cache.shape[-2:]
        tiling = self._vector_tiling(rows.rows, weight)
        whole = width == triton.next_power_of_2(width) and width >= 32
        norms = norms_of(form, width)
        if tiling is None or isinstance(weight, Int8Weight) or not whole or norms == "all":
            return super().rotary_linear(rows, weight, bias, heads, form)
        check_contiguous(rows=rows.rows, squares=rows.squares, bias=bias)
        check_heads(heads)
        query_heads = weight.shape[0] // width - 2 * kv_heads
        query = heads.room_for_queries(rows.rows, query_heads)
        product = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        rotary_vector_kernel[(weight.shape[0] // tiling.block_outputs,)](
            rows.rows, or_other(rows.squares, query), or_other(bias, query),
            cosines=heads.cosines, sines=heads.sines, slots=heads.slots, query=query, key_cache=heads.key_cache,
            value_cache=heads.value_cache, weight=weight, product=product, counters=self._counters,
            epsilon=rows.epsilon, HAS_BIAS=bias is not None, NORMS=norms == "heads", HEADS=query_heads,
            KV_HEADS=kv_heads, WIDTH=width, **head_options(form, heads, query), **parts_of_rows(rows),
            **self._sizes(tiling, weight),
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
        tiling = self._vector_tiling(rows, weight, scaled=norm is not None)
        if tiling is None or isinstance(weight, Int8Weight):
            return super()._add(rows, weight, output, bias, residual, norm, multiplier)
        outputs = weight.shape[0]
        tiles = triton.cdiv(outputs, tiling.block_outputs)
        scaled = room_for_norm(output, norm, tiles)
        add_vector_kernel[(tiles,)](
            rows, *sum_tensors(output, bias, residual, norm, scaled), weight,
            HAS_BIAS=bias is not None, MULTIPLIER=multiplier, ADDS=residual is not None, SCALES=norm is not None,
            OUTPUTS=outputs, **self._sizes(tiling, weight),
        )  # fmt: skip
        return scaled

    def _activated(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Tensor:
        tiling = self._vector_tiling(rows.rows, weight, gated=gated)
        if tiling is None or isinstance(weight, Int8Weight):
            return super()._activated(rows, weight, bias, activation, gated=gated)
        check_contiguous(rows=rows.rows, squares=rows.squares, bias=bias, parameters=activation.parameters)
        outputs = weight.shape[0] // (2 if gated else 1)
        output = rows.rows.new_empty(1, outputs)
        activated_vector_kernel[(triton.cdiv(outputs, tiling.block_outputs),)](
            rows.rows, or_other(rows.squares, output), or_other(bias, output), or_other(activation.parameters, output),
            output, weight, rows.epsilon, HAS_BIAS=bias is not None, GATED=gated, ACTIVATION=str(activation.kind),
            OUTPUTS=outputs, **parts_of_rows(rows), **self._sizes(tiling, weight),
        )  # fmt: skip
        return output

    def _vector_tiling(
        self, rows: Tensor, weight: Weight, *, gated: bool = False, scaled: bool = False
    ) -> VectorTiling | None:
        """None where the matrix units' kernels run."""
        check_product(rows, weight)
        if len(rows) != 1:
            return None
        chosen = choose_vector_tiling(*weight.shape, itemsize=rows.element_size(), gated=gated, scaled=scaled)
        return self._vectors or chosen

    def _sizes(self, tiling: VectorTiling, weight: Tensor) -> dict[str, Any]:
        return {
            "INNER": weight.shape[1],
            "BLOCK_N": tiling.block_outputs,
            "CHUNKS": tiling.chunks,
            "BLOCK_T": tiling.block_inner,
            "num_warps": tiling.warps,
            **self._dependent,
        }
