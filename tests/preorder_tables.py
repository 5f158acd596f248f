"""Node tables by the definition of their layout: what whoever writes one is held against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tree_kernels.node_table.layout import NODES, TABLE


def preorder(tokens: Sequence[int], parents: Sequence[int], costs: Sequence[int], base: int) -> NDArray[np.int32]:
    """A tree as a table.

    Args:
        tokens: [n] of its nodes, the root first and siblings' different.
        parents: [n], parents[i] < i; the root's is not looked at.
        costs: [n] of paths from the root, rising along every edge.
        base: tokens of the sequence up to the root, with it.

    Returns:
        [TABLE] int32; what lies behind the nodes means nothing.
    """
    count = len(tokens)
    children: list[list[int]] = [[] for _ in tokens]
    for i in range(1, count):
        children[parents[i]].append(i)
    table = np.zeros(TABLE, dtype=np.int32)
    table[:2] = base, count
    rows = table[2:].reshape(5, NODES)
    waiting, place = [(0, 0, 0)] if count else [], 0
    while waiting:
        node, above, depth = waiting.pop()
        rows[:, place] = tokens[node], above, place + 1, depth, costs[node]
        waiting += [(child, place, depth + 1) for child in reversed(children[node])]
        place += 1
    for i in range(count - 1, 0, -1):
        rows[2, rows[1, i]] = max(rows[2, rows[1, i]], rows[2, i])
    return table
