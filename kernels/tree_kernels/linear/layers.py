"""Linear layers together with what a decoder layer does before and after them.

A norm is done in two halves: the operation that makes the hidden rows also makes `ScaledRows`, the rows times the
norm's weight and the sums of their squares; the one that multiplies them divides its result by their root mean square.
So a decoder layer is four launches and its attention:

    rotary_linear, attention, add_linear, gated_linear, add_linear

`RowLinears` defines them all in PyTorch. On a GPU `TritonLinears` does them in kernels of few rows; `CublasLinears`
takes cuBLAS's products for many rows, with a launch behind each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.rows import HeadInput, HeadInputs, HeadRows, Norm, ScaledRows
from tree_kernels.paging import write_kv


class RowLinears:
    """The linear layers in PyTorch, in fp32 and rounded at the end: the definition of what the kernels compute.

    A weight is a tensor of the rows' dtype, or an `Int8Weight`: int8, weight-only, one scale a row (W8A16).
    `following` is a weight that a later launch reads, to be prefetched into the L2 cache.
    """

    def norm_rows(self, hidden: Tensor, norm: Norm) -> Tensor:
        """RMSNorm of `hidden` [R, H], in fp32 and rounded once. No row's result depends on the others."""
        scaled = self.scale_rows(hidden.float(), norm)
        return (scaled.rows * scaled.scale).to(hidden.dtype)

    def scale_rows(self, hidden: Tensor, norm: Norm) -> ScaledRows:
        """The first half of a norm of `hidden` [R, H]."""
        wide = hidden.float()
        rows = (wide * norm.weight.float()).to(hidden.dtype)
        return ScaledRows(rows, (wide * wide).sum(1, keepdim=True), norm.epsilon)

    def head_input(self, token_ids: Tensor, features: Tensor, positions: Tensor, of: HeadInputs) -> HeadInput:
        """What a draft head's first layer reads, each norm in fp32 and rounded once, for [R] integers each and features
        [R, H], last dimension contiguous, of the embedding's dtype."""
        embeddings = functional.embedding(token_ids, of.embedding)
        normed = self.norm_rows(embeddings, of.embedding_norm), self.norm_rows(features, of.feature_norm)
        angles = positions[:, None] * of.frequencies
        return HeadInput(torch.cat(normed, dim=1), angles.cos() * of.scaling, angles.sin() * of.scaling)

    def add_linear(
        self,
        rows: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        following: Weight | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, ScaledRows | None]:
        """A linear layer, the residual added, and the first half of the norm that reads the sum next: [R, N] in the
        rows' dtype, and its `ScaledRows` where a norm was given. Raises `ValueError` for dtypes or strides that do not
        fit.

        Args:
            rows: [R, K], last dimension contiguous.
            weight: [N, K], contiguous.
            bias: [N].
            residual: [R, N], contiguous.
            norm: over N.
        """
        total = _product(rows, weight, bias)
        if residual is not None:
            total = total + residual
        output = total.to(rows.dtype)
        return output, None if norm is None else self.scale_rows(output, norm)

    def gated_linear(self, rows: ScaledRows, weight: Weight) -> Tensor:
        """[R, N]: SiLU(gate) * up of the normed rows [R, K]; `weight` [2 * N, K] is that of gate above that of up."""
        gate, up = (_product(rows.rows, weight) * rows.scale).chunk(2, dim=1)
        return (functional.silu(gate) * up).to(rows.rows.dtype)

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        following: Weight | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Queries [R, Hq, D], keys and values of the normed rows; queries and keys rotated, keys and values cached.
        Raises `ValueError` on a GPU where D is no multiple of a tile's columns, or a tensor is not contiguous.

        Args:
            rows: [R, K], contiguous as all tensors are.
            weight: [(Hq + 2 * Hkv) * D, K], that of queries above that of keys above that of values.
            bias: [(Hq + 2 * Hkv) * D].
            heads: angles, slots and caches of the rows.
        """
        kv_heads, width = heads.key_cache.shape[-2:]
        total = _product(rows.rows, weight) * rows.scale
        if bias is not None:
            total = total + bias.float()
        total = total.view(len(total), -1, width)
        rotating, value = total[:, :-kv_heads], total[:, -kv_heads:]
        left, right = rotating.chunk(2, dim=2)
        cosines, sines = heads.cosines.float()[:, None], heads.sines.float()[:, None]
        rotated: Tensor = (rotating * cosines + torch.cat((-right, left), dim=2) * sines).to(rows.rows.dtype)
        query, key = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
        write_kv(key, value.to(rows.rows.dtype), heads.key_cache, heads.value_cache, heads.slots)
        return query


def _product(rows: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """[R, N] of rows [R, K], in fp32."""
    wide = weight.dequantized() if isinstance(weight, Int8Weight) else weight.float()
    product: Tensor = functional.linear(rows.float(), wide, None if bias is None else bias.float())
    return product
