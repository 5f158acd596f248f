"""Tries of what open sequences said themselves: made, counted over all sequences, and bounded together."""

from __future__ import annotations

from draft_service.ngram.batch import ROOM
from draft_service.ngram.config import NEVER_LOG2, TrieConfig
from draft_service.ngram.trie import NgramTrie

# Pieces of fresh tokens that any trie has room for, however little is left: 100 KB at the default depth.
_LEAST_PIECES = 4


class OwnRows:
    """Rows that own tries take. One that would take more than is left forgets what is least useful instead."""

    def __init__(self, config: TrieConfig) -> None:
        self._depth = config.depth
        self._capacity = config.own_capacity
        self._most = 2 * config.own_tokens * config.depth
        self._least = _LEAST_PIECES * ROOM * config.depth
        self.taken = 0

    def made(self, tokens: int) -> NgramTrie:
        """A trie with room for so many tokens, if there is any. `entered` counts it, once it was filled."""
        return NgramTrie(self._depth, self._allowed(0), NEVER_LOG2, first_rows=tokens * self._depth)

    def entered(self, trie: NgramTrie) -> None:
        """The trie is in use."""
        self.taken += len(trie.rows)

    def left(self, trie: NgramTrie) -> None:
        """It is not in use any more."""
        self.taken -= len(trie.rows)

    def bound(self, trie: NgramTrie) -> None:
        """Before it takes more: no more than is left."""
        trie.capacity = max(len(trie.rows), self._allowed(len(trie.rows)))

    def grew(self, trie: NgramTrie, rows_before: int) -> None:
        """After it has."""
        self.taken += len(trie.rows) - rows_before

    def _allowed(self, rows: int) -> int:
        return max(self._least, min(self._most, rows + self._capacity - self.taken))
