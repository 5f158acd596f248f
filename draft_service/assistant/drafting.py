"""Trees that an assistant grows on the host, one pass for each level of all trees: the plain form of `pass_trees`.

Symbols: B sequences, R rows of a pass, W the width of the target's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_service.compiling import Numbers
from draft_service.drafters.base import DraftSequence
from draft_service.neural.level_growth import Forest, Rules
from draft_service.neural.network import Network, RowOutput
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import HostGrowth, grow_forest, rules_of
from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_models.in_pass import SequenceKeys
from tree_models.layers.paged import PagedPass


class Known(NamedTuple):
    """What is known of a sequence when it is drafted for."""

    state: Tensor  # [1, W] of the token before the root
    keys: SequenceKeys  # of all tokens before the root


class KeylessDrafting(HostGrowth):
    """See `draft_service.neural_drafter.Drafting`. A sequence's state is a `Known`."""

    def __init__(self, network: Network, shape: TreeShape, attention: TreeAttention, cache: Any) -> None:
        """`cache` is the target's, as in `PagedPass`."""
        self._network, self._shape, self._attention, self._cache = network, shape, attention, cache

    def _grow(self, sequences: Sequence[DraftSequence]) -> tuple[Forest, Rules]:
        shape = self._shape.for_sequences(len(sequences))
        states = torch.cat([_known(one).state for one in sequences]).to(self._network.dtype)
        roots = self._pass(sequences, [1] * len(sequences), [one.root for one in sequences], states)
        rules = rules_of(sequences, shape)
        return grow_forest(sequences, rules, shape, lambda _: self._network, roots, partial(self._expand, sequences))

    def _expand(
        self, sequences: Sequence[DraftSequence], forest: Forest, before: Numbers, carried: Tensor, _level: int
    ) -> RowOutput:
        """The pass over the nodes that a level expands, see `grow_forest`."""
        offsets = np.cumsum(before) - before
        tokens, sources = list[int](), list[int]()
        for b, count in enumerate(forest.widths.tolist()):
            tokens += forest.tokens[b, forest.frontier[b, :count]].tolist()
            sources += (forest.sources[b, :count] + offsets[b]).tolist()
        return self._pass(sequences, forest.widths.tolist(), tokens, carried[torch.tensor(sources)])

    def _pass(
        self, sequences: Sequence[DraftSequence], counts: Sequence[int], tokens: Sequence[int], states: Tensor
    ) -> RowOutput:
        """One pass over `counts` rows of each sequence: `tokens` [R] and the states [R, W] before them."""
        keys = [_known(one).keys for one in sequences]
        batch = AttentionBatch(
            tuple(accumulate(counts, initial=0)),
            tuple(one.length for one in keys),
            tuple(one.pages for one in keys),
            self._cache.page_size,
            (None,) * len(keys),
            queries_only=True,
        )
        attention, plan, frames = self._attention, self._attention.plan(batch), self._cache.frames
        slots, windowed = torch.empty(0, dtype=torch.int64), None
        if frames is not None:
            windowed = PagedPass(attention, attention.plan_in_frames(plan, frames), slots, self._cache)
        step = PagedPass(attention, plan, slots, self._cache, windowed=windowed)
        positions = torch.tensor([one.length for one in keys]).repeat_interleave(torch.tensor(counts))
        return self._network.forward_rows(torch.tensor(tokens), states, positions, step)


def _known(sequence: DraftSequence) -> Known:
    assert isinstance(sequence.state, Known), "a sequence that is drafted for"
    return sequence.state
