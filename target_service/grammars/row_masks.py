"""Masks of the rows of many trees, computed by several threads at once: one after the other they took the host longer
than a pass takes the device."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.compiling import compiled

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Ints = NDArray[np.int32]
# Threads that compute masks. Chosen: a mask takes 10 to 100 us, and a step some hundred of them.
_MOST_THREADS = 16
# Masks from which on waking threads pays: on busy processors that takes longer than some masks. Chosen.
_WORTH_THREADS = 24
# Rows of each chain whose masks several threads compute first, and up to which row next, as long as all before took no
# longer than so many seconds. What takes long is found so before the long rest of a chain is begun. Chosen: chains of
# many sequences are no longer, and passes take twice as long.
_FIRST_ROWS, _UNHURRIED = (4, 16), 4e-3
# A path of expected text ends where more tokens than these may come. Chosen: ten digits and what may follow them are
# still listed.
MOST_CHILDREN = 16


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
        most_seconds: after which no further mask is begun, if masks may be late.
        late: whether some masks were not computed for that reason.
    """

    tree: TreeRows
    chains: list[RowChain]
    seconds: float = 0.0
    most_seconds: float = inf
    late: bool = False

    @classmethod
    def of(cls, matcher: LLMatcher, tree: TreeRows) -> MaskedRows:
        """Cut a tree into chains. Copies of the matcher read them: a copy takes a microsecond, and what it meets stays
        its own."""
        if len(tree.token_ids) == 1:
            return cls(tree, [RowChain(matcher.deep_copy(), [0], [])])
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


class ReachedRows(NamedTuple):
    """Rows of trees, one behind the other.

    Attributes:
        places: [rows] where the mask of each row is; 0 for rows that no walk reaches, as their grammars forbid them.
        words: [rows] words of the mask that allow any token, at most one more than `MOST_CHILDREN`; 0 where no mask
            was computed, and -1 for rows that no walk reaches.
    """

    places: Ints
    words: Ints


def compute_masks(trees: Sequence[MaskedRows], room: Ints, *, timed: bool) -> tuple[ReachedRows, int]:
    """Write the masks of trees to `room` [1 + rows, words] from its second place on; in the first stands the mask that
    allows the end tokens alone. Returns the rows, and the first place behind the masks. A matcher that has met a limit
    is in error. `timed`: each tree by one thread alone, however many they are."""
    chains = [chain for tree in trees for chain in tree.chains]
    count = sum([len(chain.rows) for chain in chains])
    found = room[1 : 1 + count]
    # Nothing is computed where a grammar ends.
    found.fill(0)
    if count >= _WORTH_THREADS and not timed:
        _compute_at_once(trees, found)
    elif count < _WORTH_THREADS:
        for job in _jobs(trees, found):
            _compute_in_turn(*job)
    else:
        list(_threads().map(_compute_in_turn, *zip(*_jobs(trees, found), strict=True)))
    return _reached(trees, room), 1 + count


def _jobs(trees: Sequence[MaskedRows], found: Ints) -> list[tuple[MaskedRows, Ints]]:
    """Each tree with its part of the masks."""
    first, jobs = 0, list[tuple[MaskedRows, Ints]]()
    for tree in trees:
        own = sum([len(chain.rows) for chain in tree.chains])
        jobs.append((tree, found[first : first + own]))
        first += own
    return jobs


def _reached(trees: Sequence[MaskedRows], room: Ints) -> ReachedRows:
    token_ids, parents, rows, first = list[int](), list[int](), list[int](), 0
    for tree in trees:
        token_ids += tree.tree.token_ids
        parents += [-1, *[first + parent for parent in tree.tree.parents[1:]]]
        rows += [first + row for chain in tree.chains for row in chain.rows]
        first += len(tree.tree.token_ids)
    reached = ReachedRows(np.zeros(first, np.int32), np.zeros(first, np.int32))
    reached.places[rows] = np.arange(1, 1 + len(rows))
    find_reached(np.array(token_ids, np.int32), np.array(parents, np.int32), room, *reached)
    return reached


