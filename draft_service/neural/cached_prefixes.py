"""Keys and values of texts that a drafter has read, for other sequences that begin with them.

A drafter that read what the target's own cache spared the target would be the slower of the two, and one that skipped
it would guess worse. So it keeps pages as the target does (`tree_kernels.prefix_tree`): if both find a text, neither
reads it, and if only one does, the other reads it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.neural.paged_cache import DraftCache
from tree_kernels.prefix_tree import PrefixNode, PrefixTree


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One sequence's part of the cache, and its `DraftSequence.state`: `entries` committed rows. The last one is the
    root's; its output is in `RootStates`."""

    pages: list[int] = field(default_factory=list)
    slot: int = -1  # in `RootStates`; -1 before it has pages of its own
    entries: int = 0
    position: int = 0  # of the root's children, as the network counts positions
    # The last page that is in the tree of prefixes, and how many of the sequence's first pages are.
    prefix: PrefixNode | None = None
    prefix_pages: int = 0

    @property
    def final_rows(self) -> int:
        """Rows, from the text's first token on without a gap, that no later pass writes."""
        return self.entries if self.position == self.entries else 0


class CachedPrefixes:
    """The pages of texts by their owners, who share nothing with each other."""

    def __init__(self, cache: DraftCache, successors: int) -> None:
        """`successors`: tokens behind a row's own that the row depends on."""
        self._cache = cache
        self._tree = PrefixTree(cache, successors)
        # Rows that sequences began behind.
        self.hit_rows = 0

    def resume(self, entry: CacheEntry, owner: str, token_ids: Sequence[int], most: int) -> None:
        """Begin an empty entry behind at most `most` rows of the text that are there already."""
        nodes = self._tree.match(owner, token_ids, most)
        if nodes:
            pages = [node.page for node in nodes]
            self._cache.share(pages)
            self._tree.use(nodes[-1])
            entry.pages.extend(pages)
            entry.prefix, entry.prefix_pages = nodes[-1], len(pages)
            entry.entries = entry.position = len(pages) * self._cache.page_size
            self.hit_rows += entry.entries

    def publish(self, entry: CacheEntry, owner: str, token_ids: Sequence[int]) -> None:
        """Let sequences of the same owner share the entry's full pages."""
        size = self._cache.page_size
        while entry.prefix_pages < entry.final_rows // size:
            place = entry.prefix_pages
            start, own = place * size, entry.pages[place]
            node = self._tree.insert(owner, entry.prefix, token_ids[start : start + self._tree.key_tokens], own)
            if node.page != own:
                # Another sequence read the same text at the same time. One page stays, so that what holds a node
                # holds all above it.
                self._cache.share([node.page])
                self._cache.release([own])
                entry.pages[place] = node.page
            entry.prefix, entry.prefix_pages = node, place + 1

    def leave(self, entry: CacheEntry) -> None:
        """The entry's pages are about to be released: they were used now."""
        if entry.prefix is not None:
            self._tree.use(entry.prefix)
        entry.prefix, entry.prefix_pages = None, 0

    def pages(self) -> list[int]:
        """All kept pages."""
        return self._tree.pages()
