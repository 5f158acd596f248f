"""What tries say of the next token: the law blended from every context that matches.

A row's next token is guessed from every known window that ends at it, longest first, over up to three tries (the
sequence's own, the tenant's, a shared corpus). A window seen C times, with escape weight e, speaks for C / (C + e) of
the probability that longer windows left open, and shares it out by relative frequency; the rest passes on to
shorter windows. A window whose total is that of the longer one brings no new evidence and is passed over.
This is interpolated prediction by partial matching (Cleary and Witten 1984; Witten and Bell 1991), with several
sources as in SuffixDecoding (arXiv 2411.04975), and it makes scores comparable across depths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draft_service.compiling import compiled
from draft_service.trie_arrays import FIRST_CHILD, LINK, NEXT, TOKEN, Rows, Slots, Tokens, decayed, match, step_down

SOURCES = 3
MAX_CANDIDATES = 64
# Siblings looked at per window, most recent first, so that a wide node cannot cost more than this.
MAX_SIBLINGS = 32
# Occurrences are counted in this many units, so that halving does not lose rare ones at once.
UNIT = 16
# Probability still open below which shorter windows are not asked.
_OPEN_FLOOR = 0.02
_CANDIDATE_FLOOR = 1e-3

Numbers = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float64]
Trie = tuple[Rows, Slots]
Tries = tuple[Trie, Trie, Trie]


class Evidence(NamedTuple):
    """How much each source is trusted. First axis: own, tenant's, shared."""

    escape: Reals  # [SOURCES, longest + 1] by window length, in occurrences
    recency: Reals  # [SOURCES] occurrences that the most recent continuation gets on top
    precedence: Numbers  # [SOURCES] tokens by which a source's windows count as longer
    half_life_log2: Numbers  # [SOURCES]
    spread: float  # escape grows with this power of the number of different continuations
    min_match: int
    max_match: int
    recent_first: bool


class Scratch(NamedTuple):
    """Room for one prediction, made once per tree."""

    node: Numbers  # [SOURCES]
    length: Numbers  # [SOURCES]
    seen: Reals  # [SOURCES]
    siblings: Numbers  # [MAX_SIBLINGS]
    weights: Reals  # [MAX_SIBLINGS]
    candidates: Numbers  # [MAX_CANDIDATES], the result
    probs: Reals  # [MAX_CANDIDATES], the result


@compiled
def make_scratch() -> Scratch:
    """Scratch of the right sizes."""
    return Scratch(
        np.zeros(SOURCES, np.int32),
        np.zeros(SOURCES, np.int32),
        np.zeros(SOURCES, np.float64),
        np.zeros(MAX_SIBLINGS, np.int32),
        np.zeros(MAX_SIBLINGS, np.float64),
        np.zeros(MAX_CANDIDATES, np.int32),
        np.zeros(MAX_CANDIDATES, np.float64),
    )


@compiled
def _gather(rows: Rows, node: int, half_life_log2: int, scratch: Scratch) -> tuple[int, float]:
    """Children of a node with their occurrences, most recent first. Returns how many, and the sum."""
    tokens, weights = scratch.siblings, scratch.weights
    count, total = 0, 0.0
    child = rows[node, FIRST_CHILD]
    while child != 0 and count < MAX_SIBLINGS:
        weight = decayed(rows, child, half_life_log2) / UNIT
        tokens[count] = rows[child, TOKEN]
        weights[count] = weight
        total += weight
        count += 1
        child = rows[child, NEXT]
    return count, total


@compiled
def _share_out(
    mass: float, total: float, found: int, recency: float, recent_first: bool, scratch: Scratch, known: int
) -> int:
    """Add `mass` to the candidates in proportion to weights. Returns how many candidates are known then."""
    weights, candidates, probs = scratch.weights, scratch.candidates, scratch.probs
    if recent_first:
        total = 2.0 - 2.0 ** (1 - found)
        for i in range(found):
            weights[i] = 2.0**-i
    else:
        weights[0] += recency
        total += recency
    for i in range(found):
        part = mass * weights[i] / total
        if part < _CANDIDATE_FLOOR:
            continue
        token, place = scratch.siblings[i], 0
        while place < known and candidates[place] != token:
            place += 1
        if place < known:
            probs[place] += part
        elif known < MAX_CANDIDATES:
            candidates[known] = token
            probs[known] = part
            known += 1
    return known


@compiled
def predict(tries: Tries, states: Numbers, lengths: Numbers, evidence: Evidence, scratch: Scratch) -> int:
    """The law of the next token after one row, as far as it is known, into `scratch.candidates` and `.probs`.

    Args:
        states, lengths: [SOURCES], the longest known window that ends at the row, and its length.

    Returns:
        How many candidates there are. Their probabilities sum to less than 1.
    """
    node, length, seen = scratch.node, scratch.length, scratch.seen
    node[:], length[:], seen[:] = states, lengths, -1.0
    open_mass, known = 1.0, 0
    while open_mass > _OPEN_FLOOR:
        source, longest = -1, -1
        for i in range(SOURCES):
            if length[i] >= evidence.min_match and length[i] + evidence.precedence[i] > longest:
                source, longest = i, length[i] + evidence.precedence[i]
        if source < 0:
            break
        rows = tries[source][0]
        found, total = _gather(rows, node[source], evidence.half_life_log2[source], scratch)
        if total > 0.0 and total != seen[source]:
            seen[source] = total
            escape = evidence.escape[source, length[source]] * found**evidence.spread
            spoken = open_mass * total / (total + escape)
            known = _share_out(spoken, total, found, evidence.recency[source], evidence.recent_first, scratch, known)
            open_mass -= spoken
        node[source] = rows[node[source], LINK]
        length[source] -= 1
    return known


@compiled
def follow(tries: Tries, states: Numbers, lengths: Numbers, row: int, parent: int, token: int, longest: int) -> None:
    """Find the windows that end at `row`, from those of its parent. states, lengths: [rows, SOURCES]."""
    for i in range(SOURCES):
        states[row, i], lengths[row, i] = step_down(
            tries[i][0], tries[i][1], states[parent, i], lengths[parent, i], token, longest
        )


@compiled
def start_states(tries: Tries, context: Tokens, states: Numbers, lengths: Numbers, longest: int) -> None:
    """Find the windows that end at the root, row 0."""
    for i in range(SOURCES):
        states[0, i], lengths[0, i] = match(tries[i][0], tries[i][1], context, longest)
