"""Grows the trees of several sequences level by level, all on the device, over tails whose rows have fixed places."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from draft_service.neural.network import Network, RowOutput
from draft_service.neural.tree_config import TreeShape
from tree_kernels.attention import AttentionPlan, TreeAttention
from tree_kernels.conditional_launch import launched_if_positive
from tree_kernels.growth import Children, GumbelMax, grow, gumbel_max_winners, likeliest, make_growth
from tree_kernels.latent_attention import LatentAttention
from tree_models.layers.paged import PagedPass
from tree_models.rank_group import RankGroup

if TYPE_CHECKING:
    from typing import Any

    from tree_kernels.attention.triton_backend import TritonAttention
    from tree_kernels.attention.triton_planning import TritonPlan


class LevelInputs(NamedTuple):
    """What every level reads. B sequences, L levels of which L - 1 are expanded, W nodes of each."""

    limits: Tensor  # [2, B] int32, most nodes and most depth of each tree
    positions: Tensor  # [L - 1, B * W] int32
    slots: Tensor  # [L - 1, B * W] int32, where keys go
    temperatures: Tensor  # [B] float32
    gumbel_max: GumbelMax


class RootRows(NamedTuple):
    """The rows from which trees grow, one of each of B sequences: the first of its tail."""

    token_ids: Tensor  # [B] int32, the roots of the trees
    carried: Tensor  # [any, C], states
    sources: Tensor  # [B] int64, where among these are those of the tokens before them
    positions: Tensor  # [B] int32
    slots: Tensor  # [B] int32, where their keys go; -1 for those that are written


class _LevelAttention:
    """Attention of the rows of one level of all trees, as `tail_attention.NewRowsAttention`: those of other levels keep
    their queries, and their output is not used. Queries that are in place are not copied."""

    def __init__(self, passes: LevelPasses, rows: slice) -> None:
        self._passes, self._rows = passes, rows

    def run(self, plan: AttentionPlan, query: Tensor, *others: Any) -> Tensor:
        """As `TreeAttention.run` or `LatentAttention.run`."""
        queries, rows = self._passes.queries_like(query), self._rows
        if query.data_ptr() != queries[:, rows].data_ptr():
            queries[:, rows] = query.view(len(queries), -1, *query.shape[1:])
        output = self._passes.attention.run(plan, queries.flatten(0, 1), *others)
        return output.view(*queries.shape[:2], *output.shape[1:])[:, rows].flatten(0, 1)


class LevelPasses:
    """The passes over the levels of trees, and the trees that they grow (`tree_kernels.growth`)."""

    def __init__(
        self,
        sequences: int,
        shape: TreeShape,
        network: Network,
        attention: TritonAttention | TreeAttention | LatentAttention,
        plan: TritonPlan,
        inputs: LevelInputs,
        token_ids: Tensor | None,
        ranks: RankGroup | None = None,
    ) -> None:
        """`plan` is that of tails of 1 + (L - 1) * W rows; `token_ids` are those of the network on its device, of whose
        logits each of `ranks` has a part."""
        self.shape, self.attention, self.plan = shape, attention, plan
        self.tail = 1 + shape.expanded
        self._sequences, self._network, self._inputs, self._token_ids = sequences, network, inputs, token_ids
        self._ranks = ranks
        self.growth = make_growth(
            sequences, shape.num_steps, shape.width, shape.topk, network.device, least_mass=shape.least_mass
        )
        # [B, tail, Hq, D] by the last two sizes, allocated with the first pass.
        self._queries: dict[tuple[int, ...], Tensor] = {}

    def add(self, lm_input: Tensor, level: int, *, coupled: bool) -> None:
        """Add the nodes of a level, given the lm_head's input of the level above; `coupled` if some sequences may
        be."""
        parents = self.plan.parents.view(self._sequences, self.tail)
        with self._if_wanted(level):
            children = self._children(self._network.logits(lm_input), level, coupled=coupled)
        grow(self.growth, children, self._inputs.limits, level, self.shape.min_score, parents)

    def expand(self, level: int, carried: Tensor, cache: Any) -> RowOutput:
        """Read the expanded nodes of a level, given the states `carried` from the level above; `cache` as in
        `PagedPass`."""
        positions = self._inputs.positions[level - 1]
        first = 1 + (level - 1) * self.shape.width
        step = self._pass(slice(first, first + self.shape.width), self._inputs.slots[level - 1], cache)
        tokens, sources = self.growth.next_tokens.flatten(), self.growth.sources.flatten()
        with self._if_wanted(level + 1):
            return self._network.forward_rows(tokens, carried, positions, step, sources)

    def _if_wanted(self, level: int) -> AbstractContextManager[None]:
        """Launches within do nothing where a level is left out."""
        if not self.shape.least_mass or level == 1:
            return nullcontext()
        return launched_if_positive(self.growth.worth[level : level + 1])

    def read_roots(self, rows: RootRows, cache: Any) -> RowOutput:
        """Read the rows from which trees grow; `cache` as in `PagedPass`."""
        step = self._pass(slice(0, 1), rows.slots, cache)
        return self._network.forward_rows(rows.token_ids, rows.carried, rows.positions, step, rows.sources)

    def _pass(self, rows: slice, slots: Tensor, cache: Any) -> PagedPass:
        """A pass over some rows of each tail."""
        # The schedule depends on the parents so far and on these rows, so it is computed again.
        self.plan.clear_schedules()
        self.plan.output_rows = rows.start, rows.stop
        return PagedPass(_LevelAttention(self, rows), self.plan, slots, cache, queries=self._places(rows))

    def _places(self, rows: slice) -> Tensor | None:
        """[W, Hq, D], where the only sequence's rows may leave their queries, which saves a copy that waits for them.
        None of several sequences, whose rows lie apart, of layers of several shapes, and in the first pass."""
        if self._sequences > 1 or len(self._queries) != 1:
            return None
        (queries,) = self._queries.values()
        return queries[0, rows]

    def queries_like(self, query: Tensor) -> Tensor:
        """[B, tail, Hq, D]: the queries of all rows, kept from pass to pass, for layers of this shape."""
        heads = tuple(query.shape[1:])
        if heads not in self._queries:
            self._queries[heads] = query.new_zeros(self._sequences, self.tail, *heads)
        return self._queries[heads]

    def _children(self, logits: Tensor, level: int, *, coupled: bool) -> Children:
        shape = self.shape
        common = logits, self._inputs.temperatures, shape.topk, self._token_ids
        if not coupled:
            return likeliest(*common, self._ranks)
        draw = self._inputs.gumbel_max
        race = draw, level, shape.gumbel_candidates, shape.gumbel_sharpness
        return gumbel_max_winners(*common, *race, self._ranks)
