"""Recurrent layers over trees in Triton: one launch plans the pass, three compute a layer; nothing is read back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch
from tree_kernels.recurrence.states import RecurrentStates
from tree_kernels.recurrence.triton_kernels import convolve_kernel, keep_kernel, mix_kernel, plan_kernel
from tree_kernels.recurrence.types import (
    MOST_NODES,
    Convolved,
    HeadsLayout,
    RecurrencePlan,
    ShortConvolution,
    StateRule,
)

# Tiles are chosen, not measured.
_ROWS, _CHANNELS, _KEPT_CHANNELS, _FEW_ROWS, _COLUMNS = 16, 128, 256, 16, 32


@dataclass(frozen=True, slots=True)
class PassTensors:
    """What the host or the device lays out of a pass, int32 in device memory: see `AttentionBatch`."""

    query_starts: Tensor  # [B + 1]
    prefix_lengths: Tensor  # [B]
    causal: Tensor  # [B], 1 where a sequence's rows are a chain
    parents: Tensor  # [R]
    slots: Tensor  # [B], of states


@dataclass
class TritonRecurrencePlan(RecurrencePlan):
    """Device tensors of one pass, at fixed addresses where those of `tensors` are."""

    tensors: PassTensors
    pending: Tensor  # [B] int32, keys that are not in the state yet
    words: Tensor  # [R] int64, ancestors of each node and itself
    depths: Tensor  # [R] int32
    most_rows: int  # of one sequence


@dataclass
class TritonConvolved(Convolved):
    """With pending keys' outputs."""

    inputs: Tensor
    folded: Tensor  # [B, window, C]


