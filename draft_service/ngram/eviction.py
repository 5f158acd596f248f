"""New arrays for a trie that grows, is cut or is restored, while readers still use the old ones."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from draft_service.compiling import compiled, inlined
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
    Rows,
    Slots,
    place_slot,
)

# Of the histogram that finds where to cut. Chosen.
_BUCKETS = 4096


def slots_for(capacity: int) -> int:
    """Slots of the table for this many rows: a power of two, of which at most 0.7 are used: so probing stays short."""
    return 1 << max(4, math.ceil(math.log2(capacity / 0.7)))


@compiled
def enter_all(rows: Rows, slots: Slots, used: int) -> None:
    """Fill an empty table with the edges of rows 1 to used - 1."""
    for node in range(1, used):
        place_slot(slots, rows[node, PARENT], rows[node, TOKEN], node)


@compiled
def _usefulness(rows: Rows, node: int, half_life_log2: int) -> float:
    """Base-2 logarithm of the count, decayed without steps, so that age orders equal counts."""
    return float(math.log2(max(rows[node, COUNT], 1)) + rows[node, SEEN] / 2.0**half_life_log2)


@compiled
def _threshold(rows: Rows, used: int, target: int, half_life_log2: int) -> float:
    """The usefulness below which nodes are evicted, so that about `target` rows stay."""
    low, high = np.inf, -np.inf
    for node in range(1, used):
        value = _usefulness(rows, node, half_life_log2)
        low, high = min(low, value), max(high, value)
    histogram = np.zeros(_BUCKETS, dtype=np.int64)
    width = max((high - low) / _BUCKETS, 1e-9)
    for node in range(1, used):
        value = _usefulness(rows, node, half_life_log2)
        histogram[min(int((value - low) / width), _BUCKETS - 1)] += 1
    kept = 0
    for bucket in range(_BUCKETS - 1, -1, -1):
        kept += histogram[bucket]
        if kept > target:
            return low + width * (bucket + 1)
    return low


@compiled
def survivors(rows: Rows, used: int, target: int, half_life_log2: int) -> tuple[npt.NDArray[np.int32], int]:
    """New numbers of the rows that stay, 0 for evicted rows, and how many stay, at most `target`.

    A row stays together with its parent and its link, which stand before it; so the most useful rows stay, and no
    remaining row points at an evicted one.
    """
    numbers = np.zeros(used, dtype=np.int32)
    threshold = _threshold(rows, used, target, half_life_log2)
    for node in range(used - 1, 0, -1):
        if numbers[node] != 0 or _usefulness(rows, node, half_life_log2) >= threshold:
            numbers[node] = 1
            numbers[rows[node, PARENT]] = 1
            numbers[rows[node, LINK]] = 1
    kept = 1
    for node in range(1, used):
        # Rows past the target are evicted too: no later row stays, so nothing points at them.
        if numbers[node] != 0 and kept < target:
            numbers[node] = kept
            kept += 1
        else:
            numbers[node] = 0
    numbers[ROOT] = ROOT
    return numbers, kept


@inlined
def _first_kept(rows: Rows, numbers: npt.NDArray[np.int32], node: int) -> int:
    """The new number of the first sibling from `node` on that stays; 0 for none."""
    while numbers[node] == 0 and node != 0:
        node = rows[node, NEXT]
    return int(numbers[node])


@compiled
def copy_survivors(rows: Rows, used: int, numbers: npt.NDArray[np.int32], fresh: Rows, slots: Slots) -> None:
    """Copy the rows that stay into `fresh` and `slots`, both zero, keeping siblings in order of recency."""
    for node in range(used):
        number = numbers[node]
        if number == 0 and node != ROOT:
            continue
        fresh[number, TOKEN] = rows[node, TOKEN]
        fresh[number, PARENT] = numbers[rows[node, PARENT]]
        fresh[number, LINK] = numbers[rows[node, LINK]]
        fresh[number, COUNT] = rows[node, COUNT]
        fresh[number, SEEN] = rows[node, SEEN]
        if node != ROOT:
            place_slot(slots, fresh[number, PARENT], fresh[number, TOKEN], number)
        fresh[number, FIRST_CHILD] = _first_kept(rows, numbers, rows[node, FIRST_CHILD])
        following = fresh[number, NEXT] = _first_kept(rows, numbers, rows[node, NEXT])
        if following != 0:
            fresh[following, PREVIOUS] = number


@compiled
def sound(rows: Rows) -> bool:
    """Whether rows from outside can be used safely: pointers in range, sibling lists complete, every node in one."""
    used, children = len(rows), 0
    if rows[ROOT, NEXT] != 0 or rows[ROOT, PREVIOUS] != 0 or rows[ROOT, PARENT] != 0 or rows[ROOT, LINK] != 0:
        return False
    for node in range(used):
        if node != ROOT and not (0 <= rows[node, PARENT] < node and 0 <= rows[node, LINK] < node):
            return False
        if rows[node, COUNT] < 0 or not 0 <= rows[node, SEEN] <= rows[ROOT, SEEN] or rows[node, TOKEN] < 0:
            return False
        before, child = 0, rows[node, FIRST_CHILD]
        while child != 0:
            # A child stands after its parent, and occurs once: in that parent's list, after its PREVIOUS.
            if not node < child < used or rows[child, PARENT] != node or rows[child, PREVIOUS] != before:
                return False
            children += 1
            before, child = child, rows[child, NEXT]
    return children == used - 1
