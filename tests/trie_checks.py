"""What a trie holds, and whether its arrays are whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draft_service.ngram.arrays import (
    COUNT,
    FIRST_CHILD,
    LINK,
    NEXT,
    PARENT,
    PREVIOUS,
    ROOT,
    SEEN,
    TOKEN,
    decayed,
    find,
    match,
)
from draft_service.ngram.trie import NgramTrie


def count(trie: NgramTrie, window: Sequence[int]) -> int:
    """The decayed count of a window, 0 when unknown."""
    node = ROOT
    for token in window:
        node = int(find(trie.rows, trie.slots, node, token))
        if node == ROOT:
            return 0
    return int(decayed(trie.rows, node, trie.half_life_log2))


def longest_match(trie: NgramTrie, context: Sequence[int], longest: int) -> int:
    """Length of the longest known window, of at most `longest` tokens, that ends `context`."""
    return int(match(trie.rows, trie.slots, np.array(context, dtype=np.int32), longest)[1])


def check_integrity(trie: NgramTrie) -> None:
    """Every pointer, sibling list and table entry is as it must be. O(nodes)."""
    rows = trie.rows[: trie.used]
    number = np.arange(trie.used)
    assert 1 <= trie.used <= len(trie.rows) <= trie.capacity
    assert np.all(rows[1:, PARENT] < number[1:]) and np.all(rows[1:, LINK] < number[1:])
    assert np.all(rows[:, [PARENT, LINK, NEXT, PREVIOUS, FIRST_CHILD]] >= 0)
    assert np.all(rows[:, [NEXT, PREVIOUS, FIRST_CHILD]] < trie.used)
    assert np.all(rows[1:, COUNT] >= 0) and np.all(rows[1:, SEEN] <= rows[ROOT, SEEN])
    assert np.count_nonzero(trie.slots) == trie.used - 1
    children = 0
    for node in range(trie.used):
        previous, child = 0, int(rows[node, FIRST_CHILD])
        while child:
            assert rows[child, PARENT] == node and rows[child, PREVIOUS] == previous
            assert find(trie.rows, trie.slots, node, int(rows[child, TOKEN])) == child
            assert previous == 0 or rows[previous, SEEN] >= rows[child, SEEN]
            _check_link(trie, child)
            children += 1
            previous, child = child, int(rows[child, NEXT])
    assert children == trie.used - 1


def _check_link(trie: NgramTrie, node: int) -> None:
    """A node's link is reached by its own last token from its parent's link."""
    parent, token = int(trie.rows[node, PARENT]), int(trie.rows[node, TOKEN])
    expected = ROOT if parent == ROOT else find(trie.rows, trie.slots, int(trie.rows[parent, LINK]), token)
    assert int(trie.rows[node, LINK]) == expected
