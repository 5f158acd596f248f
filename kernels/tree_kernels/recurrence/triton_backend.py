"""Recurrent layers over trees in Triton: one launch plans the pass, and two compute a layer, or three where a sequence
may have more than 16 rows. Nothing is read back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch
from tree_kernels.recurrence.gating import SpaceOutput
from tree_kernels.recurrence.states import LayerStates, RecurrentStates
from tree_kernels.recurrence.triton_gating import (
    delta_gates_kernel,
    gated_heads_kernel,
    space_gates_kernel,
    space_output_kernel,
)
from tree_kernels.recurrence.triton_kernels import convolve_kernel, keep_kernel, plan_kernel
from tree_kernels.recurrence.triton_keyed import mix_keyed_kernel, prepare_keyed_kernel
from tree_kernels.recurrence.triton_mixing import CHUNK, mix_kernel, prepare_kernel
from tree_kernels.recurrence.triton_selective import SCANNED, keep_gates_kernel, scan_kernel, scan_later_kernel
from tree_kernels.recurrence.types import (
    MOST_NODES,
    Convolved,
    HeadsLayout,
    RecurrencePlan,
    ShortConvolution,
    StateRule,
    StateShape,
)

# Tiles are chosen, not measured.
_ROWS, _CHANNELS, _KEPT_CHANNELS, _FEW_ROWS, _COLUMNS = 16, 128, 256, 16, 32
_GATED_HEADS = 4
_SCANNED_CHANNELS, _KEPT_GATES = 32, 1024


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
    sources: Tensor  # [B] int32, slots of states before the pass
    targets: Tensor  # [B] int32, and behind it
    words: Tensor  # [R] int64, ancestors of each node and itself
    depths: Tensor  # [R] int32
    most_rows: int  # of one sequence


@dataclass
class TritonConvolved(Convolved):
    """With pending keys' outputs."""

    inputs: Tensor
    folded: Tensor  # [B, window, C]
    folded_gates: Tensor  # [B, window, G]


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """What `prepare_kernel` makes; `reading` is not used where the rule is a sum."""

    queries: Tensor
    keys: Tensor
    reading: Tensor
    values: Tensor
    scores: Tensor
    reached: Tensor


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
        pending, sources, targets, depths, node_slots = (
            torch.empty(size, dtype=torch.int32, device=self._device) for size in (count, count, count, rows, rows)
        )
        words = torch.empty(rows, dtype=torch.int64, device=self._device)
        plan_kernel[(count,)](
            tensors.query_starts, tensors.prefix_lengths, tensors.slots, tensors.causal, tensors.parents,
            states.lengths, states.seconds, pending, sources, targets, words, depths, node_slots, PAGE=states.page_size,
            WINDOW=states.window, BLOCK=MOST_NODES, num_warps=2,
        )  # fmt: skip
        return TritonRecurrencePlan(batch, node_slots, tensors, pending, sources, targets, words, depths, rows)

    def convolve(
        self, at: LayerStates, inputs: Tensor, gates: Tensor, convolution: ShortConvolution
    ) -> TritonConvolved:
        plan, states, layer = at
        assert isinstance(plan, TritonRecurrencePlan)
        shape, tensors, count = states.shape, plan.tensors, plan.batch.sequences
        if inputs.stride(-1) != 1:
            inputs = inputs.contiguous()
        output = inputs.new_empty(len(inputs), shape.channels)
        folded = inputs.new_empty(count, states.window, shape.channels)
        folded_gates = gates.new_empty(count, states.window, shape.early_gates)
        bias = convolution.weight if convolution.bias is None else convolution.bias
        grid = count, triton.cdiv(shape.channels, _CHANNELS), triton.cdiv(plan.most_rows + states.window, _ROWS)
        convolve_kernel[grid](
            inputs, states.inputs[layer], states.gates[layer], states.windows[layer], convolution.weight, bias, output,
            folded, folded_gates, tensors.query_starts, tensors.prefix_lengths, plan.sources, tensors.causal,
            tensors.parents, plan.pending, inputs.stride(0), WINDOW=states.window, CHANNELS=shape.channels,
            TAPS=shape.taps, GATES=shape.early_gates, SILU=convolution.silu, BIAS=convolution.bias is not None,
            BLOCK_R=_ROWS, BLOCK_C=_CHANNELS, BLOCK_G=triton.next_power_of_2(max(1, shape.early_gates)), num_warps=4,
        )  # fmt: skip
        if not shape.early_gates:
            # Behind what reads the pending keys.
            keep_kernel[(count, triton.cdiv(shape.channels, _KEPT_CHANNELS))](
                inputs, states.inputs[layer], states.windows[layer], tensors.query_starts, tensors.prefix_lengths,
                plan.sources, plan.targets, plan.pending, inputs.stride(0), WINDOW=states.window,
                CHANNELS=shape.channels, TAPS=shape.taps, BLOCK_R=_ROWS, BLOCK_C=_KEPT_CHANNELS,
                BLOCK_T=triton.next_power_of_2(max(1, shape.taps - 1)), num_warps=4,
            )  # fmt: skip
        return TritonConvolved(output, inputs, folded, folded_gates)

    def mix(self, at: LayerStates, convolved: Convolved, gates: Tensor, layout: HeadsLayout) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TritonRecurrencePlan) and isinstance(convolved, TritonConvolved)
        shape, tensors, rows, gates = states.shape, plan.tensors, convolved.rows, gates.contiguous()
        output, inputs = rows.new_empty(len(rows), shape.heads, shape.value_width), convolved.inputs
        few = min(_FEW_ROWS, states.window)
        most = 1 if plan.most_rows == 1 else _FEW_ROWS if plan.most_rows <= few else CHUNK.value
        constants = self._constants(shape, layout, states.window)
        prepared = self._prepared(plan, shape, rows, gates, constants, many=most > _FEW_ROWS)
        parts = triton.cdiv(shape.value_width, _COLUMNS)
        kept = triton.cdiv(shape.channels, shape.heads * parts)
        # Chunks in flight: those of 16-bit numbers fit the shared memory twice.
        mix_kernel[(plan.batch.sequences, shape.heads, parts)](
            inputs, states.inputs[layer], states.windows[layer], rows, convolved.folded, convolved.folded_gates, gates,
            states.gates[layer], states.states[layer], output, prepared.queries, prepared.keys, prepared.reading,
            prepared.values, prepared.scores, prepared.reached, tensors.query_starts, tensors.prefix_lengths,
            plan.sources, plan.targets, plan.pending, plan.words, plan.depths, inputs.stride(0), MOST=most,
            TAPS=shape.taps, BLOCK_V=_COLUMNS, STAGES=2 if rows.element_size() == 2 else 1, KEPT=kept, BLOCK_R=_ROWS,
            BLOCK_C=triton.next_power_of_2(kept), BLOCK_T=triton.next_power_of_2(max(1, shape.taps - 1)),
            BLOCK_G=triton.next_power_of_2(shape.gates), num_warps=4, **constants,
        )  # fmt: skip
        return output

    def scan(self, at: LayerStates, convolved: Convolved, gates: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TritonRecurrencePlan) and isinstance(convolved, TritonConvolved)
        shape, tensors, rows, ring = states.shape, plan.tensors, convolved.rows, states.gates[layer]
        output, count = torch.empty_like(rows, dtype=torch.float32), plan.batch.sequences
        chunks = triton.cdiv(plan.most_rows, SCANNED.value) if plan.most_rows > states.window else 1
        places = triton.cdiv(len(rows), SCANNED.value) + count if chunks > 1 else 0
        ends, steps = (decay.new_empty(places, shape.channels, width) for width in (shape.key_width, 1))
        sizes: dict[str, Any] = {
            "WINDOW": states.window, "CHANNELS": shape.channels, "WIDTH": shape.key_width,
            "GROUPS": shape.key_groups, "BLOCK_C": _SCANNED_CHANNELS,
            "BLOCK_N": max(2, triton.next_power_of_2(shape.key_width)), "num_warps": 2,
        }  # fmt: skip
        parts = triton.cdiv(shape.channels, _SCANNED_CHANNELS)
        scan_kernel[(count, parts, chunks)](
            rows, gates, queries, decay, convolved.folded, ring, states.states[layer], output, ends, steps,
            tensors.query_starts, tensors.prefix_lengths, plan.sources, plan.targets, tensors.causal, plan.pending,
            plan.words, **sizes,
        )  # fmt: skip
        if chunks > 1:
            scan_later_kernel[(count, parts, chunks - 1)](
                rows, gates, queries, decay, states.states[layer], output, ends, steps, tensors.query_starts,
                plan.targets, **sizes,
            )  # fmt: skip
        self._keep_gates(plan, states, layer, gates)
        return output

    def mix_keyed(self, at: LayerStates, convolved: Convolved, gates: Tensor, layout: HeadsLayout) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TritonRecurrencePlan) and isinstance(convolved, TritonConvolved)
        shape, tensors, rows = states.shape, plan.tensors, convolved.rows
        output = rows.new_empty(len(rows), shape.heads, shape.value_width)
        prompts = plan.most_rows > states.window
        constants = self._keyed_constants(shape, layout, states.window)
        prepared = self._prepared(plan, shape, rows, gates, constants, many=prompts, keyed=True)
        mix_keyed_kernel[(plan.batch.sequences, shape.heads, triton.cdiv(shape.value_width, _COLUMNS))](
            rows, gates, convolved.folded, states.gates[layer], states.states[layer], output, prepared.queries,
            prepared.keys, prepared.reading, prepared.values, prepared.scores, prepared.reached, tensors.query_starts,
            tensors.prefix_lengths, plan.sources, plan.targets, tensors.causal, plan.pending, plan.words,
            PROMPTS=prompts, BLOCK_V=_COLUMNS, STAGES=2 if rows.element_size() == 2 else 1, num_warps=4, **constants,
        )  # fmt: skip
        self._keep_gates(plan, states, layer, gates)
        return output

    def _keep_gates(self, plan: TritonRecurrencePlan, states: RecurrentStates, layer: int, gates: Tensor) -> None:
        tensors, size = plan.tensors, states.shape.gates
        keep_gates_kernel[(plan.batch.sequences, triton.cdiv(size, _KEPT_GATES))](
            gates, states.gates[layer], tensors.query_starts, tensors.prefix_lengths, plan.targets,
            WINDOW=states.window, GATES=size, BLOCK=_KEPT_GATES, num_warps=4,
        )  # fmt: skip

    def delta_gates(self, product: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        rows, heads = len(product), len(decay)
        gates = torch.empty(rows, 2 * heads, dtype=torch.float32, device=product.device)
        if rows:
            block = triton.next_power_of_2(heads)
            delta_gates_kernel[(rows,)](
                product, decay, bias, gates, product.stride(0), HEADS=heads, BLOCK=block, num_warps=1
            )
        return gates

    def gated_heads(self, mixed: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows, heads, width = mixed.shape
        output = mixed.new_empty(rows, heads * width)
        if rows:
            gated_heads_kernel[(rows, triton.cdiv(heads, _GATED_HEADS))](
                mixed, gate, weight, output, gate.stride(0), epsilon, HEADS=heads, WIDTH=width,
                BLOCK_HEADS=_GATED_HEADS, BLOCK=triton.next_power_of_2(width), num_warps=2,
            )  # fmt: skip
        return output

    def space_gates(self, product: Tensor, decay: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
        rows, heads = product.shape
        gates = torch.empty(rows, 2 * heads, dtype=torch.float32, device=product.device)
        if rows:
            space_gates_kernel[(rows,)](
                product, decay, bias, gates, product.stride(0), LEAST=limits[0], MOST=limits[1], HEADS=heads,
                BLOCK=triton.next_power_of_2(heads), num_warps=1,
            )  # fmt: skip
        return gates

    def space_output(self, mixed: Tensor, values: Tensor, gate: Tensor, of: SpaceOutput) -> Tensor:
        rows, heads, width = mixed.shape
        output = mixed.new_empty(rows, heads * width)
        # Without a norm any part of a row is a program's; a power of two of heads divides it.
        groups = of.groups if of.norm is not None else math.gcd(heads, 8)
        group = heads * width // groups
        if rows:
            # Columns above which a program of four warps would hold too many numbers a thread.
            space_output_kernel[(rows, groups)](
                mixed, values, of.skip, gate, mixed if of.norm is None else of.norm, output, values.stride(0),
                gate.stride(0), of.epsilon, HEAD=width, GROUP=group, GROUPS=groups, NORMS=of.norm is not None,
                BLOCK=triton.next_power_of_2(group), num_warps=4 if group <= 2048 else 8,
            )  # fmt: skip
        return output

    def _prepared(
        self, plan: TritonRecurrencePlan, shape: StateShape, rows: Tensor, gates: Tensor, constants: dict[str, Any], *,
        many: bool, keyed: bool = False,
    ) -> PreparedRows:  # fmt: skip
        """What is solved ahead of sequences of many rows; without such, tensors that are not read."""
        if not many:
            return PreparedRows(rows, rows, rows, rows, rows, gates)
        count, heads, sequences, width = len(rows), shape.heads, plan.batch.sequences, constants["BLOCK_K"]
        queries, keys, reading = (rows.new_empty(count, heads, width) for _ in range(3))
        values, scores = (rows.new_empty(count, heads, width) for width in (shape.value_width, CHUNK.value))
        # By row, or of keyed states by chunk.
        sizes = (triton.cdiv(count, CHUNK.value) + sequences, heads, width) if keyed else (count, heads)
        prepared = PreparedRows(queries, keys, reading, values, scores, gates.new_empty(sizes))
        kernel, words = (prepare_keyed_kernel, ()) if keyed else (prepare_kernel, (plan.words,))
        kernel[(sequences, heads, triton.cdiv(plan.most_rows, CHUNK.value))](
            rows, gates, queries, keys, reading, values, scores, prepared.reached, plan.tensors.query_starts, *words,
            BLOCK_V=max(16, triton.next_power_of_2(shape.value_width)), num_warps=8, **constants,
        )  # fmt: skip
        return prepared

    def _keyed_constants(self, shape: StateShape, layout: HeadsLayout, window: int) -> dict[str, Any]:
        """What both kernels of keyed states are compiled for."""
        own = self._constants(shape, layout, window)
        return {name: value for name, value in own.items() if name not in ("GROUP", "DELTA", "FEW")}

    def _constants(self, shape: StateShape, layout: HeadsLayout, window: int) -> dict[str, Any]:
        """What both kernels are compiled for."""
        return {
            "WINDOW": window, "CHANNELS": shape.channels, "HEADS": shape.heads,
            "GROUP": shape.heads // layout.key_heads, "DK": shape.key_width, "DV": shape.value_width,
            "QUERY_AT": layout.query_at, "KEY_AT": layout.key_at, "VALUE_AT": layout.value_at, "NORMED": layout.normed,
            "SCALING": layout.scaling, "DELTA": layout.rule is StateRule.DELTA, "FEW": _FEW_ROWS,
            "BLOCK_K": max(16, triton.next_power_of_2(shape.key_width)), "PRECISION": self._precision,
        }  # fmt: skip
