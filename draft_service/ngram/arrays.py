"""The n-gram trie as flat arrays, and the loops that read and write them.

A trie of depth D holds every window of at most D tokens that was inserted. Node 0 is the root. One node is one row
of 8 int32 (half a cache line, so that a visit costs one miss):

    TOKEN       the token on the edge from PARENT
    PARENT      smaller than the node's own number, as is LINK: one downward pass closes a set under both
    FIRST_CHILD most recently seen child, 0 for none
    NEXT        the sibling seen before this one, 0 for none
    PREVIOUS    the sibling seen after this one, 0 for the first
    COUNT       occurrences times their weight, halved for every half-life since SEEN
    LINK        the node of the same window without its first token
    SEEN        the trie's clock at the last occurrence; in the root, the clock itself: tokens inserted so far, set back
                by whole half-lives before it overflows

Children are found through an open-addressing table of int64: 32 bits of hash, 32 bits of node, 0 for empty.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draft_service.compiling import compiled

Rows = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

TOKEN, PARENT, FIRST_CHILD, NEXT, PREVIOUS, COUNT, LINK, SEEN = range(8)
COLUMNS = 8
ROOT = 0
MAX_COUNT = 1 << 30
# The clock is set back before it exceeds this; one more piece of tokens still fits int32.
MAX_CLOCK = (1 << 31) - (1 << 20)
# Of the tokens inserted until an old count is halved: of a tenant's trie, and of tries that do not forget with age, a
# sequence's own and a shared corpus. A sequence ends long before, and the clock has 32 bits.
HALF_LIFE_LOG2, NEVER_LOG2 = 20, 30
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


@compiled
def hash_of(parent: int, token: int) -> np.uint64:
    """A 64-bit hash of an edge: the upper half chooses the slot, the lower half is stored as its mark."""
    mixed = ((np.uint64(parent) << _SHIFT) | np.uint64(token)) * _MIX
    return (mixed ^ (mixed >> np.uint64(29))) * _MIX


@compiled
def find(rows: Rows, slots: Slots, parent: int, token: int) -> int:
    """The child of `parent` by `token`, or 0."""
    mixed = hash_of(parent, token)
    mask = len(slots) - 1
    place = np.int64(mixed >> _SHIFT) & mask
    mark = np.int64(mixed << _SHIFT)
    while slots[place] != 0:
        entry = slots[place]
        if ((entry ^ mark) >> 32) == 0:
            node = entry & 0xFFFFFFFF
            if rows[node, PARENT] == parent and rows[node, TOKEN] == token:
                return int(node)
        place = (place + 1) & mask
    return 0


@compiled
def place_slot(slots: Slots, parent: int, token: int, node: int) -> None:
    """Enter an edge that is not in the table."""
    mixed = hash_of(parent, token)
    mask = len(slots) - 1
    place = np.int64(mixed >> _SHIFT) & mask
    while slots[place] != 0:
        place = (place + 1) & mask
    slots[place] = np.int64(mixed << _SHIFT) | np.int64(node)


@compiled
def decayed(rows: Rows, node: int, half_life_log2: int) -> int:
    """The node's count as of the trie's clock."""
    age = (rows[ROOT, SEEN] >> half_life_log2) - (rows[node, SEEN] >> half_life_log2)
    return int(rows[node, COUNT] >> min(age, 31))


@compiled
def set_clock_back(rows: Rows, used: int, half_life_log2: int) -> None:
    """Set the clock, and every time that was taken from it, back by about half, in whole half-lives.

    Decayed counts do not change: a node last seen before the new start of the clock is halved for its age up to there.
    With half-lives of at most 2**30 tokens there is at least one to go back by.
    """
    back = np.int64(max(1, (rows[ROOT, SEEN] >> half_life_log2) // 2)) << half_life_log2
    for node in range(used):
        seen = np.int64(rows[node, SEEN])
        if seen < back:
            age = (back >> half_life_log2) - (seen >> half_life_log2)
            rows[node, COUNT] = rows[node, COUNT] >> min(age, 31)
            rows[node, SEEN] = 0
        else:
            rows[node, SEEN] = seen - back


@compiled
def step_down(rows: Rows, slots: Slots, node: int, depth: int, token: int, longest: int) -> tuple[int, int]:
    """The longest window, of at most `longest` tokens, that ends the window of `node` plus `token`. Returns the node
    and its depth; (0, 0) when even the token alone is unknown."""
    while True:
        if depth < longest:
            child = find(rows, slots, node, token)
            if child != 0:
                return child, depth + 1
        if node == ROOT:
            return ROOT, 0
        node = rows[node, LINK]
        depth -= 1


@compiled
def match(rows: Rows, slots: Slots, context: Tokens, longest: int) -> tuple[int, int]:
    """The longest known window, of at most `longest` tokens, that ends `context`. Returns node and depth."""
    node, depth = ROOT, 0
    for i in range(max(0, len(context) - longest), len(context)):
        node, depth = step_down(rows, slots, node, depth, context[i], longest)
    return node, depth


@compiled
def _to_front(rows: Rows, parent: int, node: int) -> None:
    first = rows[parent, FIRST_CHILD]
    if first == node:
        return
    before, after = rows[node, PREVIOUS], rows[node, NEXT]
    if before != 0:
        rows[before, NEXT] = after
        if after != 0:
            rows[after, PREVIOUS] = before
    rows[node, PREVIOUS] = 0
    rows[node, NEXT] = first
    if first != 0:
        rows[first, PREVIOUS] = node
    rows[parent, FIRST_CHILD] = node


@compiled
def insert(
    rows: Rows, slots: Slots, used: int, context: Tokens, tokens: Tokens, depth: int, weight: int, half_life_log2: int
) -> int:
    """Count every window that ends in `tokens`, where `context` came before them and was inserted already. `used` rows
    are taken; at most `depth` more are taken per token, which must fit. Returns rows used after."""
    active = np.zeros(depth + 1, dtype=np.int32)
    node, length = match(rows, slots, context, depth - 1)
    for i in range(length, 0, -1):
        active[i] = node
        node = rows[node, LINK]
    for token in tokens:
        rows[ROOT, SEEN] += 1
        rows[ROOT, COUNT] = min(rows[ROOT, COUNT] + weight, MAX_COUNT)
        now = rows[ROOT, SEEN]
        parent, shorter = ROOT, ROOT
        for i in range(min(length, depth - 1) + 1):
            following = active[i + 1]
            child = find(rows, slots, parent, token)
            if child == 0:
                child = used
                used += 1
                rows[child, TOKEN] = token
                rows[child, PARENT] = parent
                rows[child, LINK] = shorter
                place_slot(slots, parent, token, child)
                count = 0
            else:
                count = decayed(rows, child, half_life_log2)
            rows[child, COUNT] = min(count + weight, MAX_COUNT)
            rows[child, SEEN] = now
            _to_front(rows, parent, child)
            active[i + 1] = child
            parent, shorter = following, child
        length = min(length + 1, depth)
    return used
