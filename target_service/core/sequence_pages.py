"""Pages that sequences hold, and how many of the free ones drafted rows may take."""

from __future__ import annotations

from collections.abc import Iterable

from target_service.core.kv_cache import KVCache
from target_service.core.schedule import Schedule
from target_service.core.sequence import Sequence, SequenceState
from tree_kernels.pages import OutOfPages


class SequencePages:
    """Gives sequences pages of the KV cache and takes them back.

    Known tokens come before drafted rows: pages that running sequences need to read what is known are kept free for
    them, and so are those of a newcomer that drafted rows alone keep out.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        # Pages that the next in line needs; 0 if it would not fit without drafted rows either.
        self._kept_out = 0

    @property
    def scarce(self) -> bool:
        """Whether pages that drafted rows did not need are worth giving back: a newcomer waits for them, or fewer are
        free than are in use. Else the next pass is spared taking them again."""
        return bool(self._kept_out) or self._cache.free_pages < self._cache.used_pages

    def held(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence has pages for `tokens`, as nearly all have in nearly every step."""
        return len(sequence.pages) * self._cache.page_size >= tokens

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Reserve pages for `tokens` of the sequence, or raise `OutOfPages` and change nothing."""
        missing = self._missing(sequence, tokens)
        if missing > 0:
            last = sequence.pages[-1] if sequence.pages else None
            sequence.pages.extend(self._cache.allocate(missing, after=last))

    def reserve_for_drafts(self, tokens: Iterable[tuple[Sequence, int]], running: Iterable[Sequence]) -> bool:
        """Reserve pages for drafted rows: for so many tokens of each of these sequences. False, and nothing is changed,
        where known tokens of `running` or a newcomer need them."""
        wanted = [(sequence, count) for sequence, count in tokens if not self.held(sequence, count)]
        if not wanted:
            return not self._kept_out
        missing = sum([self._missing(sequence, count) for sequence, count in wanted])
        unread = sum([self._unread(one) for one in running if one.state is SequenceState.PREFILL])
        if missing > self._cache.free_pages - self._kept_out - unread:
            return False
        for sequence, count in wanted:
            self.reserve(sequence, count)
        return True

    def reserve_behind_trees(self, schedule: Schedule, max_context: int) -> bool:
        """Reserve pages for drafted tokens that the step under way may accept. False if they do not fit."""
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            drafts = sequence.pending_drafts
            if sequence.length + drafts > max_context:
                return False
            tokens = sequence.kv_length + chunk.count + drafts
            if self.held(sequence, tokens):
                continue
            try:
                self.reserve(sequence, tokens)
            except OutOfPages:
                return False
        return True

    def note_newcomer(self, wanted: int, running: Iterable[Sequence]) -> None:
        """Note that the next in line has to wait for `wanted` pages. If they would be free without drafted rows, none
        are reserved for those, until `forget_newcomer`."""
        for_drafts = sum(max(0, len(one.pages) - self._cache.pages_for(one.length)) for one in running)
        self._kept_out = wanted if wanted <= self._cache.free_pages + for_drafts else 0

    def forget_newcomer(self) -> None:
        """Let drafted rows have pages again, whoever waits."""
        self._kept_out = 0

    def spare_rows(self, sequence: Sequence) -> int:
        """Rows past the known tokens that fit the sequence's pages and the free ones."""
        return (len(sequence.pages) + self._cache.free_pages) * self._cache.page_size - sequence.length

    def trim(self, sequence: Sequence, keys: int = 0) -> None:
        """Release pages that hold neither a committed token nor one of the first `keys` keys, which a pass under way
        may write."""
        keep = self._cache.pages_for(max(len(sequence.token_ids), keys))
        if len(sequence.pages) > keep:
            self._cache.release(sequence.pages[keep:])
            del sequence.pages[keep:]

    def release(self, sequence: Sequence) -> None:
        self._cache.release(sequence.pages)
        del sequence.pages[:]
        sequence.kv_length = 0

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        return self._cache.pages_for(tokens) - len(sequence.pages)

    def _unread(self, sequence: Sequence) -> int:
        """Pages that a sequence that reads lacks for its known tokens."""
        return max(0, self._missing(sequence, len(sequence.token_ids)))
