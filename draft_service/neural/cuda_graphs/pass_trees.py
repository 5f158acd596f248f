"""Trees that a network grows behind each pass of its target, in the target's own memory and without the host.

Symbols are those of `tree_kernels.pass_trees`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from draft_service.neural.cuda_graphs.attention import USUAL_CONTEXT
from draft_service.neural.cuda_graphs.level_passes import LevelInputs, LevelPasses, RootRows
from draft_service.neural.network import Network
from draft_service.neural.tree_config import TreeShape
from tree_kernels.attention import AttentionBatch, TreeAttention, plan_integers
from tree_kernels.growth import keep, make_kept
from tree_kernels.latent_attention import LatentAttention
from tree_kernels.pass_trees import NODES, VerifiedRows, make_tails, read_outcome, write_tables
from tree_models.rank_group import RankGroup


class CacheSizes(NamedTuple):
    """Of the cache that target and network share, and of its passes."""

    page_size: int
    pages_each: int  # of a sequence at most
    rows: int  # of a pass at most


class PassTrees:
    """What drafts behind passes of up to so many sequences: a tail of each, and the trees."""

    # How the levels of trees are read.
    levels: type[LevelPasses] = LevelPasses

    def __init__(
        self,
        sequences: int,
        shape: TreeShape,
        network: Network,
        attention: TreeAttention | LatentAttention,
        sizes: CacheSizes,
        ranks: RankGroup | None = None,
    ) -> None:
        """`ranks` as in `LevelPasses`."""
        device, self._sequences, self._page_size = network.device, sequences, sizes.page_size
        self.tails = make_tails(sequences, shape.num_steps, shape.width, sizes.rows, sizes.pages_each, device)
        tail = 1 + shape.expanded
        batch = AttentionBatch(
            tuple(range(0, sequences * tail + 1, tail)),
            (USUAL_CONTEXT,) * sequences,
            ((0,) * sizes.pages_each,) * sequences,
            sizes.page_size,
            (tuple(max(0, row - 1) for row in range(tail)),) * sequences,
        )
        # Its pages are those of the tails, so that every place of the table names a page.
        plan = attention.capturable.plan(batch, torch.zeros(plan_integers(batch), dtype=torch.int32, device=device))
        plan.query_starts.copy_(torch.arange(0, sequences * tail + 1, tail))
        plan.page_starts.copy_(torch.arange(0, sequences * sizes.pages_each, sizes.pages_each))
        self.tails = self.tails._replace(
            prefix_lengths=plan.prefix_lengths, page_table=plan.page_table.view(sequences, sizes.pages_each)
        )
        ids, tails = network.token_ids, self.tails
        positions, slots = (
            tensor.view(shape.num_steps - 1, sequences * shape.width) for tensor in (tails.positions, tails.slots)
        )
        inputs = LevelInputs(tails.limits, positions, slots, tails.temperatures, tails.gumbel_max)
        token_ids = None if ids is None else torch.from_numpy(ids).to(device)
        self._passes = self.levels(sequences, shape, network, attention, plan, inputs, token_ids, ranks)
        # Keys of the last rows that are kept are in the cache.
        self._written = torch.full((sequences,), -1, dtype=torch.int32, device=device)
        self._kept = make_kept(self._passes.growth, NODES)

    def read(self, rows: VerifiedRows, last_position: int) -> None:
        """Read what a pass kept, of as many sequences at most."""
        missing = self._sequences - len(rows.prefix_lengths)
        if missing > 0:
            # Not of captured passes.
            starts = torch.cat([rows.query_starts, rows.query_starts[-1:].expand(missing)])
            prefixes, pages = (
                functional.pad(tensor, (0, missing)) for tensor in (rows.prefix_lengths, rows.page_starts)
            )
            rows = rows._replace(query_starts=starts, prefix_lengths=prefixes, page_starts=pages)
        read_outcome(rows, self.tails, self._page_size, last_position)

    def grow(self, carried: Tensor, positions: Tensor, cache: Any, *, coupled: bool) -> None:
        """Grow trees behind the pass that was read, of whose rows the network has read the states `carried` [R, C] at
        `positions` [R], and written keys; `cache` as in `PagedPass`. `coupled` if some sequences may be COUPLED."""
        passes, last = self._passes, self.tails.last_rows
        rows = RootRows(self.tails.roots, carried, last, positions.index_select(0, last), self._written)
        carried, lm_input = passes.read_roots(rows, cache)
        passes.add(lm_input, 1, coupled=coupled)
        for level in range(1, passes.shape.num_steps):
            carried, lm_input = passes.expand(level, carried, cache)
            passes.add(lm_input, level + 1, coupled=coupled)
        keep(passes.growth, self._kept)

    def write(self, table_slots: Tensor, trust: Tensor, tables: Tensor) -> None:
        """Write the grown trees to node tables; see `tree_kernels.pass_trees.write_tables`."""
        write_tables(self._kept, self.tails, table_slots, trust, tables)
