"""The index work of a step of tree attention for Triton's kernels: one launch prepares it; nothing is read back.

Every tensor of a plan keeps its address, so that a captured CUDA graph stays valid: the next step, as `pack` lays it
out, is copied into `integers` of the plan that the graph was captured with.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch, AttentionPlan
from tree_kernels.attention.tree_mask import WORD_BITS, mask_words, tree_rows
from tree_kernels.attention.triton_merge import combine_kernel, merge_kernel
from tree_kernels.attention.triton_schedule import schedule_kernel, split_kernel
from tree_kernels.attention.triton_tiling import FIXED_MERGING, MERGE_COLUMNS, Merging, Tiling, choose_merging
from tree_kernels.conditional_launch import conditional_launch
from tree_kernels.dependent_launch import dependent_launch
from tree_kernels.window_frames import WindowFrames

# Kernels take the softmax in base 2.
LOG2_E = 1.4426950408889634
# Heads of a row that a program combines: four warps with 16 elements of 128 columns in each thread.
_COMBINED_HEADS = 16
# Every row of a tail, however long.
_ALL = (0, 1 << 30)
# `TritonPlan.causal` of sequences whose rows see the keys before them alone.
_QUERIES_ONLY = -1


@dataclass(frozen=True)
class TritonSettings:
    """Options of the Triton backends."""

    # Cut every sequence's keys into splits of this size, a multiple of the tile's, so that no result depends on the
    # rest of the batch. None balances the work over the device instead.
    split_keys: int | None = None
    tiling: Tiling | None = None  # None chooses by the packed rows of the largest sequence
    processors: int | None = None  # SMs to fill; None is all of the device
    merging: Merging | None = None  # None chooses by how many partials there are


@dataclass(frozen=True)
class HeadLayout:
    """The heads of a kind of layers, its window, and the tiling, for which kernels are compiled."""

    group: int
    kv_heads: int
    width: int
    value_width: int
    tiling: Tiling
    window: int = 0  # keys that a row sees, negative where they are a chunk; 0 for all


@dataclass
class PlanWorkspace:
    """Work space of one layout; see `attention.triton_schedule` for the integers."""

    groups: Tensor  # [groups, 8] int32
    chunk_table: Tensor  # [chunks, 16] int32
    arrivals: Tensor  # [groups] int32
    totals: Tensor  # [3] int32
    partials: Tensor  # [2 * chunks, packed rows of a block, Dv] fp32
    partial_lse: Tensor  # [2 * chunks, packed rows of a block] fp32
    max_chunks: int
    parts: int  # the most partials of a group on average, of a step like the plan's


@dataclass
class TritonPlan(AttentionPlan):
    """Device tensors of one step. Those before `words` are views of `integers`, in this order."""

    integers: Tensor
    query_starts: Tensor
    prefix_lengths: Tensor
    causal: Tensor
    page_starts: Tensor
    parents: Tensor
    page_table: Tensor
    words: Tensor  # [R, 1 or 4] int64
    depths: Tensor  # [R] int32 of rows of trees, the root's 0; of chains they are not written
    reserved: bool = False  # whether steps up to all of the batch's pages follow, whatever its lengths
    # First and end of the rows of every tail that `run` computes; its output for the others is undefined. None is all.
    # A schedule is made for them: clear `schedules` after a change.
    output_rows: tuple[int, int] | None = None
    # [B] int32, see `AttentionBatch.common_pages`; a view of `integers`, between `page_starts` and `parents`. None of a
    # plan without.
    common: Tensor | None = None
    schedules: dict[HeadLayout, PlanWorkspace] = field(default_factory=dict)  # made by the first layer of a layout
    parts: CommonParts | None = None  # likewise, of a plan with `common`

    @property
    def present(self) -> Tensor | None:
        """See `AttentionPlan.present`: a captured step may have fewer rows than its size."""
        return self.query_starts[-1:] if self.reserved else None

    def clear_schedules(self) -> None:
        """Divide the work again at the next layer of each layout, since the step has changed."""
        self.schedules.clear()
        self.parts = None

    @property
    def max_output_rows(self) -> int:
        """The most rows of one sequence that `run` computes in the batch that the plan was made for."""
        first, end = self.output_rows or _ALL
        return max(0, min(end, max(self.batch.row_counts)) - first)


class CommonParts(NamedTuple):
    """The work of a step whose sequences have pages in common, in groups."""

    shared: TritonPlan  # each group's rows as one sequence, over its common keys alone
    own: TritonPlan  # each sequence's rows over its other keys


class PartialRows(NamedTuple):
    """What R rows have of some of their keys."""

    values: Tensor  # [R, Hq, Dv] fp32, the softmax over these keys alone
    lse: Tensor  # [R, Hq] fp32, the logarithm of its sum, in base 2


class TritonPlanner:
    """What the Triton backends of attention share: plans at fixed addresses, and how work is divided."""

    def __init__(self, device: torch.device, settings: TritonSettings | None = None) -> None:
        self._device = device
        self._settings = settings or TritonSettings()
        # SMs to fill.
        self.processors = self._settings.processors or torch.cuda.get_device_properties(device).multi_processor_count
        self._dependent = dependent_launch(device)

    def plan(self, batch: AttentionBatch, integers: Tensor | None = None) -> TritonPlan:
        """See `TreeAttention.plan`. With `integers` [plan_integers(batch)] int32 on the device the plan becomes views
        of them, for steps up to the batch; they are not written here: what `pack` returns must be there before the plan
        is run. None allocates and fills them."""
        reserved = integers is not None
        if integers is None:
            integers = torch.frombuffer(_pack(batch), dtype=torch.int32).to(self._device, non_blocking=True)
        count, rows = batch.sequences, batch.rows
        sizes = [count + 1, count, count, count, len(batch.common_pages), rows, sum(map(len, batch.pages))]
        words = torch.empty(rows, mask_words(batch), dtype=torch.int64, device=self._device)
        query_starts, prefix_lengths, causal, page_starts, common, parents, page_table = torch.split(integers, sizes)
        return TritonPlan(
            batch, integers, query_starts, prefix_lengths, causal, page_starts, parents, page_table, words,
            self._integers(rows), reserved, common=common if batch.common_pages else None,
        )  # fmt: skip

    def plan_in_frames(self, plan: AttentionPlan, frames: WindowFrames) -> TritonPlan:
        """See `TreeAttention.plan_in_frames`. Everything but the table of pages is shared with `plan`, on the device
        too, where later steps are put into it; so this has to be captured with them."""
        assert isinstance(plan, TritonPlan)
        return replace(plan, page_table=frames.table.index_select(0, plan.page_table), common=None)

    def pack(self, plan: TritonPlan, batch: AttentionBatch) -> array[int]:
        """Another step for a plan: [n] int32, for the first n of the plan's `integers`.

        The batch has the plan's number of sequences (absent ones have no rows and no pages) and at most its rows, its
        pages in all, and its largest tree's words; with `split_keys` also at most its chunks. Raises `ValueError` where
        the batch does not fit.
        """
        old = plan.batch
        fits = (
            batch.sequences == old.sequences
            and batch.page_size == old.page_size
            and batch.rows <= old.rows
            and sum(map(len, batch.pages)) <= plan.page_table.numel()
            and tree_rows(batch) <= WORD_BITS * plan.words.shape[1]
            and all(
                self._max_chunks(batch, layout) <= schedule.max_chunks for layout, schedule in plan.schedules.items()
            )
        )
        if not fits:
            raise ValueError(
                f"a plan of {old.sequences} sequences, {old.rows} rows and {plan.page_table.numel()} pages "
                f"cannot take {batch.sequences}, {batch.rows} and {sum(map(len, batch.pages))}"
            )
        return _pack(batch, pad_rows=old.rows, with_common=plan.common is not None)

    def _programs(self, tiling: Tiling) -> int:
        return self.processors * tiling.programs_per_sm

    def _max_chunks(self, batch: AttentionBatch, layout: HeadLayout, reserved: bool = False) -> int:
        """Chunks of the batch, or with `reserved` the most of any batch of its sequences, rows and pages."""
        split = self._settings.split_keys
        if not split:
            return self._programs(layout.tiling)
        block_rows = layout.tiling.block_rows
        if reserved:
            # However the rows are spread over the sequences, each has at most one block that is not full.
            blocks = batch.rows * layout.group // block_rows + batch.sequences
            longest = max((len(pages) for pages in batch.pages), default=0) * batch.page_size
            return blocks * layout.kv_heads * int(triton.cdiv(longest, split))
        lengths = zip(batch.prefix_lengths, batch.row_counts, strict=True)
        return sum(
            triton.cdiv(rows * layout.group, block_rows) * layout.kv_heads * triton.cdiv(prefix + rows, split)
            for prefix, rows in lengths
        )

    def schedule_of(self, plan: TritonPlan, layout: HeadLayout) -> PlanWorkspace:
        """How the step's work is divided for one layout of heads.

        The first call of a step launches the kernel that divides it; a captured graph replays that launch.
        """
        if layout in plan.schedules:
            return plan.schedules[layout]
        batch, tiling = plan.batch, layout.tiling
        fixed_tiles, rest = divmod(self._settings.split_keys or 0, tiling.block_keys)
        if rest:
            raise ValueError(
                f"expected split_keys to be a multiple of {tiling.block_keys}, got {self._settings.split_keys}"
            )
        max_chunks = self._max_chunks(batch, layout, plan.reserved)
        # As in `_max_chunks`; and one more that begins before `output_rows`.
        rows = batch.rows if plan.output_rows is None else plan.max_output_rows * batch.sequences
        blocks, more = rows * layout.group // tiling.block_rows, 1 if plan.output_rows is None else 2
        max_groups = (blocks + more * batch.sequences) * layout.kv_heads
        schedule = PlanWorkspace(
            groups=self._integers(max_groups, 8),
            chunk_table=self._integers(max_chunks, 16),
            arrivals=self._integers(max_groups),
            totals=self._integers(3),
            partials=torch.empty(2 * max_chunks, tiling.block_rows, layout.value_width, device=self._device),
            partial_lse=torch.empty(2 * max_chunks, tiling.block_rows, device=self._device),
            max_chunks=max_chunks,
            parts=max_chunks // max(1, (blocks + more * batch.present) * layout.kv_heads),
        )
        walk = not plan.schedules and any(parents is not None for parents in batch.parents)
        words, (first_row, end_row) = plan.words.shape[1], plan.output_rows or _ALL
        schedule_kernel[(batch.sequences,)](
            plan.query_starts, plan.prefix_lengths, plan.causal, plan.page_starts, plan.parents, plan.words,
            plan.depths, schedule.groups, schedule.chunk_table, schedule.arrivals, schedule.totals,
            sequences=batch.sequences, programs=self._programs(tiling), max_chunks=max_chunks, first_row=first_row,
            end_row=end_row, GROUP=layout.group, KV_HEADS=layout.kv_heads, BLOCK_M=tiling.block_rows,
            BLOCK_N=tiling.block_keys, FIXED_TILES=fixed_tiles, BLOCK_B=triton.next_power_of_2(batch.sequences),
            BLOCK_R=WORD_BITS * words if walk else 0, WORDS=words, BLOCK_I=64, WINDOW=layout.window, num_warps=2,
            **conditional_launch(schedule.totals), **self._dependent,
        )  # fmt: skip
        plan.schedules[layout] = schedule
        return schedule

    def merge(
        self, output: Tensor, schedule: PlanWorkspace, layout: HeadLayout, output_lse: Tensor | None = None
    ) -> None:
        """Merge the partials of groups that were cut into `output` [R, Hq, Dv], and the logarithms of their masses into
        `output_lse` [R, Hq] if it is given."""
        groups, block_rows, width = len(schedule.groups), layout.tiling.block_rows, layout.value_width
        fixed, chunks = bool(self._settings.split_keys), schedule.max_chunks
        by_group = fixed or groups <= chunks
        programs = groups if by_group else chunks
        chosen = FIXED_MERGING if fixed else choose_merging(programs * block_rows, schedule.parts)
        merging = self._settings.merging or chosen
        columns = triton.next_power_of_2(width) if width % MERGE_COLUMNS else MERGE_COLUMNS
        merge_kernel[(programs, block_rows // merging.rows, triton.cdiv(width, columns))](
            output, schedule.partial_lse if output_lse is None else output_lse, schedule.partials,
            schedule.partial_lse, schedule.groups, schedule.chunk_table, schedule.totals,
            GROUP=layout.group, KV_HEADS=layout.kv_heads, DV=width, BLOCK_DV=columns, BLOCK_M=block_rows,
            ROWS=merging.rows, PARTS=merging.parts, BY_GROUP=by_group, LSE=output_lse is not None,
            num_warps=merging.warps, **self._dependent,
        )  # fmt: skip

    def combine(self, shared: PartialRows, own: PartialRows, plan: TritonPlan, output: Tensor) -> None:
        """Write to `output` [R, Hq, Dv] what rows have of common keys and of the rest; see `reference.combined`."""
        rows, heads, width = output.shape
        common, sequences = plan.common, plan.batch.sequences
        assert common is not None, "only such a plan has parts"
        combine_kernel[(rows, triton.cdiv(heads, _COMBINED_HEADS))](
            output, *shared, *own, plan.query_starts, common, sequences, HEADS=heads, DV=width, BLOCK_H=_COMBINED_HEADS,
            BLOCK_DV=triton.next_power_of_2(width), BLOCK_B=triton.next_power_of_2(sequences), num_warps=4,
            **self._dependent,
        )  # fmt: skip

    def _integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)


def _pack(batch: AttentionBatch, pad_rows: int | None = None, *, with_common: bool | None = None) -> array[int]:
    """The step in the order of `TritonPlan`, so that one copy brings it to the device; with the batch's common pages if
    it has some, or as `with_common`."""
    packed = array("i", batch.query_starts)
    packed.extend(batch.prefix_lengths)
    packed.extend(_QUERIES_ONLY if batch.queries_only else parents is None for parents in batch.parents)
    packed.extend(list(accumulate(map(len, batch.pages), initial=0))[:-1])
    if batch.common_pages if with_common is None else with_common:
        packed.extend(batch.common_pages or (0,) * batch.sequences)
    first_parent, rows = len(packed), pad_rows or batch.rows
    # Zeros, also where a tail has no tree.
    packed.frombytes(bytes(rows * packed.itemsize))
    for start, parents in zip(batch.query_starts, batch.parents, strict=False):
        if parents is not None:
            place = first_parent + start
            packed[place : place + len(parents)] = array("i", parents)
    for pages in batch.pages:
        # A copy of memory where they come as an array, and most of the host's time where they do not.
        packed.extend(pages)
    return packed


def split(plan: TritonPlan) -> CommonParts:
    """The parts of a plan with `common` pages, of the step that its integers hold now: in a captured step this has to
    be captured too."""
    batch, common, count = plan.batch, plan.common, plan.batch.sequences
    assert common is not None, "only such a plan has parts"
    starts, prefixes, causal, own_prefixes, own_starts = plan.integers.new_empty(5, count + 1).unbind()
    split_kernel[(count + 1,)](
        plan.query_starts, plan.prefix_lengths, plan.page_starts, plan.page_table, common, starts, prefixes, causal,
        own_prefixes, own_starts, count, PAGE_SIZE=batch.page_size, BLOCK_B=triton.next_power_of_2(count),
        CAUSAL=_QUERIES_ONLY, num_warps=1,
    )  # fmt: skip
    # Which groups there are is known on the device alone: it is tiled as if all rows were of one.
    keys = max(batch.common_pages) * batch.page_size, *(0,) * (count - 1)
    together = AttentionBatch((0, *(batch.rows,) * count), keys, ((),) * count, batch.page_size, (None,) * count)
    own = replace(plan, batch=_own(batch), prefix_lengths=own_prefixes, page_starts=own_starts)
    shared = replace(plan, batch=together, query_starts=starts, prefix_lengths=prefixes, causal=causal)
    return CommonParts(*(replace(part, common=None, schedules={}) for part in (shared, own)))


def _own(batch: AttentionBatch) -> AttentionBatch:
    """The batch without its common keys. Of their pages nothing is left to be known but on the device."""
    pairs = zip(batch.prefix_lengths, batch.common_pages, strict=True)
    prefixes = tuple(max(0, prefix - pages * batch.page_size) for prefix, pages in pairs)
    return replace(batch, prefix_lengths=prefixes, common_pages=())
