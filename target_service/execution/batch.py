"""Lays out a schedule and its trees as one forward pass: rows, positions, cache slots, masks, rows of logits."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from outrider.tree import TokenTree
from target_service.core.kv_cache import KVCache
from target_service.core.schedule import SequenceChunk
from target_service.core.sequence import Sequence
from target_service.model.forward import ForwardInput
from tree_kernels.attention import AttentionBatch
from tree_kernels.recurrence import RecurrentStates


class StepItem(NamedTuple):
    """One sequence's part of a step: `known` tokens, and the tree whose root is the last of them."""

    sequence: Sequence
    start: int  # keys that the sequence had before the step
    known: int
    tree: TokenTree | None  # None while the prompt is being read
    first_row: int  # where the tree's rows begin among the step's rows
    first_logit: int  # and among those with logits
    preemptions: int  # how often the sequence had been preempted
    scores: range = range(0)  # places in the prompt of the tokens whose log-probabilities its known tokens' rows have

    @property
    def kept(self) -> bool:
        """Whether the sequence still has the pages to which the step writes."""
        return self.preemptions == self.sequence.totals.preemptions


@dataclass(frozen=True)
class DeviceRows:
    """Bounds of a pass whose drafted rows the device chooses from its node tables."""

    rows: int  # of the pass, at most
    # Drafted rows of each sequence at most, by place in the batch. They do not depend on the room of the pass: so many
    # candidates are ranked, and the prospects of the best 1, 3, 7 .. have to hold for passes of other sizes too.
    limits: tuple[int, ...]
    # Sequences whose rows the host lays out, which come first, with limits of 0: those that read their prompts, and
    # those whose trees it cuts. And the rows of all of them.
    laid_out: int = 0
    laid_out_rows: int = 0
    tail: int = 0  # keys of each sequence that a tree takes that is grown behind the pass

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Drafted rows that each sequence can get beside the rows of all roots and of what the host lays out."""
        room = self.rows - self.laid_out_rows - (len(self.limits) - self.laid_out)
        return tuple([min(limit, room) for limit in self.limits])


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over all scheduled sequences."""

    items: tuple[StepItem, ...]
    input: ForwardInput
    decode_rows: int
    prefill_rows: int
    drafted: bool  # whether any tree has more rows than its root
    device_rows: DeviceRows | None = None  # bounds of the rows that the device chooses; None where the host chose them

    def keys(self, passes: int) -> Iterator[tuple[StepItem, int]]:
        """Each item, and the most keys that its sequence has behind `passes` passes of the batch."""
        tail = self.device_rows.tail if self.device_rows is not None else 0
        for item, limit in zip(self.items, _limits_of(len(self.items), self.device_rows), strict=True):
            rows = item.known + (item.tree.drafted if item.tree is not None else 0)
            yield item, item.start + keys_of(rows, passes, limit, tail)

    def without(self, sequence: Sequence) -> StepBatch:
        """The batch, of which the outcome for a sequence does not count."""
        items = tuple(item._replace(tree=None) if item.sequence is sequence else item for item in self.items)
        return replace(self, items=items)

    def items_shifted(self, accepted_counts: SequenceOf[int]) -> StepBatch:
        """The batch, laid out as if the step before had accepted no drafted row, its items moved on by what that one
        accepted, by place in it. Not its rows, which a device that runs it has moved."""
        items = list(self.items)
        for place, moves in self.input.moves(accepted_counts):
            if moves:
                item = items[place]
                items[place] = StepItem(item.sequence, item.start + moves, *item[2:])
        return replace(self, items=tuple(items))


def _limits_of(sequences: int, device_rows: DeviceRows | None) -> SequenceOf[int | None]:
    """Of each sequence the drafted rows that the device can choose; None where the host lays out all."""
    if device_rows is None:
        return (None,) * sequences
    return (None,) * device_rows.laid_out + device_rows.most[device_rows.laid_out :]


