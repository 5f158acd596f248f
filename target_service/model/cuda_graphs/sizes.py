"""Sizes for which steps are captured, and how a step fills one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from tree_kernels.attention import AttentionBatch
from tree_kernels.attention.batch import COMMON_STEP
from tree_kernels.node_table.layout import KEPT

# Rows of a tree with one mask word per row; a larger tree needs four words.
_ONE_WORD = 64
_LARGEST_TREE = 256
# Larger steps are prompts by far the most.
_LARGEST_WITH_TREES = 512
# Sequences from which pages in common are looked for, and passes captured that read these once. Of fewer, attention by
# parts took as long as without at any length that prompts usually have (the same record).
FEWEST_IN_COMMON = 8


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured step holds up to this many rows, of up to this many sequences."""

    rows: int
    sequences: int
    common: bool = False  # whether it reads pages once that sequences have in common

    @property
    def rows_each(self) -> tuple[int, ...]:
        """[sequences] rows of each sequence of the step that is captured, as even as possible."""
        each, more = divmod(self.rows, self.sequences)
        return tuple(each + (index < more) for index in range(self.sequences))

    @property
    def largest_tree(self) -> int:
        """Rows of the largest tree whose mask has room; 0 where every sequence is a chunk of a prompt."""
        rows = max(self.rows_each)
        if rows <= _ONE_WORD:
            return _ONE_WORD
        return _LARGEST_TREE if rows <= _LARGEST_TREE else 0


@cache
def row_sizes(largest: int) -> tuple[int, ...]:
    """1, 4, 16, 32, 64, 128, 192, 256, 384, 512 .. and `largest` itself."""
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    # From here on time grows with rows: at 8B size 32 sequences took 6.7 ms with 128 rows, 8.6 with 256 and 12.8 with
    # 512 (H200, `benchmarks/results/2026-11-23-h200-widened-seventh.md`), and a prompt of 260 tokens took as long as
    # 512 rows.
    between = [power + power // 2 for power in powers if power >= 128]
    # Below 16, reading the weights costs more than the rows, and fewer sizes are compiled and captured in less time.
    kept = [power for power in powers if power >= 16 or power in (1, 4)]
    return (*sorted(size for size in (*kept, *between) if size < largest), largest)


def sequence_sizes(largest: int, rows: int) -> tuple[int, ...]:
    """1, 4, 16, 64 .. and `largest` itself: room for absent sequences costs little. Of steps that verify trees also 8,
    32 .., where each sequence of those has more rows than the smallest tile of attention holds: tiled for half as many,
    attention took a third longer (H200, `benchmarks/results/2026-11-30-h200-captured-attention.md`)."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    # Rows that the smallest tile of attention holds where four query heads share a key head.
    kept = (
        power for power in powers if power.bit_length() % 2 or (power >= 8 and power * 4 < rows <= _LARGEST_WITH_TREES)
    )
    return (*(power for power in kept if power < largest), largest)


def buckets_up_to(max_rows: int, max_sequences: int, *, common: bool = False) -> tuple[Bucket, ...]:
    """Every number of rows with every number of sequences, and with as many as rows. With `common` also one of each
    number of rows that reads common pages once, if enough sequences fit. Smallest first."""
    sizes = {(rows, count) for rows in row_sizes(max_rows) for count in sequence_sizes(max_sequences, rows)}
    found = {Bucket(rows, min(rows, count)) for rows, count in sizes}
    if common:
        most = (Bucket(rows, min(rows, max_sequences), common=True) for rows in row_sizes(max_rows))
        found |= {one for one in most if one.sequences >= FEWEST_IN_COMMON and one.rows <= _LARGEST_WITH_TREES}
    return tuple(sorted(found))


def choose_bucket(buckets: Iterable[Bucket], batch: AttentionBatch, room: int = 0) -> Bucket | None:
    """The bucket with the fewest rows, then the fewest sequences, that holds the step and `room` rows with any trees
    that the device makes of them; None if none does. `buckets` are in that order. One for common pages is for steps
    that have some, if it has as few rows: others hold them too."""
    trees = max((len(parents) for parents in batch.parents if parents is not None), default=KEPT + 1 if room else 0)
    rows, sequences = max(batch.rows, room), batch.sequences
    fitting = (
        bucket
        for bucket in buckets
        if rows <= bucket.rows and sequences <= bucket.sequences and trees <= bucket.largest_tree
    )
    if not batch.common_pages:
        return next((bucket for bucket in fitting if not bucket.common), None)
    found = list(fitting)
    few = [bucket for bucket in found if bucket.rows == found[0].rows]
    return next((bucket for bucket in few if bucket.common), found[0] if found else None)


def padded(batch: AttentionBatch, bucket: Bucket) -> AttentionBatch:
    """The step with the bucket's number of sequences: added ones have no rows, no keys and no pages."""
    missing = bucket.sequences - batch.sequences
    if not missing:
        return batch
    return replace(
        batch,
        query_starts=batch.query_starts + (batch.rows,) * missing,
        prefix_lengths=batch.prefix_lengths + (0,) * missing,
        pages=batch.pages + ((),) * missing,
        parents=batch.parents + (None,) * missing,
        common_pages=batch.common_pages + (0,) * missing if batch.common_pages else (),
    )


def capacity(bucket: Bucket, page_size: int, pages_each: int) -> AttentionBatch:
    """The largest step of a bucket: a chain of rows for every sequence, and as many pages as each can ever have.

    The plan is tuned for the length of the prefix, which is that of a typical sequence half-way, behind what a typical
    system prompt with tools has.
    """
    rows = bucket.rows_each
    room = pages_each * page_size - max(rows)
    # Keys of these pages that plans are tuned for.
    common = min(2048, room) // COMMON_STEP * COMMON_STEP if bucket.common else 0
    prefix = max(0, min(1024 + common, room))
    return AttentionBatch(
        query_starts=(0, *accumulate(rows)),
        prefix_lengths=(prefix,) * bucket.sequences,
        pages=((0,) * pages_each,) * bucket.sequences,
        page_size=page_size,
        parents=tuple((0, *range(count - 1)) if count <= _LARGEST_TREE else None for count in rows),
        common_pages=(common // page_size,) * bucket.sequences if bucket.common else (),
    )
