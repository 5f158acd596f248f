"""Launches of the experts' kernels. Meaning, shapes and errors are those of `tree_kernels.experts.RowExperts`.

Nothing waits for the host, and shapes of launches follow from the number of rows alone. Sums are in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tree_kernels.dependent_launch import dependent_launch
from tree_kernels.experts.layers import RowExperts, check_mix, check_router, choose, router_logits, with_first
from tree_kernels.experts.triton_kernels import combine_kernel, expert_down_kernel, expert_gated_kernel
from tree_kernels.experts.triton_routing import order_kernel, route_kernel, route_vector_kernel
from tree_kernels.experts.triton_tiling import (
    MAX_PAIRS,
    ROUTER_VECTORS,
    ExpertTiling,
    ExpertTilings,
    ExpertVectorTilings,
    choose_expert_tilings,
    choose_expert_vectors,
    reads_few_rows,
)
from tree_kernels.experts.types import Chosen, ExpertWeights, Routing
from tree_kernels.experts.vector_backend import gate_options, mix_vectors
from tree_kernels.linear import Norm, ScaledRows
from tree_kernels.linear.triton_backend import check_contiguous, or_other, parts_of_rows

# Of the router's product: experts of a tile, and most programs that share a tile.
_ROUTER_OUTPUTS, _ROUTER_SPLITS = 16, 9
# Blocks of rows that one launch may choose for, a counter each.
_MAX_BLOCKS = 4096
# Threads of a prefetch, and the bytes of it that an L2 cache of 50 MB keeps until they are read; of Hopper.
_PREFETCH_THREADS, _PREFETCH_LIMIT = 128, 32 << 20


class TritonExperts(RowExperts):
    """See `tree_kernels.experts.RowExperts`. Launches of one object must not run concurrently."""

    def __init__(
        self,
        device: torch.device,
        *,
        invariant: bool = False,
        tilings: ExpertTilings | None = None,
        vectors: ExpertVectorTilings | None = None,
    ) -> None:
        """Without `tilings` and `vectors` they are chosen by the number of rows. With `vectors`, which go before
        `tilings`, weights go through registers wherever a norm allows it."""
        self._invariant, self._tilings, self._vectors = invariant, tilings, vectors
        # Every launch leaves them at zero.
        self._counters = torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device)
        self._dependent = dependent_launch(device)

    def route(
        self,
        rows: ScaledRows,
        weight: Tensor,
        correction: Tensor | None,
        routing: Routing,
        bias: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Chosen:
        check_router(rows, weight, correction, routing, bias)
        check_contiguous(weight=weight, squares=rows.squares, correction=correction, bias=bias, present=present)
        count, inner = rows.rows.shape
        experts = len(weight)
        # The first one of any step is there, or none.
        present = present if count > 1 else None
        block_rows = 16 if self._invariant or count > 8 else 8
        blocks = triton.cdiv(count, block_rows)
        if blocks > _MAX_BLOCKS or not _has_even_groups(experts, routing):
            return choose(router_logits(with_first(rows, present), weight, bias), correction, routing, rows.rows.dtype)
        found = Chosen(
            torch.empty(count, routing.top_k, dtype=torch.int32, device=weight.device),
            torch.empty(count, routing.top_k, dtype=torch.float32, device=weight.device),
        )
        options = {
            "INNER": inner,
            "EXPERTS": experts,
            "BLOCK_E": max(_ROUTER_OUTPUTS, triton.next_power_of_2(experts)),
            "TOP_K": routing.top_k,
            "BLOCK_TOP_K": triton.next_power_of_2(routing.top_k),
            "SIGMOID": routing.scores == "sigmoid",
            "PADDED": present is not None,
            "HAS_BIAS": bias is not None,
            "CORRECTS": correction is not None,
            "GROUPS": routing.groups,
            "TOP_GROUPS": routing.top_groups,
            "TOP2": routing.group_score == "top2",
            "RENORMALISES": routing.renormalised,
            "ROUNDS": routing.rounded,
            **parts_of_rows(rows),
            **self._dependent,
        }
        if self._vectors is not None or (not self._invariant and reads_few_rows(count, inner)):
            self._route_vectors(rows, weight, (bias, correction, present), routing, found, options)
        else:
            self._route_blocks(rows, weight, (bias, correction, present), routing, found, options, block_rows)
        return found

    def _route_vectors(
        self,
        rows: ScaledRows,
        weight: Tensor,
        others: tuple[Tensor | None, Tensor | None, Tensor | None],
        routing: Routing,
        found: Chosen,
        options: dict[str, Any],
    ) -> None:
        """Write the choice to `found`, each row by itself."""
        count, experts, tiling = len(rows.rows), len(weight), ROUTER_VECTORS
        tiles = triton.cdiv(experts, tiling.block_outputs)
        route_vector_kernel[(tiles, count)](
            rows.rows, or_other(rows.squares, found.weights), weight,
            *(or_other(one, weight) for one in others),
            torch.empty(count, experts, dtype=torch.float32, device=weight.device), self._counters, found.experts,
            found.weights, rows.rows.stride(0), rows.epsilon, routing.least_sum, routing.clamped_sum, routing.scaling,
            TILES=tiles, BLOCK_N=tiling.block_outputs, CHUNKS=tiling.chunks, BLOCK_T=tiling.block_inner,
            num_warps=tiling.warps, **options,
        )  # fmt: skip

    def _route_blocks(
        self,
        rows: ScaledRows,
        weight: Tensor,
        others: tuple[Tensor | None, Tensor | None, Tensor | None],
        routing: Routing,
        found: Chosen,
        options: dict[str, Any],
        block_rows: int,
    ) -> None:
        """Write the choice to `found`, so many rows at a time."""
        (count, inner), experts = rows.rows.shape, len(weight)
        blocks, tiles = triton.cdiv(count, block_rows), triton.cdiv(experts, _ROUTER_OUTPUTS)
        # Programs have whole blocks, as many each. Of 2,880 numbers 9 programs of blocks of 64 were the fastest, 3.7
        # beside 8.6 us of one program: benchmarks/results/2026-12-01-h200-experts-and-states.md.
        step = 128 if inner % 128 == 0 else 64
        splits = max(n for n in range(1, _ROUTER_SPLITS + 1) if n == 1 or inner % (n * step) == 0)
        numbers = blocks * splits * options["BLOCK_E"] * block_rows
        route_kernel[(blocks, tiles, splits)](
            rows.rows, or_other(rows.squares, found.weights), weight,
            *(or_other(one, weight) for one in others),
            torch.empty(numbers, dtype=torch.float32, device=weight.device), self._counters, found.experts,
            found.weights, count, rows.rows.stride(0), rows.epsilon, routing.least_sum, routing.clamped_sum,
            routing.scaling, TILES=tiles, SPLITS=splits, BLOCK_M=block_rows, BLOCK_N=_ROUTER_OUTPUTS,
            BLOCK_K=step, AHEAD=4 if inner % 512 == 0 else 0, num_warps=4, num_stages=4, **options,
        )  # fmt: skip

    def mix(
        self,
        rows: ScaledRows,
        chosen: Chosen,
        weights: ExpertWeights,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        multiplier: float = 1.0,
    ) -> tuple[Tensor, ScaledRows | None]:
        check_mix(rows, chosen, weights)
        check_contiguous(
            squares=rows.squares, experts=chosen.experts, weights=chosen.weights, residual=residual,
            norm=None if norm is None else norm.weight, norm_bias=None if norm is None else norm.bias,
        )  # fmt: skip
        if rows.rows.stride(1) != 1:
            raise ValueError("expected rows whose last dimension is contiguous")
        vectors = self._vectors
        if vectors is None and self._tilings is None and not self._invariant:
            vectors = choose_expert_vectors(len(rows.rows), *weights.down.shape[1:], itemsize=weights.down.itemsize)
        if vectors is not None and (norm is None or norm.halves):
            return mix_vectors(rows, chosen, weights, residual, norm, multiplier, vectors, self._dependent)
        parts = self._outputs_of_pairs(rows, chosen, weights)
        return self._combine(parts, chosen, rows.rows.dtype, residual, norm, multiplier)

    def _outputs_of_pairs(self, rows: ScaledRows, chosen: Chosen, weights: ExpertWeights) -> Tensor:
        """[R * k, H] fp32: what each expert of each row makes of it."""
        count, top_k = chosen.experts.shape
        experts, hidden, inner = weights.down.shape
        pairs, device = count * top_k, weights.down.device
        tilings = self._tilings or choose_expert_tilings(
            count, top_k, experts, hidden, inner, invariant=self._invariant
        )
        few = pairs <= MAX_PAIRS
        order, sizes = chosen.experts, chosen.experts
        if not few:
            order = torch.empty(experts, count, dtype=torch.int32, device=device)
            sizes = torch.empty(experts, dtype=torch.int32, device=device)
            # Pairs that an expert's program looks through at a time.
            order_kernel[(experts,)](
                chosen.experts, order, sizes, pairs, count, BLOCK=1024, num_warps=4, **self._dependent
            )
        # One row has no expert twice.
        listed = 0 if not few else 1 if count == 1 and not self._invariant else triton.next_power_of_2(pairs)
        options = {"PAIRS": listed, **self._dependent}
        programs = pairs if few else experts
        tiles = triton.cdiv(inner, tilings.gated.block_outputs // (2 if weights.gated else 1))
        gated = rows.rows.new_empty(pairs, inner)
        expert_gated_kernel[(tiles, programs)](
            rows.rows, or_other(rows.squares, gated), chosen.experts, order, sizes, weights.gate_up,
            or_other(weights.gate_up_bias, gated), weights.down, or_other(weights.activation.parameters, gated), gated,
            pairs, count, rows.rows.stride(0), rows.epsilon, TOP_K=top_k, OUTPUTS=inner, INNER=hidden,
            PIECE=self._piece(weights.down, pairs, tiles), **gate_options(weights), **parts_of_rows(rows), **options,
            **_sizes(tilings.gated),
        )  # fmt: skip
        parts = torch.empty(pairs, hidden, dtype=torch.float32, device=device)
        expert_down_kernel[(triton.cdiv(hidden, tilings.down.block_outputs), programs)](
            gated, chosen.experts, order, sizes, weights.down, or_other(weights.down_bias, gated), parts, pairs, count,
            HAS_BIAS=weights.down_bias is not None, OUTPUTS=hidden, INNER=inner, **options, **_sizes(tilings.down),
        )  # fmt: skip
        return parts

    def _combine(
        self,
        parts: Tensor,
        chosen: Chosen,
        dtype: torch.dtype,
        residual: Tensor | None,
        norm: Norm | None,
        multiplier: float,
    ) -> tuple[Tensor, ScaledRows | None]:
        (count, top_k), width = chosen.experts.shape, parts.shape[1]
        output = parts.new_empty(count, width, dtype=dtype)
        # Whole, as products of many rows read it: a program has a whole row at hand.
        scaled = None if norm is None else ScaledRows(torch.empty_like(output), None, norm.epsilon)
        weight, shift = (output, output) if norm is None else (norm.weight, or_other(norm.bias, output))
        combine_kernel[(count,)](
            parts, chosen.weights, or_other(residual, output), weight, shift, output,
            output if scaled is None else scaled.rows, 0.0 if norm is None else norm.epsilon, TOP_K=top_k,
            MULTIPLIER=multiplier, ADDS=residual is not None, NORMS=norm is not None,
            CENTERED=norm is not None and norm.centered, HAS_NORM_BIAS=norm is not None and norm.bias is not None,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
            **self._dependent,
        )  # fmt: skip
        return output, scaled

    def _piece(self, weight: Tensor, pairs: int, tiles: int) -> int:
        """Bytes of an expert's next weight that a thread prefetches while the memory would idle; 0 for none."""
        own = weight[0].nbytes
        if not self._dependent["DEPENDENT"] or pairs * own > _PREFETCH_LIMIT:
            return 0
        # Whole cache lines. What is left at the end is not prefetched.
        return own // (tiles * _PREFETCH_THREADS) // 128 * 128


def _sizes(tiling: ExpertTiling) -> dict[str, int]:
    return {
        "BLOCK_M": tiling.block_rows,
        "BLOCK_N": tiling.block_outputs,
        "BLOCK_K": tiling.block_inner,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def _has_even_groups(experts: int, routing: Routing) -> bool:
    """Whether the kernel can choose among groups: their number and size are powers of two."""
    sizes = routing.groups, experts // routing.groups
    if routing.groups == 1:
        return True
    return experts >= _ROUTER_OUTPUTS and all(size == triton.next_power_of_2(size) for size in sizes)