@compiled
def find_reached(token_ids: Ints, parents: Ints, room: Ints, places: Ints, words: Ints) -> None:
    """Write to `places` and `words` what `ReachedRows` has of rows, each behind its parent; -1 is the parent of a root.
    `places` has those of all masks that were computed."""
    for row in range(len(token_ids)):
        parent, token = parents[row], token_ids[row]
        if parent >= 0:
            word, bit = token >> 5, token & 31
            if words[parent] <= 0 or not (room[places[parent], word] >> bit) & 1 or (room[0, word] >> bit) & 1:
                places[row], words[row] = 0, -1
                continue
        count, place = 0, places[row]
        if place > 0:
            for word in range(room.shape[1]):
                count += room[place, word] != 0
                if count > MOST_CHILDREN:
                    break
        words[row] = count


@cache
def warm_up() -> None:
    """Compile what the first masks would wait for."""
    room, places = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    find_reached(places, places - 1, room, places.copy(), places.copy())
    list_tokens(room[0], places)


@compiled
def list_tokens(words: Ints, tokens: Ints) -> int:
    """Write the tokens that a mask allows to `tokens`. Returns how many there are, at most one more than fit."""
    count = 0
    for place in range(len(words)):
        if words[place] != 0:
            for bit in range(32):
                if (words[place] >> bit) & 1:
                    if count == len(tokens):
                        return count + 1
                    tokens[count] = 32 * place + bit
                    count += 1
    return count


def _compute_in_turn(tree: MaskedRows, found: Ints, read: int = 0, done: int = 0) -> None:
    """Write the masks of a tree's chains, one behind the other, and note how long that took. Those of the first `done`
    rows of each chain are there, and its matcher has read the tokens up to row `read`."""
    begin, place = time.thread_time(), 0
    for chain in tree.chains:
        first, at = place, read
        place += len(chain.rows)
        for row in range(done, len(chain.rows)):
            if first + row and time.thread_time() - begin > tree.most_seconds:
                tree.late = True
                break
            tokens = chain.token_ids[at:row]
            if tokens and chain.matcher.try_consume_tokens(tokens) < len(tokens):
                break
            at = row
            mask = found[first + row]
            chain.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    tree.seconds = time.thread_time() - begin


def _compute_at_once(trees: Sequence[MaskedRows], found: Ints) -> None:
    """The same by several threads, which take turns in a tree. Once that takes long, what is left is computed tree by
    tree, so that those which take long are found."""
    chains, place = list[tuple[RowChain, int]](), 0
    for chain in [chain for tree in trees for chain in tree.chains]:
        chains.append((chain, place))
        place += len(chain.rows)
    begin, read, done, longest = time.perf_counter(), 0, 0, max([len(chain.rows) for chain, _ in chains])
    while done < longest:
        if done and time.perf_counter() - begin > _UNHURRIED:
            jobs = [(*job, read, done) for job in _jobs(trees, found)]
            list(_threads().map(_compute_in_turn, *zip(*jobs, strict=True)))
            return
        until = next((count for count in _FIRST_ROWS if count > done), longest)
        chains = [(chain, place) for chain, place in chains if _read_up_to(chain, read, done)]
        _compute_parts(
            [(chain.matcher, place + done, chain.token_ids[done : until - 1]) for chain, place in chains], found
        )
        read, done = done, until


def _read_up_to(chain: RowChain, read: int, row: int) -> bool:
    """Have a chain's matcher, which has read the tokens up to row `read`, read those up to another one. False where the
    chain has no such row, or they are forbidden."""
    if row >= len(chain.rows):
        return False
    tokens = chain.token_ids[read:row]
    return not tokens or chain.matcher.try_consume_tokens(tokens) == len(tokens)


def _compute_parts(parts: Sequence[tuple[LLMatcher, int, list[int]]], found: Ints) -> None:
    """Write masks: of each matcher the next one at a place, and behind it those of the rows of its tokens."""
    single = [(matcher, place) for matcher, place, token_ids in parts if not token_ids]
    longer = [part for part in parts if part[2]]
    where = found.ctypes.data, found[0].nbytes, len(found)
    beside = _threads().submit(_executor().unsafe_compute_mask_ptr, single, *where) if single else None
    if longer:
        _executor().unsafe_compute_mask_ptr_with_draft_token(longer, *where)
    if beside is not None:
        beside.result()


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(min(_MOST_THREADS, os.cpu_count() or 1))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="masks")
