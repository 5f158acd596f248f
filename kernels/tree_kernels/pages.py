"""The allocator of a cache's pages.

On a CPU attention reads a sequence in place if its pages are consecutive, and gathers its keys and values otherwise, so
pages are allocated in runs that can grow.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence


class OutOfPages(Exception):
    """Fewer pages are free than requested. Nothing was allocated."""


class Pages:
    """Pages of `page_size` tokens, each with a count of its owners. A slot is `page * page_size + offset`.

    A page without owners is free. One that only a cache of prefixes owns is *spare*: it counts as free, and is taken
    back from the cache once nothing else is left.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"expected at least one page of at least one token, got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # Free pages as maximal runs start .. end, indexed by either bound.
        self._end_of = {0: num_pages}
        self._start_of = {num_pages: 0}
        self._unowned = num_pages
        self._owners = array("I", bytes(4 * num_pages))
        # By page, whether a cache of prefixes is one of its owners.
        self._cached = bytearray(num_pages)
        self.spare_pages = 0
        self._take_back: Callable[[int], None] | None = None

    @property
    def free_pages(self) -> int:
        """Pages that `allocate` can take, spare ones included."""
        return self._unowned + self.spare_pages

    @property
    def used_pages(self) -> int:
        return self.num_pages - self.free_pages

    def cached_by(self, take_back: Callable[[int], None]) -> None:
        """Let a cache own pages, in place of an earlier one. `take_back(count)` uncaches at least `count` spare pages,
        or all."""
        for page in [page for page, cached in enumerate(self._cached) if cached]:
            self.uncache(page)
        self._take_back = take_back

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, or raise `OutOfPages` and take none. They follow page `after`, the last of the sequence
        that grows, as far as those are free. The others are consecutive if any free run has room for them."""
        if count > self.free_pages:
            raise OutOfPages(f"expected {count} free pages, have {self.free_pages}")
        if count > self._unowned and self._take_back is not None:
            self._take_back(count - self._unowned)
        taken: list[int] = []
        if after is not None and after + 1 in self._end_of:
            taken = self._take(after + 1, count, at=after + 1)
        while len(taken) < count:
            missing = count - len(taken)
            start = max(self._end_of, key=self._length)
            # In the middle of the longest run, so that both the neighbour below and this sequence can grow.
            slack = max(0, self._length(start) - missing) if start > 0 else 0
            taken += self._take(start, missing, at=start + slack // 2)
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Make the caller an owner of pages that have others."""
        owners, cached, spare = self._owners, self._cached, 0
        for page in pages:
            count = owners[page]
            assert count, f"page {page} has no owner"
            if count == 1 and cached[page]:
                spare += 1
            owners[page] = count + 1
        self.spare_pages -= spare

    def cache(self, page: int) -> None:
        """Make the cache an owner of a page that has another, and is not cached."""
        assert self._owners[page] and not self._cached[page], f"page {page} has no owner, or is cached"
        self._owners[page] += 1
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """Take a cached page from the cache. It is free now if it has no other owner."""
        assert self._cached[page], f"page {page} is not cached"
        self.spare_pages -= self._owners[page] == 1
        self._cached[page] = 0
        self.release([page])

    def is_cached(self, page: int) -> bool:
        """Whether a cache of prefixes owns the page, perhaps beside others."""
        return bool(self._cached[page])

    def is_spare(self, page: int) -> bool:
        """Whether only the cache owns the page."""
        return bool(self._cached[page]) and self._owners[page] == 1

    def release(self, pages: Sequence[int]) -> None:
        """Return pages that the caller owns. Those without another owner are free."""
        start = end = 0
        owners, cached = self._owners, self._cached
        for page in pages:
            assert owners[page], f"page {page} has no owner"
            owners[page] = left = owners[page] - 1
            if left:
                self.spare_pages += left == 1 and cached[page]
                continue
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
        self._unowned -= stop - at
        return list(range(at, stop))

    def _give(self, start: int, end: int) -> None:
        """Free the pages start .. end, and join them with the free runs they touch."""
        if start == end:
            return
        self._unowned += end - start
        start, end = self._start_of.pop(start, start), self._end_of.pop(end, end)
        self._end_of[start], self._start_of[end] = end, start

    def slots(self, pages: Sequence[int], start: int, count: int) -> list[int]:
        """The slots of tokens start .. start + count of a sequence that holds `pages`."""
        size = self.page_size
        if count <= size:
            return [pages[t // size] * size + t % size for t in range(start, start + count)]
        # Of a prompt: page by page takes a tenth of the time.
        first, slots = start // size, list[int]()
        for page in pages[first : self.pages_for(start + count)]:
            slots += range(page * size, (page + 1) * size)
        begin = start - first * size
        return slots[begin : begin + count]

    def check_integrity(self, owned: Collection[Sequence[int]], cached: Iterable[int] = ()) -> None:
        """Raise AssertionError unless every page is free, or owned as often as it is counted: once by each of `owned`
        that has it, and by the cache if it is in `cached`."""
        assert self._start_of == {end: start for start, end in self._end_of.items()}, "a free run has two bounds"
        assert not self._end_of.keys() & self._start_of.keys(), "two free runs touch"
        free = [page for start, end in self._end_of.items() for page in range(start, end)]
        assert len(free) == self._unowned, f"{len(free)} pages are free, {self._unowned} were counted"
        cached = list(cached)
        owners = Counter(page for pages in (*owned, cached) for page in pages)
        assert all(len(set(pages)) == len(pages) for pages in owned), "a sequence has a page twice"
        counted = {page: count for page, count in enumerate(self._owners) if count}
        wrong = {page for page in owners.keys() | counted.keys() if owners[page] != counted.get(page, 0)}
        assert not wrong, f"pages {sorted(wrong)} have other owners than were counted"
        assert sorted([*free, *owners]) == list(range(self.num_pages)), "a page is neither free nor owned"
        assert {page for page, flag in enumerate(self._cached) if flag} == set(cached), "other pages are cached"
        assert sum(owners[page] == 1 for page in cached) == self.spare_pages, "spare pages were miscounted"
