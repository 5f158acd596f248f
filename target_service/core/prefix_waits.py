"""Sequences that wait while another one of their tenant computes the keys that they begin with.

Without this, requests that arrive together and begin alike would each read what they share, as the `n` choices of one
request would: pages are found only once they are filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from target_service.core.sequence import Sequence, SequenceState
from target_service.core.sequence_pages import SequencePages


class PrefixWaits:
    """Which sequences wait for whom. A sequence waits for one that began before it, so none waits for itself."""

    def __init__(self, pages: SequencePages, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        # By id of who waits: itself, the one that computes, and how many pages both begin with.
        self._waits: dict[int, tuple[Sequence, Sequence, int]] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._waits

    def hold(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether the sequence, which holds no pages, has to wait for one of `running`: for the one that is about to
        fill most of the pages that it needs."""
        reuses = self._pages.prefixes is not None and sequence.request.reuses_pages
        if not reuses or sequence.pending is not None:
            return False
        tenant = sequence.request.tenant
        others = [one for one in running if one.state is SequenceState.PREFILL and one.request.tenant == tenant]
        if not others:
            return False
        known = self._pages.cached_pages(sequence)
        # A pass makes the next token of the last one.
        wanted = len(sequence.token_ids) - 1
        # A sequence waits for at least one in so many of the tokens that it would read itself. Chosen: reading fewer
        # takes no longer than waiting for them may.
        least = known + max(1, -(-(wanted // self._page_size - known) // 2))
        best: tuple[int, Sequence] | None = None
        for other in others:
            shared = min(wanted, _common(sequence.token_ids, other.token_ids, self._page_size)) // self._page_size
            if shared >= least and (best is None or shared > best[0]) and self._pages.can_wait_for(other, shared):
                best = shared, other
        if best is None:
            return False
        self._waits[sequence.sequence_id] = sequence, best[1], best[0]
        return True

    def take_ready(self) -> Iterator[Sequence]:
        """The sequences that need not wait any more. They wait no longer."""
        for sequence, other, pages in list(self._waits.values()):
            if other.state is not SequenceState.PREFILL or other.prefix_pages >= pages:
                del self._waits[sequence.sequence_id]
                yield sequence

    def forget(self, gone: Sequence) -> list[Sequence]:
        """The sequence ended or was preempted: it waits for none. Returns those that waited for it."""
        self._waits.pop(gone.sequence_id, None)
        freed = [sequence for sequence, other, _ in self._waits.values() if other is gone]
        for sequence in freed:
            del self._waits[sequence.sequence_id]
        return freed


def _common(one: SequenceOf[int], other: SequenceOf[int], page_size: int) -> int:
    """Tokens that both begin with, in whole pages."""
    most = min(len(one), len(other)) // page_size
    low = 0
    # Most begin differently, or alike to the end: the search takes as many comparisons of slices as bits of `most`.
    while low < most:
        middle = (low + most + 1) // 2
        if one[low * page_size : middle * page_size] == other[low * page_size : middle * page_size]:
            low = middle
        else:
            most = middle - 1
    return low * page_size
