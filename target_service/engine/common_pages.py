"""Which leading pages the sequences of a step have in common, so that attention reads their keys once for all rows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf

from target_service.core.sequence import Sequence
from target_service.model.cuda_graphs import sizes
from tree_kernels.attention.batch import COMMON_STEP

# Keys that the sequences would read of these pages, each for itself, from which one reading takes less: 16 times 3,072
# took 0.7 of the time and 32 times 1,024 as long (`benchmarks/results/2026-11-30-h200-captured-attention.md`).
_WORTH_KEYS = 48 * 1024


class CommonPages:
    """Looks for them anew only where other sequences are in a step, or one has become twice as long."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Pages that hold the keys of which there must be a multiple.
        self._multiple = max(1, COMMON_STEP // page_size)
        # Sequences of the last step with the logarithms of their lengths, and what was found.
        self._seen: tuple[tuple[int, int], ...] = ()
        self._found: tuple[int, ...] = ()

    def of(self, sequences: SequenceOf[Sequence]) -> tuple[int, ...]:
        """[B] as `AttentionBatch.common_pages`; empty where it would not pay."""
        if len(sequences) < sizes.FEWEST_IN_COMMON:
            return ()
        seen = tuple([(one.sequence_id, one.kv_length.bit_length()) for one in sequences])
        if seen != self._seen or not self._holds(sequences):
            self._seen, self._found = seen, self._find(sequences)
        return self._found

    def _holds(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether sequences still begin with what was found: one that gave way to others may have other pages since."""
        if not self._found:
            return True
        most = max(self._found)
        members = [one for one, count in zip(sequences, self._found, strict=True) if count]
        if min([one.kv_length for one in members]) < most * self._page_size:
            return False
        return len({one.pages[most - 1] for one in members}) == 1

    def _find(self, sequences: SequenceOf[Sequence]) -> tuple[int, ...]:
        firsts = [one.pages[0] if one.kv_length >= self._page_size else -1 for one in sequences]
        page, count = Counter([first for first in firsts if first >= 0] or [-1]).most_common(1)[0]
        if page < 0 or count < sizes.FEWEST_IN_COMMON:
            return ()
        model = sequences[firsts.index(page)].pages
        lengths = [
            _common(model, one.pages, one.kv_length // self._page_size) // self._multiple * self._multiple
            if first == page
            else 0
            for first, one in zip(firsts, sequences, strict=True)
        ]
        # As many pages of as many sequences as spare the most.
        ordered, fewest = sorted(lengths, reverse=True), sizes.FEWEST_IN_COMMON
        kept, most = max((place * length, length) for place, length in enumerate(ordered[fewest - 1 :], fewest))
        if kept * self._page_size < _WORTH_KEYS:
            return ()
        return tuple([most if length >= most else 0 for length in lengths])


def _common(one: array[int], other: array[int], most: int) -> int:
    """How many pages, at most `most`, both begin with. Pages are shared along a tree of prefixes: where both have one
    in the same place, all before it are the same too."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
