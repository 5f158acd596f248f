"""The rows that a step computes attention for: ragged, of several sequences, over one paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from tree_kernels.window_frames import WindowFrames

# The widest tile of keys: what is a multiple of it no tile has but whole.
COMMON_STEP = 128


@dataclass(frozen=True)
class AttentionBatch:
    """B sequences, R rows in all. Row r of sequence b sits in cache slot `prefix_lengths[b] + r` of that sequence.

    A row attends to the whole prefix, to itself, and to its ancestors among the rows (the *tail*). A decode step is a
    tree of one row; a prefill chunk is a causal tail. Rows of `queries_only` have no keys and no slots.
    """

    query_starts: tuple[int, ...]  # [B + 1], rising from 0 to R
    prefix_lengths: tuple[int, ...]  # [B] keys before the tail, all visible
    # [B][..] page ids of each sequence, covering prefix and tail. `array("i")` costs the host least.
    pages: tuple[Sequence[int], ...]
    page_size: int
    # [B] parents of the tail's rows; None is a causal tail (prefill chunk or chain), which may exceed 256 rows.
    parents: tuple[tuple[int, ...] | None, ...]
    # [B] leading pages that sequences have in common with others, whose keys a backend may read once for the rows of
    # all of these; 0 for other sequences. Empty where there are none. They hold a multiple of `COMMON_STEP` keys.
    # Sequences side by side are a group if the last of these pages is the same: then all before it have to be too.
    common_pages: tuple[int, ...] = ()
    # Rows have no keys: each attends to its sequence's prefix alone, from the position behind it. `parents` mean
    # nothing then, and no row may have an empty prefix.
    queries_only: bool = False

    @property
    def sequences(self) -> int:
        return len(self.prefix_lengths)

    @property
    def rows(self) -> int:
        return self.query_starts[-1]

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """[B] rows of each sequence."""
        return tuple(end - start for start, end in zip(self.query_starts[:-1], self.query_starts[1:], strict=True))

    @cached_property
    def key_counts(self) -> tuple[int, ...]:
        """[B] keys of each sequence, its rows' own among them."""
        if self.queries_only:
            return self.prefix_lengths
        return tuple(prefix + rows for prefix, rows in zip(self.prefix_lengths, self.row_counts, strict=True))

    @cached_property
    def present(self) -> int:
        """Sequences with rows."""
        return sum(map(bool, self.row_counts))

    def check(self) -> None:
        """Raise `ValueError` unless lengths agree and every sequence has rows >= 0 and pages for all its keys. O(B)."""
        count = self.sequences
        if self.page_size < 1:
            raise ValueError(f"page_size must be positive, got {self.page_size}")
        if len(self.query_starts) != count + 1 or len(self.pages) != count or len(self.parents) != count:
            raise ValueError(
                f"expected {count + 1} query_starts, {count} pages and {count} parents, "
                f"got {len(self.query_starts)}, {len(self.pages)} and {len(self.parents)}"
            )
        if self.query_starts[0] != 0:
            raise ValueError(f"query_starts must begin with 0, got {self.query_starts[0]}")
        for b, rows in enumerate(self.row_counts):
            keys = self.key_counts[b]
            if rows < 0 or self.prefix_lengths[b] < 0:
                raise ValueError(f"sequence {b} has {rows} rows after {self.prefix_lengths[b]} keys")
            if len(self.pages[b]) * self.page_size < keys:
                raise ValueError(f"sequence {b} has {keys} keys and pages for {len(self.pages[b]) * self.page_size}")
            tree = self.parents[b]
            if tree is not None and len(tree) != rows:
                raise ValueError(f"sequence {b} has {rows} rows and {len(tree)} parents")
            if self.queries_only and rows and not keys:
                raise ValueError(f"sequence {b} has {rows} rows without keys, and no keys before them")
        if self.queries_only and self.common_pages:
            raise ValueError("common_pages are of rows that have keys")
        if self.common_pages:
            self._check_common()

    def _check_common(self) -> None:
        keys = [pages * self.page_size for pages in self.common_pages]
        held = zip(keys, self.prefix_lengths, strict=False)
        if (
            len(keys) != self.sequences
            or any(common % COMMON_STEP for common in keys)
            or any(not 0 <= common <= prefix for common, prefix in held)
        ):
            raise ValueError(
                f"expected common_pages [{self.sequences}] of {COMMON_STEP} keys, a multiple or none, and at most the "
                f"prefix, got {list(self.common_pages)}"
            )

    def in_frames(self, frames: WindowFrames) -> AttentionBatch:
        """The batch over the frames that its pages are in by now."""
        return replace(self, pages=tuple(frames.frames_of(pages) for pages in self.pages))


@dataclass
class AttentionPlan:
    """The index work of one step, done once and used by every layer. Backends add their own tensors."""

    batch: AttentionBatch

    @property
    def present(self) -> Tensor | None:
        """[1] int32, how many rows the step has, on the device; None where all that are computed are there."""
        return None


def plan_integers(batch: AttentionBatch) -> int:
    """How many int32 a plan at a fixed address holds for batches up to this one."""
    return 4 * batch.sequences + 1 + len(batch.common_pages) + batch.rows + sum(map(len, batch.pages))
