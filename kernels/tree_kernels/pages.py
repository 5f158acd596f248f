"""The allocator of a cache's pages.

On a CPU attention reads a sequence in place if its pages are consecutive, and gathers its keys and values otherwise, so
pages are allocated in runs that can grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """Fewer pages are free than requested. Nothing was allocated."""


class Pages:
    """Pages of `page_size` tokens, free or allocated. A slot is `page * page_size + offset`."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"expected at least one page of at least one token, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # Free pages as maximal runs start .. end, indexed by either bound.
        self._end_of = {0: num_pages}
        self._start_of = {num_pages: 0}
        self.free_pages = num_pages

    @property
    def used_pages(self) -> int:
        return self.num_pages - self.free_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, or raise `OutOfPages` and take none. They follow page `after`, the last of the sequence
        that grows, as far as those are free. The others are consecutive if any free run has room for them."""
        if count > self.free_pages:
            raise OutOfPages(f"expected {count} free pages, have {self.free_pages}")
        taken: list[int] = []
        if after is not None and after + 1 in self._end_of:
            taken = self._take(after + 1, count, at=after + 1)
        while len(taken) < count:
            missing = count - len(taken)
            start = max(self._end_of, key=self._length)
            # In the middle of the longest run, so that both the neighbour below and this sequence can grow.
            slack = max(0, self._length(start) - missing) if start > 0 else 0
            taken += self._take(start, missing, at=start + slack // 2)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Free pages. Each must have been allocated and not yet released."""
        start = end = pages[0] if pages else 0
        for page in pages:
            if page != end:
                self._give(start, end)
                start = page
            end = page + 1
        self._give(start, end)

    def _length(self, start: int) -> int:
        return self._end_of[start] - start

    def _take(self, start: int, count: int, at: int) -> list[int]:
        """At most `count` pages from `at` on, out of the free run that begins at `start`."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        stop = min(at + count, end)
        for low, high in ((start, at), (stop, end)):
            if low < high:
                self._end_of[low], self._start_of[high] = high, low
        self.free_pages -= stop - at
        return list(range(at, stop))

    def _give(self, start: int, end: int) -> None:
        """Free the pages start .. end, and join them with the free runs they touch."""
        if start == end:
            return
        self.free_pages += end - start
        start, end = self._start_of.pop(start, start), self._end_of.pop(end, end)
        self._end_of[start], self._start_of[end] = end, start

    def slots(self, pages: Sequence[int], start: int, count: int) -> list[int]:
        """The slots of tokens start .. start + count of a sequence that holds `pages`."""
        size = self.page_size
        return [pages[t // size] * size + t % size for t in range(start, start + count)]

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is free or owned, and exactly once."""
        assert self._start_of == {end: start for start, end in self._end_of.items()}, "a free run has two bounds"
        free = [page for start, end in self._end_of.items() for page in range(start, end)]
        assert len(free) == self.free_pages, f"{len(free)} pages are free, {self.free_pages} were counted"
        pages = [*free, *(page for sequence in owned for page in sequence)]
        assert len(pages) == self.num_pages, f"{len(pages)} pages accounted for, of {self.num_pages}"
        assert sorted(pages) == list(range(self.num_pages)), "a page is accounted for twice"
        assert not self._end_of.keys() & self._start_of.keys(), "two free runs touch"
