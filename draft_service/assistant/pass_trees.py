"""Trees that an assistant grows behind each pass of its target, out of the keys that the target has of the text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draft_service.neural.cuda_graphs.attention import USUAL_CONTEXT
from draft_service.neural.cuda_graphs.level_passes import LevelPasses
from draft_service.neural.cuda_graphs.pass_trees import PassTrees
from tree_kernels.attention import AttentionBatch, TreeAttention, plan_integers
from tree_kernels.pass_trees import VerifiedRows
from tree_models.layers.paged import PagedPass

if TYPE_CHECKING:
    from tree_kernels.attention.triton_planning import TritonPlan


class KeylessLevels(LevelPasses):
    """Levels whose rows have no keys: each attends to the text, and to no row of its tree."""

    def __init__(self, *arguments: Any) -> None:
        """As `LevelPasses`; of the plan only its pages, and the keys before each tail's root, are read."""
        super().__init__(*arguments)
        # [B] int32: the root's parent has a key too.
        self._keys = self.plan.prefix_lengths + 1
        self._plans = {rows: self._plan_of(rows) for rows in {1, self.shape.width}}
        # The same in frames, where layers with a window have these.
        self._within: dict[int, TritonPlan] = {}

    def start(self, cache: Any) -> None:
        """Read the sequences' lengths and pages, before the first level; `cache` as in `PagedPass`."""
        torch.add(self.plan.prefix_lengths, 1, out=self._keys)
        frames = cache.frames
        table = None if frames is None else frames.table.index_select(0, self.plan.page_table)
        for rows, plan in self._plans.items():
            plan.clear_schedules()
            if table is not None:
                self._within[rows] = replace(plan, page_table=table)

    def _plan_of(self, rows: int) -> TritonPlan:
        """Of so many rows of each sequence."""
        assert isinstance(self.attention, TreeAttention), "keys and values are attended to"
        count, base, planner = self._sequences, self.plan, self.attention.capturable
        batch = AttentionBatch(
            tuple(range(0, count * rows + 1, rows)),
            (USUAL_CONTEXT,) * count,
            ((),) * count,
            base.batch.page_size,
            (None,) * count,
            queries_only=True,
        )
        made = planner.plan(batch, torch.zeros(plan_integers(batch), dtype=torch.int32, device=self._keys.device))
        made.integers.copy_(torch.frombuffer(planner.pack(made, batch), dtype=torch.int32))
        return replace(
            made, prefix_lengths=self._keys, page_starts=base.page_starts, page_table=base.page_table, schedules={}
        )

    def _pass(self, rows: slice, slots: Tensor, cache: Any) -> PagedPass:
        count = rows.stop - rows.start
        within = self._within.get(count)
        windowed = None if within is None else PagedPass(self.attention, within, slots, cache)
        return PagedPass(self.attention, self._plans[count], slots, cache, windowed=windowed)


class KeylessTrees(PassTrees):
    """See `PassTrees`. All rows of a tree stand where its root does, and take no room in the cache."""

    levels = KeylessLevels
    _passes: KeylessLevels

    def read(self, rows: VerifiedRows, last_position: int) -> None:
        super().read(rows, last_position)
        self.tails.limits[1].fill_(self._passes.shape.num_steps)

    def grow(self, carried: Tensor, positions: Tensor, cache: Any, *, coupled: bool) -> None:
        """See `PassTrees.grow`."""
        self._passes.start(cache)
        behind = positions + 1
        self.tails.positions.copy_(
            behind.index_select(0, self.tails.last_rows)[None, :, None].expand_as(self.tails.positions)
        )
        super().grow(carried, behind, cache, coupled=coupled)
