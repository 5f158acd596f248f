"""Tries of open sequences' own tokens, bounded together over all sequences."""

from __future__ import annotations

from draft_service.ngram.arrays import NEVER_LOG2
from draft_service.ngram.batch import ROOM
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.trie import NgramTrie


class OwnRows:
    """Counts the rows of own tries. A trie that would exceed the bound evicts its least useful rows instead."""

    def __init__(self, config: TrieConfig) -> None:
        self._depth = config.depth
        self._capacity = config.own_capacity
        self._most = 2 * config.own_tokens * config.depth
        # Pieces of fresh tokens that any trie has room for, even past the bound: 100 KB at the default depth.
        self._least = 4 * ROOM * config.depth
        self.taken = 0

    def made(self, tokens: int) -> NgramTrie:
        """A trie with room for `tokens`, as far as the bound allows. `grew` counts it once it is filled."""
        return NgramTrie(self._depth, self._allowed(0), NEVER_LOG2, first_rows=tokens * self._depth)

    def left(self, trie: NgramTrie) -> None:
        self.taken -= len(trie.rows)

    def bound(self, trie: NgramTrie) -> None:
        """Set the capacity of a trie that is about to grow."""
        trie.capacity = max(len(trie.rows), self._allowed(len(trie.rows)))

    def grew(self, trie: NgramTrie, rows_before: int = 0) -> None:
        """Count the rows of a trie that has grown, or is in use now."""
        self.taken += len(trie.rows) - rows_before

    def _allowed(self, rows: int) -> int:
        return max(self._least, min(self._most, rows + self._capacity - self.taken))