def keys_of(rows: int, passes: int, limit: int | None = None, tail: int = 0) -> int:
    """Keys that `passes` passes of `rows` may write. Where the device drafts up to `limit` rows in each, with those of
    one more pass, which is prepared and not run, or of a tree's `tail` behind the last."""
    return rows + passes - 1 if limit is None else passes * (1 + limit) + max(1 + limit, tail)


def _state_slots(
    chunks: SequenceOf[SequenceChunk], trees: SequenceOf[TokenTree | None], recurrent: RecurrentStates
) -> tuple[int, ...]:
    """The slots of the sequences' states. Of a tree that has no room there, all rows would count as known."""
    assert all([tree is None or len(tree) <= recurrent.window for tree in trees]), "a tree has more rows than are kept"
    return tuple([chunk.sequence.state_slot for chunk in chunks])


def lay_out(
    chunks: SequenceOf[SequenceChunk],
    trees: SequenceOf[TokenTree | None],
    cache: KVCache,
    passes: int = 1,
    device_rows: DeviceRows | None = None,
    common_pages: tuple[int, ...] = (),
) -> StepBatch:
    """Build the step. `trees[i]` belongs to `chunks[i]`; only a chunk of one row may carry drafted rows.
    `common_pages` are those of `AttentionBatch`.

    It is the first of `passes` passes, and the pages hold the keys of all of them. Row r of a sequence has cache slot
    `kv_length + r`; its position is `kv_length` plus its depth. A token pending from the step under way is laid out as
    `Sequence.feed` gives it, and as if that step accepted no drafted row. Where the device chooses rows, the tree of a
    sequence that it chooses for is its root, the other sequences come first, and the pages hold what all passes may
    accept.
    """
    token_ids, positions, slots, logit_rows, prefixes = (list[int]() for _ in range(5))
    decode_rows = 0
    starts, pages, drafted = [0], list[SequenceOf[int]](), False
    parents: list[tuple[int, ...] | None] = []
    items: list[StepItem] = []
    limits, tail = _limits_of(len(chunks), device_rows), device_rows.tail if device_rows is not None else 0
    end = 0
    for chunk, tree, limit in zip(chunks, trees, limits, strict=True):
        sequence, count = chunk.sequence, chunk.count
        start, first_row, shape = sequence.kv_length, end, None
        end += count
        root_row = end - 1
        token_ids += sequence.feed(start, count)
        positions += range(start, start + count)
        scores = sequence.scores(start, count)
        if scores:
            logit_rows += range(first_row, root_row if tree is not None else end)
        preemptions = sequence.totals.preemptions
        items.append(StepItem(sequence, start, count, tree, root_row, len(logit_rows), preemptions, scores))
        if tree is not None:
            decode_rows += len(tree)
            if tree.drafted:
                drafted, end = True, end + tree.drafted
                token_ids += tree.token_ids[1:]
                positions += [start + depth for depth in tree.depths[1:]]
                shape = None if tree.is_chain else tree.parents
            logit_rows += range(root_row, end)
        rows = end - first_row
        slots += cache.slots(sequence.pages, start, rows)
        keys = start + keys_of(rows, passes, limit, tail) + sequence.pending_drafts
        prefixes.append(start)
        starts.append(end)
        pages.append(sequence.pages[: cache.pages_for(keys)])
        parents.append(shape)
    of_sequences = tuple(pages), cache.page_size, tuple(parents), common_pages
    attention = AttentionBatch(tuple(starts), tuple(prefixes), *of_sequences)
    room, laid_out = (device_rows.rows, device_rows.laid_out) if device_rows is not None else (0, 0)
    rows_of_pass = tuple(token_ids), tuple(positions), tuple(slots)
    states = _state_slots(chunks, trees, cache.recurrent) if cache.recurrent is not None else ()
    forward = ForwardInput(*rows_of_pass, attention, tuple(logit_rows), room, laid_out, states)
    prefill_rows = len(token_ids) - decode_rows
    return StepBatch(tuple(items), forward, max(decode_rows, room - prefill_rows), prefill_rows, drafted, device_rows)
