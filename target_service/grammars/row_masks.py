"""Masks of the rows of many trees, computed by several threads at once: one after the other they took the host longer
than a pass takes the device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# Threads that compute masks. Chosen: a mask takes some 10 us, and a step some hundred of them.
_MOST_THREADS = 8
# Masks from which on waking threads pays: on busy processors that takes longer than some masks. Chosen.
_WORTH_THREADS = 64


class TreeRows(NamedTuple):
    """Rows of a tree as a device lays them out: siblings may have the same token."""

    token_ids: Sequence[int]
    parents: Sequence[int]  # each below its row; that of the first, the root, is 0


class RowChain(NamedTuple):
    """Rows of a tree, each the parent of the next, and a grammar that has read the tokens up to the first of them."""

    matcher: LLMatcher
    rows: list[int]
    token_ids: list[int]  # of the rows behind the first


@dataclass(slots=True, eq=False)
class MaskedRows:
    """The rows of a tree whose masks are to be computed, by a `matcher` that has read the tokens up to its root.

    Attributes:
        tree: the rows.
        chains: all of them but those behind text that the grammar forbids, as far as that was seen.
        seconds: of a processor that its masks took; 0 where several threads computed them.
    """

    tree: TreeRows
    chains: list[RowChain]
    seconds: float = 0.0

    @classmethod
    def of(cls, matcher: LLMatcher, tree: TreeRows) -> MaskedRows:
        """Cut a tree into chains. Copies of the matcher read them: a copy takes a microsecond, and what it meets stays
        its own."""
        children: list[list[int]] = [[] for _ in tree.token_ids]
        for row in range(1, len(tree.token_ids)):
            children[tree.parents[row]].append(row)
        chains, begins = list[RowChain](), [(0, list[int]())]
        while begins:
            row, path = begins.pop()
            own = matcher.deep_copy()
            if own.try_consume_tokens(path) < len(path):
                continue
            rows, token_ids = [row], list[int]()
            while below := children[row]:
                begins += [(other, [*path, *token_ids, tree.token_ids[other]]) for other in below[1:]]
                row = below[0]
                rows.append(row)
                token_ids.append(tree.token_ids[row])
            chains.append(RowChain(own, rows, token_ids))
        return cls(tree, chains)


def compute_masks(trees: Sequence[MaskedRows], words: int, *, timed: bool) -> Iterator[NDArray[np.int32]]:
    """The masks [rows, words] int32 of each tree; zeros where a grammar forbids the row. A matcher that has met a
    limit is in error. `timed`: each tree by itself, however many they are."""
    count = sum([len(chain.rows) for tree in trees for chain in tree.chains])
    found, first = np.zeros((count, words), np.int32), 0
    if count >= _WORTH_THREADS and not timed:
        _compute_at_once([chain for tree in trees for chain in tree.chains], found)
    else:
        for tree in trees:
            begin = time.thread_time()
            first += _compute_in_turn(tree.chains, found[first:])
            tree.seconds = time.thread_time() - begin
    first = 0
    for tree in trees:
        rows = [row for chain in tree.chains for row in chain.rows]
        masks = np.zeros((len(tree.tree.token_ids), words), np.int32)
        masks[rows] = found[first : first + len(rows)]
        first += len(rows)
        yield masks


def _compute_in_turn(chains: Sequence[RowChain], found: NDArray[np.int32]) -> int:
    """Write the masks of chains, one behind the other. Returns how many rows those are."""
    place = 0
    for chain in chains:
        first = place
        place += len(chain.rows)
        for row in range(first, place):
            if row > first and not chain.matcher.try_consume_tokens([chain.token_ids[row - first - 1]]):
                break
            chain.matcher.unsafe_compute_mask_ptr(found[row].ctypes.data, found[row].nbytes)
    return place


def _compute_at_once(chains: Sequence[RowChain], found: NDArray[np.int32]) -> None:
    """The same by several threads."""
    single: list[tuple[LLMatcher, int]] = []
    longer: list[tuple[LLMatcher, int, list[int]]] = []
    place = 0
    for chain in chains:
        if chain.token_ids:
            longer.append((chain.matcher, place, chain.token_ids))
        else:
            single.append((chain.matcher, place))
        place += len(chain.rows)
    where = found.ctypes.data, found[0].nbytes, len(found)
    if single:
        _executor().unsafe_compute_mask_ptr(single, *where)
    if longer:
        _executor().unsafe_compute_mask_ptr_with_draft_token(longer, *where)


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
