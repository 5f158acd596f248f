"""Sizes for which steps are captured, and how a step fills one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product

from tree_kernels.attention import AttentionBatch
from tree_kernels.node_table.layout import KEPT

# Rows of a tree with one mask word per row; a larger tree needs four words.
_ONE_WORD = 64
_LARGEST_TREE = 256


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured step holds up to this many rows, of up to this many sequences."""

    rows: int
    sequences: int

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


def sequence_sizes(largest: int) -> tuple[int, ...]:
    """1, 4, 16, 64 .. and `largest` itself: room for absent sequences costs little."""
    return (*(4**exponent for exponent in range(largest.bit_length()) if 4**exponent < largest), largest)


def buckets_up_to(max_rows: int, max_sequences: int) -> tuple[Bucket, ...]:
    """Every number of rows with every number of sequences, and with as many as rows. Smallest first."""
    sizes = product(row_sizes(max_rows), sequence_sizes(max_sequences))
    return tuple(sorted({Bucket(rows, min(rows, count)) for rows, count in sizes}))


def choose_bucket(buckets: Iterable[Bucket], batch: AttentionBatch, room: int = 0) -> Bucket | None:
    """The bucket with the fewest rows, then the fewest sequences, that holds the step and `room` rows with any trees
    that the device makes of them; None if none does. `buckets` are in that order."""
    trees = max((len(parents) for parents in batch.parents if parents is not None), default=KEPT + 1 if room else 0)
    fitting = (
        bucket
        for bucket in buckets
        if max(batch.rows, room) <= bucket.rows and batch.sequences <= bucket.sequences and trees <= bucket.largest_tree
    )
    return next(fitting, None)


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
    )


def capacity(bucket: Bucket, page_size: int, pages_each: int) -> AttentionBatch:
    """The largest step of a bucket: a chain of rows for every sequence, and as many pages as each can ever have.

    The plan is tuned for the length of the prefix, which is that of a typical sequence half-way.
    """
    rows = bucket.rows_each
    prefix = max(0, min(1024, pages_each * page_size - max(rows)))
    return AttentionBatch(
        query_starts=(0, *accumulate(rows)),
        prefix_lengths=(prefix,) * bucket.sequences,
        pages=((0,) * pages_each,) * bucket.sequences,
        page_size=page_size,
        parents=tuple((0, *range(count - 1)) if count <= _LARGEST_TREE else None for count in rows),
    )
