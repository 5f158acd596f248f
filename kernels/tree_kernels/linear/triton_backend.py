"""Launches of the linear kernels. Meaning, shapes and errors are those of `tree_kernels.linear.RowLinears`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tree_kernels.conditional_launch import conditional_launch
from tree_kernels.dependent_launch import dependent_launch
from tree_kernels.linear.forms import LLAMA_HEADS, PLAIN_SUM, Activation, HeadForm, SumForm
from tree_kernels.linear.int8_weight import Int8Weight, Weight
from tree_kernels.linear.layers import RowLinears
from tree_kernels.linear.rows import HeadInput, HeadInputs, HeadRows, Norm, ScaledRows
from tree_kernels.linear.triton_epilogues import add_epilogue_kernel, rotary_epilogue_kernel
from tree_kernels.linear.triton_kernels import (
    activated_kernel,
    add_kernel,
    copy_kernel,
    head_input_kernel,
    norm_kernel,
    rotary_kernel,
)
from tree_kernels.linear.triton_tiling import (
    LinearTiling,
    choose_linear_tiling,
    choose_mapped_tiling,
    heads_take_a_launch,
    whole_head_tiling,
)

_MIN_OUTPUTS = 16
# Tiles of one launch that may be split: those of more than 60,000 rows.
_MAX_TILES = 65536
# Elements of one program behind a product: sixteen bytes a thread.
BLOCK = 1024


class TritonLinears(RowLinears):
    """See `tree_kernels.linear.RowLinears`. Launches of one object must not run concurrently."""

    def __init__(self, device: torch.device, *, invariant: bool = False, tiling: LinearTiling | None = None) -> None:
        """`tiling` is for all products; None chooses one by their sizes."""
        self._invariant = invariant
        self._tiling = tiling
        # Every launch leaves them at zero.
        self._counters = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
        self._dependent = dependent_launch(device)

    def norm_rows(self, hidden: Tensor, norm: Norm, into: Tensor | None = None) -> Tensor:
        output = hidden.new_empty(hidden.shape) if into is None else into
        self._launch_norm(hidden, norm, output, output, whole=True)
        return output

    def copy_rows(self, rows: Tensor, into: Tensor) -> None:
        count, width = rows.shape
        if into.shape != rows.shape or (into.stride(1), rows.stride(1)) != (1, 1):
            raise ValueError("expected rows of one shape whose last dimension is contiguous")
        copy_kernel[(count,)](
            rows, into, row_stride=rows.stride(0), output_stride=into.stride(0), WIDTH=width,
            BLOCK=triton.next_power_of_2(width), num_warps=4, **self._dependent,
        )  # fmt: skip

    def scale_rows(self, hidden: Tensor, norm: Norm) -> ScaledRows:
        if not norm.halves:
            return ScaledRows(self.norm_rows(hidden, norm), None, norm.epsilon)
        output = hidden.new_empty(hidden.shape)
        squares = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        self._launch_norm(hidden, norm, output, squares, whole=False)
        return ScaledRows(output, squares, norm.epsilon)

    def head_input(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, of: HeadInputs, sources: Tensor | None = None
    ) -> HeadInput:
        if features.dtype != of.embedding.dtype or features.stride(1) != 1 or not of.embedding.is_contiguous():
            raise ValueError("expected contiguous features and embeddings of one dtype")
        check_contiguous(
            token_ids=token_ids, positions=positions, sources=sources, frequencies=of.frequencies,
            embedding_norm=of.embedding_norm.weight, feature_norm=of.feature_norm.weight,
        )  # fmt: skip
        rows, width, rotary = len(token_ids), features.shape[1], len(of.frequencies)
        output = features.new_empty(rows, 2 * width)
        taken = features if sources is None else features.new_empty(rows, width)
        cosines, sines = torch.empty(2, rows, rotary, dtype=torch.float32, device=features.device)
        head_input_kernel[(rows,)](
            token_ids, of.embedding, of.embedding_norm.weight, features, of.feature_norm.weight, positions,
            or_other(sources, token_ids), of.frequencies, output, taken, cosines, sines,
            feature_stride=features.stride(0), embedding_epsilon=of.embedding_norm.epsilon,
            feature_epsilon=of.feature_norm.epsilon, scaling=of.scaling, TAKES=sources is not None,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), ROTARY=rotary,
            BLOCK_ROTARY=triton.next_power_of_2(rotary), num_warps=4, **conditional_launch(output), **self._dependent,
        )  # fmt: skip
        return HeadInput(output, cosines, sines, taken)

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
        check_contiguous(into=into)
        output = rows.new_empty(len(rows), weight.shape[0]) if into is None else into
        if form.norm is not None or (norm is not None and not norm.halves):
            # These need a whole row, of which a tile has a part.
            product = rows.new_empty(len(rows), weight.shape[0], dtype=torch.float32)
            self._add(rows, weight, product)
            return self._finish_sum(product, bias, residual, norm, form, output)
        return output, self._add(rows, weight, output, bias, residual, norm, form.multiplier)

    def add_rows(
        self, rows: Tensor, residual: Tensor | None = None, norm: Norm | None = None, form: SumForm = PLAIN_SUM
    ) -> tuple[Tensor, ScaledRows | None]:
        check_sum(None, residual, norm, form)
        check_contiguous(rows=rows)
        return self._finish_sum(rows, None, residual, norm, form, torch.empty_like(rows))

    def rotary_linear(
        self,
        rows: ScaledRows,
        weight: Weight,
        bias: Tensor | None,
        heads: HeadRows,
        form: HeadForm = LLAMA_HEADS,
    ) -> Tensor:
        kv_heads, width = heads.key_cache.shape[-2:]
        check_product(rows.rows, weight)
        check_contiguous(rows=rows.rows, squares=rows.squares, bias=bias)
        check_heads(heads)
        norms = norms_of(form, width)
        if norms == "all" or (norms == "heads" and self._are_heads_apart(len(rows.rows), width)):
            # In fp32, since the rows may be normed by half.
            product = rows.rows.new_empty(len(rows.rows), weight.shape[0], dtype=torch.float32)
            self._add(rows.rows, weight, product)
            return self._finish_heads(product, rows, bias, heads, form)
        # Where pairs of a head lie half a head apart, the columns of a tile that is a head follow each other.
        whole = not form.interleaved and heads.cosines.shape[1] in (0, width)
        tiling = self._head_tiling(rows.rows, weight, width, normed=norms == "heads", mapped=whole)
        count, query_heads = len(rows.rows), weight.shape[0] // width - 2 * kv_heads
        query = heads.room_for_queries(rows.rows, query_heads)
        grid, options = self._launch(tiling, rows.rows, weight, weight.shape[0] // tiling.block_outputs)
        rotary_kernel[grid](
            rows.rows, or_other(rows.squares, query), or_other(bias, query),
            cosines=heads.cosines, sines=heads.sines, slots=heads.slots, query=query, key_cache=heads.key_cache,
            value_cache=heads.value_cache, count=count, epsilon=rows.epsilon, HAS_BIAS=bias is not None,
            NORMS=norms == "heads", HEADS=query_heads, KV_HEADS=kv_heads, WIDTH=width,
            **head_options(form, heads, query), **parts_of_rows(rows), **options,
            **_maps(tiling, rows.rows, weight, width),
        )  # fmt: skip
        return query

    def _are_heads_apart(self, rows: int, width: int) -> bool:
        """Whether normed heads of `width` need more than a tile has, or take longer in one."""
        if width != triton.next_power_of_2(width) or width > 256:
            return True
        return self._tiling is None and heads_take_a_launch(rows, width, invariant=self._invariant)

    def _head_tiling(self, rows: Tensor, weight: Weight, width: int, *, normed: bool, mapped: bool) -> LinearTiling:
        """The tiling of queries, keys and values of heads of `width`: a tile lies in one head, or is one if heads are
        normed, and with tensor maps, where `mapped` allows them. Raises `ValueError` for other widths."""
        tiling = self._prepare(rows, weight, mapped=mapped, head_width=width)
        if normed and not tiling.mapped and (self._tiling is None or tiling.block_outputs != width):
            tiling = whole_head_tiling(tiling, width, *weight.shape)
        tiling = replace(tiling, block_outputs=math.gcd(width, tiling.block_outputs))
        if tiling.block_outputs < _MIN_OUTPUTS:
            raise ValueError(f"expected heads of a multiple of {_MIN_OUTPUTS}, got {width}")
        return tiling

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
        """Write the sum to `output` [R, N]; the rows for the norm behind it, where there is one."""
        tiling = self._prepare(rows, weight, mapped=True)
        count, outputs = output.shape
        tiles = triton.cdiv(outputs, tiling.block_outputs)
        scaled = room_for_norm(output, norm, tiles)
        grid, options = self._launch(tiling, rows, weight, tiles)
        add_kernel[grid](
            rows, *sum_tensors(output, bias, residual, norm, scaled),
            count=count, row_stride=rows.stride(0), HAS_BIAS=bias is not None, MULTIPLIER=multiplier,
            ADDS=residual is not None, SCALES=norm is not None, OUTPUTS=outputs, **options,
            **_maps(tiling, rows, weight, tiling.block_outputs),
        )  # fmt: skip
        return scaled

    def _activated(
        self, rows: ScaledRows, weight: Weight, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Tensor:
        tiling = self._prepare(rows.rows, weight, mapped=True, gated=gated)
        if gated and tiling.mapped:
            tiling = replace(tiling, splits=1)
        check_contiguous(rows=rows.rows, squares=rows.squares, bias=bias, parameters=activation.parameters)
        parts = 2 if gated else 1
        # Columns that a tile makes.
        block_outputs = tiling.block_outputs // parts
        count, outputs = len(rows.rows), weight.shape[0] // parts
        output = rows.rows.new_empty(count, outputs)
        grid, options = self._launch(tiling, rows.rows, weight, triton.cdiv(outputs, block_outputs))
        activated_kernel[grid](
            rows.rows, or_other(rows.squares, output), or_other(bias, output),
            or_other(activation.parameters, output), output, count=count, epsilon=rows.epsilon,
            HAS_BIAS=bias is not None, GATED=gated, ACTIVATION=str(activation.kind), OUTPUTS=outputs,
            **parts_of_rows(rows), **options, **_maps(tiling, rows.rows, weight, block_outputs),
        )  # fmt: skip
        return output

    def _finish_sum(
        self,
        product: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm: Norm | None,
        form: SumForm,
        output: Tensor,
    ) -> tuple[Tensor, ScaledRows | None]:
        """`output` [R, N], made of a product, and the rows of the norm behind it, normed whole."""
        width = output.shape[1]
        scaled = None if norm is None else ScaledRows(torch.empty_like(output), None, norm.epsilon)
        post = form.norm
        post_weight, post_bias = (output, output) if post is None else (post.weight, or_other(post.bias, output))
        weight, shift = (output, output) if norm is None else (norm.weight, or_other(norm.bias, output))
        # Columns of a row above which a program of four warps would hold too many numbers a thread.
        add_epilogue_kernel[(len(output),)](
            product, or_other(bias, output), post_weight, post_bias, or_other(residual, output), weight, shift,
            output, output if scaled is None else scaled.rows, 0.0 if post is None else post.epsilon,
            0.0 if norm is None else norm.epsilon, HAS_BIAS=bias is not None, POST_NORMS=post is not None,
            POST_CENTERED=post is not None and post.centered, HAS_POST_BIAS=post is not None and post.bias is not None,
            MULTIPLIER=form.multiplier, ADDS=residual is not None, NORMS=norm is not None,
            CENTERED=norm is not None and norm.centered, HAS_NORM_BIAS=norm is not None and norm.bias is not None,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
            **self._dependent,
        )  # fmt: skip
        return output, scaled

    def _finish_heads(
        self,
        product: Tensor,
        rows: ScaledRows,
        bias: Tensor | None,
        heads: HeadRows,
        form: HeadForm,
    ) -> Tensor:
        """Queries [R, Hq, D], made of the product of queries, keys and values; keys and values go to the caches."""
        kv_heads, width = heads.key_cache.shape[-2:]
        count, total = len(product), product.shape[1] // width
        query = heads.room_for_queries(rows.rows, total - 2 * kv_heads)
        block_half = triton.next_power_of_2(width // 2)
        block_heads = min(max(1, BLOCK // block_half), triton.next_power_of_2(total))
        rotary_epilogue_kernel[(count, triton.cdiv(total, block_heads))](
            product, or_other(rows.squares, query), or_other(bias, query),
            cosines=heads.cosines, sines=heads.sines, slots=heads.slots, query=query, key_cache=heads.key_cache,
            value_cache=heads.value_cache, epsilon=rows.epsilon, INNER=rows.rows.shape[1], HAS_BIAS=bias is not None,
            NORMS=norms_of(form, width), HEADS=total - 2 * kv_heads, KV_HEADS=kv_heads, WIDTH=width,
            BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, num_warps=4,
            **head_options(form, heads, query), **parts_of_rows(rows), **conditional_launch(query), **self._dependent,
        )  # fmt: skip
        return query

    def _prepare(
        self, rows: Tensor, weight: Weight, *, mapped: bool = False, gated: bool = False, head_width: int | None = None
    ) -> LinearTiling:
        """The tiling of a product, of heads of a width or not; `mapped` where the kernel can read by tensor maps."""
        check_product(rows, weight)
        if self._tiling is not None:
            mapped = mapped and is_mappable(rows, weight) and self._tiling.mapped
            return replace(self._tiling, mapped=mapped and head_width in (None, self._tiling.block_outputs))
        found = self._mapped_tiling(rows, weight, gated=gated, head_width=head_width) if mapped else None
        int8 = isinstance(weight, Int8Weight)
        return found or choose_linear_tiling(len(rows), *weight.shape, invariant=self._invariant, int8=int8)

    def _mapped_tiling(
        self, rows: Tensor, weight: Weight, *, gated: bool, head_width: int | None = None
    ) -> LinearTiling | None:
        """The tiling of a product whose factors are read by tensor maps, where that is faster."""
        # In half precision: in fp32 the blocks would not fit into a processor.
        if (
            self._invariant
            or not self._dependent["DEPENDENT"]
            or rows.element_size() != 2
            or not is_mappable(rows, weight)
        ):
            return None
        return choose_mapped_tiling(len(rows), *weight.shape, gated=gated, head_width=head_width)

    def _launch_norm(self, hidden: Tensor, norm: Norm, output: Tensor, squares: Tensor, *, whole: bool) -> None:
        width = hidden.shape[1]
        if hidden.stride(1) != 1 or output.stride(1) != 1:
            raise ValueError("expected rows whose last dimension is contiguous")
        check_contiguous(norm=norm.weight, norm_bias=norm.bias)
        norm_kernel[(len(hidden),)](
            hidden, norm.weight, or_other(norm.bias, output), output, squares, row_stride=hidden.stride(0),
            output_stride=output.stride(0), epsilon=norm.epsilon, WHOLE=whole, CENTERED=norm.centered,
            HAS_NORM_BIAS=norm.bias is not None, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
            **conditional_launch(output), **self._dependent,
        )  # fmt: skip

    def _launch(
        self, tiling: LinearTiling, rows: Tensor, weight: Weight, tiles: int
    ) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """The grid, and the arguments that all products have in common."""
        count, inner = rows.shape
        blocks = triton.cdiv(count, tiling.block_rows)
        # Other splits would need masks, and more tiles more counters.
        splits = tiling.splits if inner % (tiling.splits * tiling.block_inner) == 0 else 1
        splits = splits if blocks * tiles <= _MAX_TILES else 1
        numbers = blocks * tiles * splits * tiling.block_rows * tiling.block_outputs if splits > 1 else 1
        read, row_scales = (weight.words, weight.row_scales) if isinstance(weight, Int8Weight) else (weight, None)
        options = {
            "weight": read,
            "row_scales": or_other(row_scales, read),
            "INT8": row_scales is not None,
            "partials": torch.empty(numbers, dtype=torch.float32, device=rows.device),
            "counters": self._counters,
            "INNER": inner,
            "SPLITS": splits,
            "BLOCK_M": tiling.block_rows,
            "BLOCK_N": tiling.block_outputs,
            "BLOCK_K": tiling.block_inner,
            "AHEAD": tiling.ahead if _prefetchable(read) else 0,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
            **conditional_launch(read),
            **self._dependent,
        }
        return (blocks, tiles, splits), options


def check_product(rows: Tensor, weight: Weight) -> None:
    """Raise `ValueError` unless `rows` [R, K] and `weight` [N, K] are contiguous in K, and of one dtype or the weight
    an `Int8Weight`."""
    if isinstance(weight, Int8Weight):
        check_contiguous(row_scales=weight.row_scales)
        fits, numbers = weight.words.dtype == torch.int16 and len(weight.row_scales) == len(weight.words), weight.words
    else:
        fits, numbers = weight.dtype == rows.dtype, weight
    if not fits or rows.stride(1) != 1 or not numbers.is_contiguous():
        raise ValueError("expected contiguous rows and weights of one dtype, or weights in int8")
    if rows.shape[1] != weight.shape[1]:
        raise ValueError(f"expected rows [R, {weight.shape[1]}], got {list(rows.shape)}")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raise `ValueError` with the name of a tensor that is not contiguous: kernels would read other numbers of it."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"expected {name} to be contiguous, got strides {tensor.stride()}")


def check_sum(bias: Tensor | None, residual: Tensor | None, norm: Norm | None, form: SumForm) -> None:
    """Raise `ValueError` unless kernels can read all that is added to a product, and the norms around it."""
    check_contiguous(bias=bias, residual=residual)
    for name, one in (("norm", norm), ("post_norm", form.norm)):
        if one is not None:
            check_contiguous(**{name: one.weight, f"{name}_bias": one.bias})


def norms_of(form: HeadForm, width: int) -> str:
    """What norms of heads of `width` reach over: "none", "heads" each by itself, or "all". Raises `ValueError` for
    norms that no kernel computes."""
    if form.query_norm is None or form.key_norm is None:
        return "none"
    norms = form.query_norm, form.key_norm
    if not all(norm.halves for norm in norms):
        raise ValueError("expected RMSNorms of heads: the kernels have no LayerNorm there")
    check_contiguous(query_norm=norms[0].weight, key_norm=norms[1].weight)
    return "heads" if norms[0].weight.numel() == width else "all"


def check_heads(heads: HeadRows) -> None:
    """Raise `ValueError` unless the kernels can read and write all tensors of `heads`."""
    check_contiguous(
        cosines=heads.cosines, sines=heads.sines, slots=heads.slots,
        key_cache=heads.key_cache, value_cache=heads.value_cache, queries=heads.queries,
    )  # fmt: skip


def _prefetchable(weight: Tensor) -> bool:
    """Whether rows of a weight, [N, K] numbers or [N, K / 2] words, can be brought into the L2 cache ahead of their
    product. Weights in fp32 are not."""
    row_bytes = weight.shape[1] * weight.element_size()
    # Bytes of one prefetch, and of what its address must be a multiple.
    return row_bytes >= 256 and row_bytes % 16 == 0 and weight.element_size() <= 2


def is_mappable(rows: Tensor, weight: Weight) -> bool:
    """Whether both factors of a product can be read by tensor maps: numbers of one type, in rows and from addresses
    that are multiples of 16 bytes."""
    if isinstance(weight, Int8Weight) or not len(rows):
        return False
    strides = (one.stride(0) * one.element_size() for one in (rows, weight))
    return not any(each % 16 for each in (rows.data_ptr(), weight.data_ptr(), *strides))


def _maps(tiling: LinearTiling, rows: Tensor, weight: Weight, outputs: int) -> dict[str, Any]:
    """Tensor maps of a product's factors, in blocks of so many of the weight's rows; where the tiling has none, what
    the kernel does not read."""
    if not tiling.mapped:
        unread = weight.words if isinstance(weight, Int8Weight) else weight
        return {"MAPPED": False, "rows_map": unread, "weight_map": unread}
    assert not isinstance(weight, Int8Weight), "see `_mappable`"
    return {
        "MAPPED": True,
        "rows_map": TensorDescriptor.from_tensor(rows, [tiling.block_rows, tiling.block_inner]),
        "weight_map": TensorDescriptor.from_tensor(weight, [outputs, tiling.block_inner]),
    }


def or_other(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor`, or `other` where there is none: a kernel takes a pointer also for what it does not read."""
    return other if tensor is None else tensor


