"""The distribution of the next token, blended from every context in the tries that matches.

A row's next token is predicted from every known window that ends at it, longest first, over up to three tries (the
sequence's own, the tenant's, a shared corpus). A window with C occurrences that no longer window counted, and escape
weight e, takes C / (C + e) of the probability that is still open and distributes it by relative frequency; shorter
windows get the rest. This is interpolated prediction by partial matching (Cleary and
Witten 1984; Witten and Bell 1991) with several sources as in SuffixDecoding (arXiv 2411.04975), and it makes scores
comparable across depths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_service.compiling import Numbers, Reals, compiled, inlined
from draft_service.ngram.arrays import (
    COUNT,
    FIRST_CHILD,
    HALF_LIFE_LOG2,
    LINK,
    NEVER_LOG2,
    NEXT,
    ROOT,
    TOKEN,
    Rows,
    Slots,
    Tokens,
    decayed,
    match,
    step_down,
)

SOURCES = 3
OWN, TENANT, SHARED = range(SOURCES)
MAX_CANDIDATES = 64
# Siblings read per window, most recent first, which bounds the cost of a wide node.
MAX_SIBLINGS = 8
# Occurrences are counted in this many units, so that halving does not lose rare ones at once.
UNIT = 16
# The window of a candidate or row in one source was not computed.
UNKNOWN = -1
# Columns of `Evidence.trust` before the escape weights.
RECENCY, PRECEDENCE, ESCAPE = range(3)

Trie = tuple[Rows, Slots]
Tries = tuple[Trie, Trie, Trie]


class Evidence(NamedTuple):
    """How much each source is trusted.

    `trust` is [SOURCES, ESCAPE + longest + 1]: occurrences that the most recent continuation gets on top, tokens by
    which the source's windows count as longer, and from column ESCAPE on the occurrences that the unseen is worth, by
    window length. `spread` is [1 + MAX_SIBLINGS]: by how much that grows with the number of different continuations.
    """

    trust: Reals
    spread: Reals


class Scratch(NamedTuple):
    """Room for one prediction, made once per tree. Unpacked before it is used: numba counts a reference for every array
    that is read from a tuple, which in an inner loop costs more than the loop."""

    # [4 * SOURCES]: window nodes, their lengths, the counts of the windows met last, and the node of a window that was
    # not met: UNKNOWN, or ROOT for a trie that holds nothing.
    state: Numbers
    places: Numbers  # [MAX_SIBLINGS] of siblings among the candidates
    fresh: Reals  # [MAX_SIBLINGS] occurrences of siblings that no longer window counted
    # [MAX_CANDIDATES, 1 + 2 * SOURCES], the result: token, then nodes and lengths of the windows that end at it.
    candidates: Numbers
    # [MAX_CANDIDATES, 1 + SOURCES], the result: probability, then occurrences that were counted already.
    weights: Reals


@compiled
def longest_match(trust: Reals) -> int:
    """Tokens of the longest context, by `Evidence.trust`."""
    return len(trust[0]) - ESCAPE - 1


@compiled
def make_scratch() -> Scratch:
    """Scratch of the right sizes."""
    return Scratch(
        np.full(4 * SOURCES, UNKNOWN, np.int32),
        np.empty(MAX_SIBLINGS, np.int32),
        np.empty(MAX_SIBLINGS, np.float64),
        np.empty((MAX_CANDIDATES, 1 + 2 * SOURCES), np.int32),
        np.empty((MAX_CANDIDATES, 1 + SOURCES), np.float64),
    )


@inlined
def _place_of(token: int, known: int, state: Numbers, candidates: Numbers, weights: Reals) -> int:
    """The candidate's place, entered at the end when new; the caller sees that from the place. -1 when full."""
    for place in range(known):
        if candidates[place, 0] == token:
            return place
    if known == MAX_CANDIDATES:
        return -1
    candidates[known, 0], weights[known, 0] = token, 0.0
    for i in range(SOURCES):
        candidates[known, 1 + i], candidates[known, 1 + SOURCES + i] = state[3 * SOURCES + i], 0
        weights[known, 1 + i] = 0.0
    return known