class TritonRecurrence:
    """See `tree_kernels.recurrence.TreeRecurrence`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._precision = "tf32x3" if device.type == "cuda" else "ieee"

    def plan(self, batch: AttentionBatch, slots: Sequence[int], states: RecurrentStates) -> TritonRecurrencePlan:
        for rows, tree in zip(batch.row_counts, batch.parents, strict=True):
            if tree is not None and rows > states.window:
                raise ValueError(f"expected trees of at most {states.window} rows, got {rows}")
        packed = array("i", batch.query_starts)
        packed.extend(batch.prefix_lengths)
        packed.extend(parents is None for parents in batch.parents)
        for tree, (start, end) in zip(batch.parents, pairwise(batch.query_starts), strict=True):
            packed.extend(tree or (0,) * (end - start))
        packed.extend(slots)
        count, rows = batch.sequences, batch.rows
        integers = torch.frombuffer(packed, dtype=torch.int32).to(self._device, non_blocking=True)
        sizes = [count + 1, count, count, rows, count]
        return self.plan_on_device(batch, PassTensors(*torch.split(integers, sizes)), states)

    def plan_on_device(
        self, batch: AttentionBatch, tensors: PassTensors, states: RecurrentStates
    ) -> TritonRecurrencePlan:
        """The plan of a pass that the device has, of as many sequences and at most the rows of `batch`. May be
        captured: nothing of the batch is read but its sizes."""
        if states.window > MOST_NODES:
            raise ValueError(f"expected trees of at most {MOST_NODES} rows, got {states.window}")
        count, rows = batch.sequences, len(tensors.parents)
        pending, depths, node_slots = (
            torch.empty(size, dtype=torch.int32, device=self._device) for size in (count, rows, rows)
        )
        words = torch.empty(rows, dtype=torch.int64, device=self._device)
        plan_kernel[(count,)](
            tensors.query_starts, tensors.prefix_lengths, tensors.slots, tensors.causal, tensors.parents,
            states.lengths, pending, words, depths, node_slots, WINDOW=states.window, BLOCK=MOST_NODES, num_warps=2,
        )  # fmt: skip
        return TritonRecurrencePlan(batch, node_slots, tensors, pending, words, depths, rows)

    def convolve(
        self,
        plan: RecurrencePlan,
        states: RecurrentStates,
        layer: int,
        inputs: Tensor,
        gates: Tensor,
        convolution: ShortConvolution,
    ) -> TritonConvolved:
        assert isinstance(plan, TritonRecurrencePlan)
        shape, tensors, count = states.shape, plan.tensors, plan.batch.sequences
        if inputs.stride(-1) != 1:
            inputs = inputs.contiguous()
        output = inputs.new_empty(len(inputs), shape.channels)
        folded = inputs.new_empty(count, states.window, shape.channels)
        ring, windows = states.inputs[layer], states.windows[layer]
        sizes = {"WINDOW": states.window, "CHANNELS": shape.channels, "TAPS": shape.taps}
        bias = convolution.weight if convolution.bias is None else convolution.bias
        grid = count, triton.cdiv(shape.channels, _CHANNELS), triton.cdiv(plan.most_rows + states.window, _ROWS)
        convolve_kernel[grid](
            inputs, ring, windows, convolution.weight, bias, output, folded, tensors.query_starts,
            tensors.prefix_lengths, tensors.slots, tensors.causal, tensors.parents, plan.pending, inputs.stride(0),
            SILU=convolution.silu, BIAS=convolution.bias is not None, BLOCK_R=_ROWS, BLOCK_C=_CHANNELS, num_warps=4,
            **sizes,
        )  # fmt: skip
        convolved = TritonConvolved(output, inputs, folded)
        if not shape.heads:
            self._keep(plan, states, layer, inputs, gates)
        return convolved

    def mix(
        self,
        plan: RecurrencePlan,
        states: RecurrentStates,
        layer: int,
        convolved: Convolved,
        gates: Tensor,
        layout: HeadsLayout,
    ) -> Tensor:
        assert isinstance(plan, TritonRecurrencePlan) and isinstance(convolved, TritonConvolved)
        shape, tensors, rows, gates = states.shape, plan.tensors, convolved.rows, gates.contiguous()
        output = rows.new_empty(len(rows), shape.heads, shape.value_width)
        block_k, block_v = max(16, triton.next_power_of_2(shape.key_width)), _COLUMNS
        mix_kernel[(plan.batch.sequences, shape.heads, triton.cdiv(shape.value_width, block_v))](
            rows, convolved.folded, gates, states.gates[layer], states.states[layer], output, tensors.query_starts,
            tensors.prefix_lengths, tensors.slots, plan.pending, plan.words, plan.depths, WINDOW=states.window,
            CHANNELS=shape.channels, HEADS=shape.heads, GROUP=shape.heads // layout.key_heads, DK=shape.key_width,
            DV=shape.value_width, QUERY_AT=layout.query_at, KEY_AT=layout.key_at, VALUE_AT=layout.value_at,
            NORMED=layout.normed, SCALING=layout.scaling, DELTA=layout.rule is StateRule.DELTA, BLOCK_K=block_k,
            BLOCK_V=block_v, FEW=_FEW_ROWS, MOST=MOST_NODES, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip
        self._keep(plan, states, layer, convolved.inputs, gates)
        return output

    def _keep(
        self, plan: TritonRecurrencePlan, states: RecurrentStates, layer: int, inputs: Tensor, gates: Tensor
    ) -> None:
        """Behind everything that reads the pending keys."""
        shape, tensors = states.shape, plan.tensors
        keep_kernel[(plan.batch.sequences, triton.cdiv(shape.channels, _KEPT_CHANNELS))](
            inputs, gates, states.inputs[layer], states.gates[layer], states.windows[layer], tensors.query_starts,
            tensors.prefix_lengths, tensors.slots, plan.pending, inputs.stride(0), WINDOW=states.window,
            CHANNELS=shape.channels, TAPS=shape.taps, GATES=shape.gates, BLOCK_R=_ROWS, BLOCK_C=_KEPT_CHANNELS,
            BLOCK_T=triton.next_power_of_2(shape.taps - 1), BLOCK_G=triton.next_power_of_2(max(1, shape.gates)),
            num_warps=4,
        )  # fmt: skip
