"""Which leading pages the sequences of a step have in common, so that attention reads their keys once for the rows of
all that have them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

from target_service.core.sequence import Sequence
from target_service.model.cuda_graphs import sizes
from tree_kernels.attention.batch import COMMON_STEP

# Keys that the sequences would read of these pages, each for itself, from which one reading takes less: 16 times 3,072
# took 0.7 of the time and 32 times 1,024 as long (`benchmarks/results/2026-11-30-h200-captured-attention.md`).
_WORTH_KEYS = 48 * 1024


class CommonPages:
    """Looks for groups of sequences anew only where other sequences are in a step, or one has become twice as long."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Pages that hold the keys of which there must be a multiple.
        self._multiple = max(1, COMMON_STEP // page_size)
        # Sequences of the last step: their ids, and the logarithms of their lengths behind these.
        self._seen = list[int]()
        # Keys that the sequences of each group have in common, by `Sequence.common_page`; empty without groups.
        self._keys: dict[int, int] = {}

    def of(self, sequences: SequenceOf[Sequence]) -> tuple[int, ...]:
        """[B] as `AttentionBatch.common_pages`; empty where it would not pay. Notes the group of each sequence, so that
        those of a group stand side by side from the next step on."""
        if len(sequences) < sizes.FEWEST_IN_COMMON:
            return ()
        seen = [one.sequence_id << 6 | one.kv_length.bit_length() for one in sequences]
        # Groups change the order of the next step.
        are_others = seen != self._seen and set(seen) != set(self._seen)
        self._seen = seen
        if are_others or not self._holds(sequences):
            self._find(sequences)
        keys, size = self._keys, self._page_size
        return tuple([keys[one.common_page] // size for one in sequences]) if keys else ()

    def _holds(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether all keys of what was found are computed: a sequence that gave way to others may have fewer since."""
        keys = self._keys
        return not keys or all([one.kv_length >= keys[one.common_page] for one in sequences])

    def _find(self, sequences: SequenceOf[Sequence]) -> None:
        # Whole pages that are computed, of which a sequence comes before those that begin with all of its own.
        held = [one.pages[: one.kv_length // self._page_size] for one in sequences]
        order = sorted(range(len(held)), key=held.__getitem__)
        found = _in_groups([_common(held[one], held[other], self._multiple) for one, other in pairwise(order)])
        pays = sum([pages for _, pages in found]) * self._page_size >= _WORTH_KEYS
        self._keys = {-1: 0} if pays else {}
        for place, (_, pages) in zip(order, found, strict=True):
            sequences[place].common_page = last = held[place][pages - 1] if pages and pays else -1
            if last >= 0:
                self._keys[last] = pages * self._page_size


def _in_groups(common: SequenceOf[int]) -> list[tuple[int, int]]:
    """[B] of each sequence the group that it is in and the pages that this has in common, of groups that spare much; 0
    pages where it is in none.

    `common` [B - 1] are pages that a sequence and the one behind it begin with, of sequences in the order of their
    pages. So those that begin alike stand side by side, and among these those that do for longer.
    """
    found, fewest = [(0, 0)] * (len(common) + 1), sizes.FEWEST_IN_COMMON
    # First sequence and pages of those that begin alike, as far as sequences have been looked at.
    alike = [(0, 0)]
    for end, following in enumerate([*common, 0], 1):
        first = end - 1
        while alike[-1][1] > following:
            together = alike.pop()
            first = together[0]
            parts = found[first:end]
            if len(parts) < fewest:
                continue
            whole = [together] * len(parts)
            # The groups among them may stay, beside one of those that these leave, or all be one.
            if parts.count((0, 0)) >= fewest:
                parts = [part if part[1] else together for part in parts]
            found[first:end] = whole if _spared(whole) >= _spared(parts) else parts
        if following > alike[-1][1]:
            alike.append((first, following))
    return found


def _spared(groups: SequenceOf[tuple[int, int]]) -> int:
    """Pages that sequences in these groups need not read, since one of each group reads them."""
    return sum([pages for _, pages in groups]) - sum([pages for _, pages in set(groups)])


def _common(one: array[int], other: array[int], multiple: int) -> int:
    """How many pages both begin with, of which there must be a `multiple`. Pages are shared along a tree of prefixes:
    where both have one in the same place, all before it are the same too."""
    low, high = 0, min(len(one), len(other)) // multiple
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle * multiple - 1] == other[middle * multiple - 1]:
            low = middle
        else:
            high = middle - 1
    return low * multiple