@inlined
def _gather(
    rows: Rows,
    node: int,
    length: int,
    source: int,
    half_life_log2: int,
    max_match: int,
    state: Numbers,
    places: Numbers,
    fresh: Reals,
    candidates: Numbers,
    weights: Reals,
    known: int,
) -> tuple[int, int, float, float]:
    """Take in the children of a window, most recent first, each with what it adds to what longer windows counted.

    The sequence's own tokens are in its tenant's trie too, so its own occurrences are subtracted from the tenant's.
    Returns siblings found, candidates known then, fresh occurrences found, and those of all children.
    """
    found, total, seen = 0, 0.0, 0.0
    child = rows[node, FIRST_CHILD]
    while child != 0 and found < MAX_SIBLINGS:
        place = _place_of(rows[child, TOKEN], known, state, candidates, weights)
        if place < 0:
            break
        known = max(known, place + 1)
        if candidates[place, 1 + source] == UNKNOWN:
            # A context has at most max_match tokens; the link of the longer window is the context.
            candidates[place, 1 + source] = child if length < max_match else rows[child, LINK]
            candidates[place, 1 + SOURCES + source] = min(length + 1, max_match)
        weight = decayed(rows, child, half_life_log2) / UNIT
        before = weights[place, 1 + source]
        if source == TENANT:
            before = max(before, weights[place, 1 + OWN])
        weights[place, 1 + source] = weight
        places[found], fresh[found] = place, max(0.0, weight - before)
        total += fresh[found]
        seen += weight
        found += 1
        child = rows[child, NEXT]
    # Of siblings that were not read, only the sum is known.
    unseen = 0.0 if child == 0 else max(0.0, decayed(rows, node, half_life_log2) / UNIT - seen)
    return found, known, total, total + unseen


@inlined
def _share_out(
    mass: float,
    total: float,
    found: int,
    recency: float,
    places: Numbers,
    fresh: Reals,
    weights: Reals,
) -> None:
    """Add `mass` to the candidates among the siblings, in proportion to their fresh occurrences."""
    if fresh[0] > 0.0:
        fresh[0] += recency
        total += recency
    each = mass / total
    for i in range(found):
        weights[places[i], 0] += fresh[i] * each


@inlined
def _longest(state: Numbers, trust: Reals) -> int:
    """The source whose window is longest, or -1 when none is left."""
    source, longest = -1, -1.0
    for i in range(SOURCES):
        length = state[SOURCES + i]
        if length > 0 and length + trust[i, PRECEDENCE] > longest:
            source, longest = i, length + trust[i, PRECEDENCE]
    return source


@compiled
def predict(
    rows_of: tuple[Rows, Rows, Rows], states: Numbers, row: int, evidence: Evidence, floor: float, scratch: Scratch
) -> int:
    """The distribution of the next token after `row`, as far as it is known, into `candidates` and `weights`. Returns
    how many candidates there are; their probabilities sum to less than 1.

    Args:
        states: [rows, 2 * SOURCES], per source the longest known window that ends at a row, and its length.
        floor: shorter windows are not read once less probability than this is open.
    """
    own, tenant, shared = rows_of
    trust, spread = evidence
    state, places, fresh, candidates, weights = scratch
    for i in range(SOURCES):
        state[i], state[SOURCES + i], state[2 * SOURCES + i] = states[row, i], states[row, SOURCES + i], -1
    open_mass, known = 1.0, 0
    while open_mass > floor:
        source = _longest(state, trust)
        if source < 0:
            break
        rows = own if source == OWN else tenant if source == TENANT else shared
        node, length = state[source], state[SOURCES + source]
        # As many occurrences as the longer window had are the same ones.
        if rows[node, COUNT] != state[2 * SOURCES + source]:
            state[2 * SOURCES + source] = rows[node, COUNT]
            half_life = HALF_LIFE_LOG2 if source == TENANT else NEVER_LOG2
            longest = longest_match(trust)
            found, known, new, total = _gather(
                rows, node, length, source, half_life, longest, state, places, fresh, candidates, weights, known
            )
            if total > 0.0:
                escape = trust[source, ESCAPE + length] * spread[found]
                each = open_mass / (total + escape)
                if new > 0.0:
                    _share_out(each * new, new, found, trust[source, RECENCY], places, fresh, weights)
                open_mass = each * escape
        state[source] = rows[node, LINK]
        state[SOURCES + source] = length - 1
    return known


@compiled
def start_states(tries: Tries, context: Tokens, states: Numbers, state: Numbers, longest: int) -> None:
    """Find the windows that end at the root, row 0. states: [rows, 2 * SOURCES]; state: see `Scratch`."""
    for i in range(SOURCES):
        states[0, i], states[0, SOURCES + i] = ROOT, 0
        if tries[i][0][ROOT, FIRST_CHILD] == 0:
            state[3 * SOURCES + i] = ROOT
        else:
            states[0, i], states[0, SOURCES + i] = match(tries[i][0], tries[i][1], context, longest)


@compiled
def resolve_states(tries: Tries, states: Numbers, row: int, parent: int, token: int, longest: int) -> None:
    """Find the windows that end at `row`, if they are unknown, from those of its parent."""
    for i in range(SOURCES):
        if states[row, i] == UNKNOWN:
            states[row, i], states[row, SOURCES + i] = step_down(
                tries[i][0], tries[i][1], states[parent, i], states[parent, SOURCES + i], token, longest
            )