def room_for_norm(output: Tensor, norm: Norm | None, tiles: int) -> ScaledRows | None:
    """Memory for the first half of a norm of `output` [R, N] whose columns are made in so many tiles."""
    if norm is None:
        return None
    squares = torch.empty(len(output), tiles, dtype=torch.float32, device=output.device)
    return ScaledRows(torch.empty_like(output), squares, norm.epsilon)


def sum_tensors(
    output: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Norm | None, scaled: ScaledRows | None
) -> tuple[Tensor, ...]:
    """What a kernel that adds reads and writes beside its product, in its order; `output` stands for what is absent."""
    return (
        or_other(bias, output), or_other(residual, output), output if norm is None else norm.weight, output,
        output if scaled is None else scaled.rows, output if scaled is None else or_other(scaled.squares, output),
    )  # fmt: skip


def parts_of_rows(rows: ScaledRows) -> dict[str, int]:
    """How many sums of squares a row has; none where it is normed whole."""
    parts = 0 if rows.squares is None else rows.squares.shape[1]
    return {"PARTS": parts, "BLOCK_PARTS": triton.next_power_of_2(max(1, parts))}


def head_options(form: HeadForm, heads: HeadRows, other: Tensor) -> dict[str, Any]:
    """The arguments of a form; `other` stands for norms that are not read."""
    query, key = form.query_norm, form.key_norm
    return {
        "query_norm": other if query is None else query.weight,
        "key_norm": other if key is None else key.weight,
        "query_epsilon": 0.0 if query is None else query.epsilon,
        "key_epsilon": 0.0 if key is None else key.epsilon,
        "ROTARY": heads.cosines.shape[1],
        "INTERLEAVED": form.interleaved,
        "VALUE_EPSILON": form.value_epsilon,
    }
