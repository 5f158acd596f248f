"""A forward pass, as it is laid out on the host and as it is on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from target_service.core.kv_cache import KVCache
from tree_kernels.attention import AttentionBatch, AttentionPlan, TreeAttention
from tree_kernels.latent_attention import LatentAttention
from tree_kernels.logit_shaping import SequenceTexts
from tree_kernels.node_table import StepIntegers
from tree_kernels.pages import Pages
from tree_kernels.recurrence import RecurrentPass
from tree_models.layers.paged import PagedPass

# Attention over keys and values of heads, or over latents that are both.
Attention = TreeAttention | LatentAttention


def pass_over(
    attention: Attention, plan: AttentionPlan, slots: Tensor, cache: KVCache, recurrent: RecurrentPass | None = None
) -> PagedPass:
    """A pass of every kind of layer that the cache has."""
    frames, within = cache.frames, None
    if frames is not None:
        assert isinstance(attention, TreeAttention), "layers of latents have no window"
        within = PagedPass(attention, attention.plan_in_frames(plan, frames), frames.slots(slots), cache)
    return PagedPass(attention, plan, slots, cache, recurrent, within)


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One packed pass: R rows of all sequences, and the rows whose logits are needed."""

    token_ids: tuple[int, ...]  # [R]; -1 - i stands for `ModelRunner.pending[i]`
    positions: tuple[int, ...]  # [R]
    slots: tuple[int, ...]  # [R], where each row's key and value go: page * page_size + offset
    attention: AttentionBatch
    logit_rows: tuple[int, ...]
    # Where the device chooses rows: rows of the pass with those, and the sequences for which it chooses none, which
    # come first; else 0.
    room: int = 0
    laid_out: int = 0
    # [B] slots of recurrent states. Empty where there are none, or for a pass of no sequence's, which takes slot 0.
    state_slots: tuple[int, ...] = ()

    @property
    def output_rows(self) -> tuple[int, ...]:
        """Rows, rising, whose logits what follows the pass may read: `logit_rows`, and where the device chooses rows
        all that it may choose."""
        if not self.room:
            return self.logit_rows
        first = self.attention.query_starts[self.laid_out]
        return (*itertools.takewhile(first.__gt__, self.logit_rows), *range(first, self.room))

    @classmethod
    def of_sequence(
        cls,
        token_ids: tuple[int, ...],
        positions: Sequence[int],
        pages: Sequence[int],
        cache: Pages,
        parents: tuple[int, ...] | None = None,
    ) -> ForwardInput:
        """Rows of one sequence behind its keys, with logits of all of them: a chain, or a tree of these `parents`."""
        start, rows = positions[0], len(token_ids)
        held = tuple(pages[: cache.pages_for(start + rows)])
        attention = AttentionBatch((0, rows), (start,), (held,), cache.page_size, (parents,))
        return cls(token_ids, tuple(positions), tuple(cache.slots(pages, start, rows)), attention, tuple(range(rows)))

    def advanced_by(self, passes: int) -> ForwardInput:
        """The pass `passes` after this one, where every sequence has one row and each pass reads the tokens of the one
        before. The pages must hold the keys of all passes."""
        attention, starts = self.attention, [prefix + passes for prefix in self.attention.prefix_lengths]
        size = attention.page_size
        pages = zip(attention.pages, starts, strict=True)
        return ForwardInput(
            tuple(-1 - place for place in range(len(starts))),
            tuple(position + passes for position in self.positions),
            tuple(held[start // size] * size + start % size for held, start in pages),
            replace(attention, prefix_lengths=tuple(starts)),
            self.logit_rows,
            state_slots=self.state_slots,
        )

    def shifted_by_accepted(self, accepted_counts: Sequence[int]) -> ForwardInput:
        """The pass, laid out as if the one before had accepted no drafted row, moved on by what that one accepted; see
        `tree_kernels.node_table.shift_by_accepted`. The pages must hold the keys."""
        attention, size = self.attention, self.attention.page_size
        positions, slots, prefixes = list(self.positions), list(self.slots), list(attention.prefix_lengths)
        for b, moves in self.moves(accepted_counts):
            prefixes[b] += moves
            first, end = attention.query_starts[b : b + 2]
            for row, key in enumerate(range(prefixes[b], prefixes[b] + end - first), first):
                positions[row] += moves
                slots[row] = attention.pages[b][key // size] * size + key % size
        attention = replace(attention, prefix_lengths=tuple(prefixes))
        return replace(self, positions=tuple(positions), slots=tuple(slots), attention=attention)

    def moves(self, accepted_counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(sequence, keys to move on by) of every sequence with a pending token."""
        for b, (row, end) in enumerate(itertools.pairwise(self.attention.query_starts)):
            if end > row and self.token_ids[row] < 0:
                yield b, accepted_counts[-1 - self.token_ids[row]]


class WrittenRows(NamedTuple):
    """Where a pass wrote keys and values, and what says which of its rows are verified."""

    slots: Tensor  # [rows] int32
    parameters: Tensor  # [any] int32, as the caller of the pass gave them
    node_slots: Tensor | None = None  # [rows] int32, see `RecurrencePlan`; None where no layer keeps states


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A pass on the device: at least R rows, of which only the first R are used."""

    logits: Tensor  # [rows, vocabulary], in the model's dtype; unwritten in rows that nothing reads
    token_ids: Tensor  # [rows] int32
    parents: Tensor  # [rows] int32, relative to each sequence's first row
    slots: Tensor  # [rows] int32
    parameters: Tensor  # [any] int32, as the caller gave them
    texts: SequenceTexts  # of its sequences
    graph_buffers: object | None = None  # what owns these tensors, pass after pass; None where they are new each time
    step: StepIntegers | None = None  # the step's integers, of a captured pass or one whose rows were drafted there
    node_slots: Tensor | None = None  # [rows] int32, see `RecurrencePlan`; None where no layer keeps states
    # Where a drafter runs behind passes: [rows] int32, and the plan of attention.
    positions: Tensor | None = None
    plan: AttentionPlan | None = None

    @property
    def written(self) -> WrittenRows:
        """What accepted rows are moved by."""
        return WrittenRows(self.slots, self.parameters, self.node_slots)


def spread(logits: Tensor, rows: Tensor, count: int) -> Tensor:
    """[count, V] with `logits` [rows, V] at the places `rows` [rows] int64; the others are unwritten."""
    return logits.new_empty(count, logits.shape[1]).index_copy_(0, rows, logits)


def rows_of(values: Tensor, rows: tuple[int, ...]) -> Tensor:
    """The given rows of `values`, as a view where they are consecutive."""
    if rows and rows == tuple(range(rows[0], rows[0] + len(rows))):
        return values[rows[0] : rows[0] + len(rows)]
    return values[torch.tensor(rows, dtype=torch.int64).to(values.device, non_blocking=True)]
