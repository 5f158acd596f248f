"""Recurrent layers over trees in Triton: one launch plans the pass, and two compute a layer, one more where a sequence
may have several rows, and two more where one may have more than 16. Nothing is read back."""

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
from tree_kernels.dependent_launch import dependent_launch
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
from tree_kernels.recurrence.triton_mixing import (
    CHUNK,
    mix_few_kernel,
    mix_many_kernel,
    mix_single_kernel,
    prepare_kernel,
)
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
_ROWS, _KEPT_CHANNELS, _FEW_ROWS, _COLUMNS = 16, 256, 16, 32
# Of sequences with fewer rows than a tile: most of them have one, and one pending key.
_ROWS_OF_FEW = 4
# Tokens, channels and warps of a program of the convolution, where prompts are among the sequences, chosen; and of
# trees alone, whose first tokens are all that most sequences have: the fastest of fourteen on an H200,
# benchmarks/results/2026-12-01-h200-experts-and-states.md.
_PROMPTS_CONVOLVED, _TREES_CONVOLVED = (_ROWS, 128, 8), (2, 256, 2)
# Programs of the convolution that fill an H200, a few for each of its processors: a token's block that is not there is
# a program that ends at once, and of 64 sequences with a window of 64 those were seven of eight.
_CONVOLVED_PROGRAMS = 1024
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


@dataclass(frozen=True, slots=True)
class StateTiles:
    """Columns of values and warps of a program, and how many such programs a processor has where they take items in
    turn: as many as run beside one another, by what they need of registers and shared memory (`ptxas`, sm_90a). Those
    of one row are the fastest within steps of Qwen3.5-9B, of 1 to 64 sequences together, in
    `benchmarks/results/2026-12-01-h200-weight-rings.md`; alone narrow ones are faster. Those of few rows are the
    fastest alone in `2026-12-01-h200-experts-and-states.md`; the others are chosen."""

    # Of one row, a warp with 8 KB of states: what it waits for does not hold up other warps.
    single: tuple[int, int] = (64, 4)
    # Of few rows, where wide tiles are fewer than processors, and where they are as many.
    few: tuple[int, int, int] = (32, 4, 2)
    few_wide: tuple[int, int, int] = (64, 4, 2)
    many: tuple[int, int, int] = (32, 4, 1)
    prepared: tuple[int, int] = (8, 1)  # warps and programs, of all columns


@dataclass(frozen=True, slots=True)
class SequenceKinds:
    """At most so many sequences of a pass have one row, few, and many; the most rows of one; and whether one is known
    to have more than a tree may."""

    single: int
    few: int
    many: int
    most_rows: int
    prompts: bool

    @classmethod
    def counted(cls, counts: Sequence[int], window: int) -> SequenceKinds:
        """Of the rows of each sequence."""
        least = max(1, min(_FEW_ROWS, window))
        single, many = sum(count == 1 for count in counts), sum(count > least for count in counts)
        most_rows = max(counts, default=0)
        return cls(single, sum(count > 1 for count in counts) - many, many, most_rows, most_rows > window)

    @classmethod
    def bounded(cls, sequences: int, rows: int, window: int) -> SequenceKinds:
        """Of any sequences with so many rows."""
        many = rows // (1 + max(1, min(_FEW_ROWS, window)))
        # Where the window has one row, several are many.
        few = rows // 2 if window > 1 else 0
        return cls(sequences, min(sequences, few), min(sequences, many), rows, rows > sequences * window)


@dataclass
class TritonRecurrencePlan(RecurrencePlan):
    """Device tensors of one pass, at fixed addresses where those of `tensors` are."""

    tensors: PassTensors
    pending: Tensor  # [B] int32, keys that are not in the state yet
    sources: Tensor  # [B] int32, slots of states before the pass
    targets: Tensor  # [B] int32, and behind it
    words: Tensor  # [R] int64, ancestors of each node and itself
    depths: Tensor  # [R] int32
    listed: Tensor  # [2 + 2 * B] int32, see `plan_kernel`
    kinds: SequenceKinds


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
        self._device, self.tiles = device, StateTiles()
        self._dependent = dependent_launch(device)
        on_gpu = device.type == "cuda"
        self._precision = "tf32x3" if on_gpu else "ieee"
        # Interpreted, few: each takes several items.
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2

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
        kinds = SequenceKinds.counted(batch.row_counts, states.window)
        return self.plan_on_device(batch, PassTensors(*torch.split(integers, sizes)), states, kinds)

    def plan_on_device(
        self, batch: AttentionBatch, tensors: PassTensors, states: RecurrentStates, kinds: SequenceKinds | None = None
    ) -> TritonRecurrencePlan:
        """The plan of a pass that the device has, of as many sequences and at most the rows of `batch`. May be
        captured: nothing of the batch is read but its sizes. Without `kinds` any sequence may have any rows."""
        if states.window > MOST_NODES:
            raise ValueError(f"expected trees of at most {MOST_NODES} rows, got {states.window}")
        count, rows = batch.sequences, len(tensors.parents)
        sizes = count, count, count, rows, rows, 2 + 2 * count
        pending, sources, targets, depths, node_slots, listed = (
            torch.empty(size, dtype=torch.int32, device=self._device) for size in sizes
        )
        words = torch.empty(rows, dtype=torch.int64, device=self._device)
        plan_kernel[(count,)](
            tensors.query_starts, tensors.prefix_lengths, tensors.slots, tensors.causal, tensors.parents,
            states.lengths, states.seconds, pending, sources, targets, words, depths, node_slots, listed,
            PAGE=states.page_size, WINDOW=states.window, FEW=min(_FEW_ROWS, states.window), BLOCK=MOST_NODES,
            BLOCK_B=triton.next_power_of_2(count), num_warps=2,
        )  # fmt: skip
        kinds = kinds or SequenceKinds.bounded(count, rows, states.window)
        return TritonRecurrencePlan(batch, node_slots, tensors, pending, sources, targets, words, depths, listed, kinds)

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
        block, columns, warps = _PROMPTS_CONVOLVED if plan.kinds.prompts else _TREES_CONVOLVED
        parts, blocks = triton.cdiv(shape.channels, columns), triton.cdiv(plan.kinds.most_rows + states.window, block)
        if not plan.kinds.prompts or len(inputs) < _ROWS * count:
            # Most of them are not there.
            blocks = max(1, min(blocks, _CONVOLVED_PROGRAMS // (parts * count)))
        convolve_kernel[(parts, count, blocks)](
            inputs, states.inputs[layer], states.gates[layer], states.windows[layer], convolution.weight, bias, output,
            folded, folded_gates, tensors.query_starts, tensors.prefix_lengths, plan.sources, tensors.causal,
            tensors.parents, plan.pending, inputs.stride(0), WINDOW=states.window, CHANNELS=shape.channels,
            TAPS=shape.taps, GATES=shape.early_gates, SILU=convolution.silu, BIAS=convolution.bias is not None,
            BLOCK_R=block, BLOCK_C=columns, BLOCK_G=triton.next_power_of_2(max(1, shape.early_gates)),
            num_warps=warps, **self._dependent,
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
        shape, rows, gates, kinds = states.shape, convolved.rows, gates.contiguous(), plan.kinds
        output, inputs = rows.new_empty(len(rows), shape.heads, shape.value_width), convolved.inputs
        tokens, state = (rows, convolved.folded, convolved.folded_gates, gates), states.states[layer]
        of_plan = plan.tensors.query_starts, plan.tensors.prefix_lengths, plan.sources, plan.targets, plan.pending
        constants = self._constants(shape, layout, states.window)
        columns, warps = self.tiles.single
        of_tile = {"BLOCK_V": columns, "PARTS": triton.cdiv(shape.value_width, columns), "num_warps": warps}
        programs = shape.heads * triton.cdiv(shape.value_width, columns) if kinds.single else 0
        keeping = triton.cdiv(shape.channels, _KEPT_CHANNELS)
        mix_single_kernel[(programs + keeping, plan.batch.sequences)](
            inputs, states.inputs[layer], states.windows[layer], *tokens, states.gates[layer], state, output, *of_plan,
            inputs.stride(0), STATES=programs, TAPS=shape.taps, BLOCK_R=_ROWS_OF_FEW, BLOCK_C=_KEPT_CHANNELS,
            BLOCK_T=triton.next_power_of_2(max(1, shape.taps - 1)), BLOCK_G=triton.next_power_of_2(shape.gates),
            **of_tile, **_of(mix_single_kernel, constants), **self._dependent,
        )  # fmt: skip
        if kinds.few:
            wide = kinds.few * shape.heads * triton.cdiv(shape.value_width, self.tiles.few_wide[0])
            tile = self.tiles.few_wide if wide >= self._processors else self.tiles.few
            programs, of_tile = self._in_turn(kinds.few, shape, tile)
            mix_few_kernel[(programs,)](
                *tokens, state, output, *of_plan, plan.words, plan.depths, plan.listed, FEW=_FEW_ROWS, **of_tile,
                **_of(mix_few_kernel, constants), **self._dependent,
            )  # fmt: skip
        if kinds.many:
            prepared = self._prepared(plan, shape, rows, gates, constants)
            programs, of_tile = self._in_turn(kinds.many, shape, self.tiles.many)
            # Chunks in flight: those of 16-bit numbers fit the shared memory twice.
            mix_many_kernel[(programs,)](
                convolved.folded, convolved.folded_gates, state, output, prepared.queries, prepared.keys,
                prepared.reading, prepared.values, prepared.scores, prepared.reached, *of_plan, plan.listed,
                plan.batch.sequences, STAGES=2 if rows.element_size() == 2 else 1, **of_tile,
                **_of(mix_many_kernel, constants), **self._dependent,
            )  # fmt: skip
        return output

    def _in_turn(self, sequences: int, shape: StateShape, tile: tuple[int, int, int]) -> tuple[int, dict[str, int]]:
        """Programs for the states of so many sequences, which take parts of them in turn, and how they are tiled."""
        columns, warps, resident = tile
        parts = triton.cdiv(shape.value_width, columns)
        programs = min(sequences * shape.heads * parts, resident * self._processors)
        return programs, {"BLOCK_V": columns, "PARTS": parts, "num_warps": warps}

    def scan(self, at: LayerStates, convolved: Convolved, gates: Tensor, queries: Tensor, decay: Tensor) -> Tensor:
        plan, states, layer = at
        assert isinstance(plan, TritonRecurrencePlan) and isinstance(convolved, TritonConvolved)
        shape, tensors, rows, ring = states.shape, plan.tensors, convolved.rows, states.gates[layer]
        output, count = torch.empty_like(rows, dtype=torch.float32), plan.batch.sequences
        chunks = triton.cdiv(plan.kinds.most_rows, SCANNED.value) if plan.kinds.most_rows > states.window else 1
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
        prompts = plan.kinds.most_rows > states.window
        constants = self._constants(shape, layout, states.window)
        # Without prompts, tensors that are not read.
        prepared = PreparedRows(rows, rows, rows, rows, rows, gates)
        if prompts:
            prepared = self._prepared(plan, shape, rows, gates, constants, keyed=True)
        mix_keyed_kernel[(plan.batch.sequences, shape.heads, triton.cdiv(shape.value_width, _COLUMNS))](
            rows, gates, convolved.folded, states.gates[layer], states.states[layer], output, prepared.queries,
            prepared.keys, prepared.reading, prepared.values, prepared.scores, prepared.reached, tensors.query_starts,
            tensors.prefix_lengths, plan.sources, plan.targets, tensors.causal, plan.pending, plan.words,
            PROMPTS=prompts, BLOCK_V=_COLUMNS, STAGES=2 if rows.element_size() == 2 else 1, num_warps=4,
            **_of(mix_keyed_kernel, constants),
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
                product, decay, bias, gates, product.stride(0), HEADS=heads, BLOCK=block, num_warps=1,
                **self._dependent,
            )  # fmt: skip
        return gates

    def gated_heads(self, mixed: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows, heads, width = mixed.shape
        output = mixed.new_empty(rows, heads * width)
        if rows:
            gated_heads_kernel[(rows, triton.cdiv(heads, _GATED_HEADS))](
                mixed, gate, weight, output, gate.stride(0), epsilon, HEADS=heads, WIDTH=width,
                BLOCK_HEADS=_GATED_HEADS, BLOCK=triton.next_power_of_2(width), num_warps=2, **self._dependent,
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
        keyed: bool = False,
    ) -> PreparedRows:  # fmt: skip
        """What is solved ahead of sequences of many rows."""
        count, heads, sequences, width = len(rows), shape.heads, plan.batch.sequences, constants["BLOCK_K"]
        queries, keys, reading = (rows.new_empty(count, heads, width) for _ in range(3))
        values, scores = (rows.new_empty(count, heads, width) for width in (shape.value_width, CHUNK.value))
        # By row, or of keyed states by chunk.
        sizes = (triton.cdiv(count, CHUNK.value) + sequences, heads, width) if keyed else (count, heads)
        prepared = PreparedRows(queries, keys, reading, values, scores, gates.new_empty(sizes))
        chunks = triton.cdiv(plan.kinds.most_rows, CHUNK.value)
        constants = constants | {"BLOCK_V": max(16, triton.next_power_of_2(shape.value_width))}
        made = rows, gates, queries, keys, reading, values, scores, prepared.reached, plan.tensors.query_starts
        if keyed:
            prepare_keyed_kernel[(sequences, heads, chunks)](*made, num_warps=8, **_of(prepare_keyed_kernel, constants))
            return prepared
        warps, resident = self.tiles.prepared
        programs = min(plan.kinds.many * chunks * heads, resident * self._processors)
        prepare_kernel[(programs,)](
            *made, plan.words, plan.listed, sequences, chunks, num_warps=warps, **_of(prepare_kernel, constants),
            **self._dependent,
        )  # fmt: skip
        return prepared

    def _constants(self, shape: StateShape, layout: HeadsLayout, window: int) -> dict[str, Any]:
        """What kernels of states are compiled for; see `_of`."""
        return {
            "WINDOW": window, "CHANNELS": shape.channels, "HEADS": shape.heads,
            "GROUP": shape.heads // layout.key_heads, "DK": shape.key_width, "DV": shape.value_width,
            "QUERY_AT": layout.query_at, "KEY_AT": layout.key_at, "VALUE_AT": layout.value_at, "NORMED": layout.normed,
            "SCALING": layout.scaling, "DELTA": layout.rule is StateRule.DELTA,
            "BLOCK_K": max(16, triton.next_power_of_2(shape.key_width)), "PRECISION": self._precision,
        }  # fmt: skip


def _of(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Those of the constants that a kernel is compiled for."""
    return {name: value for name, value in constants.items() if name in kernel.arg_names}
