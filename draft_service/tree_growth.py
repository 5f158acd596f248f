"""From what tries know to a token tree: blend the contexts that match, then grow the best nodes first.

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
from draft_service.noise import exponential
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
    min_match: int
    max_match: int
    recent_first: bool


class Shape(NamedTuple):
    """What the tree may be, and how its candidates race. `seed` and `position` are uint64."""

    nodes: int
    depth: int
    breadth: int
    floor: float
    coupled: bool
    # Exponent on probabilities (1 / temperature), and how much the race is trusted over not knowing the target's law.
    power: float
    sharpness: float
    seed: np.uint64
    position: np.uint64


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
def _share_out(mass: float, total: float, found: int, recency: float, recent_first: bool, scratch: Scratch, known: int) -> int:
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
            spoken = open_mass * total / (total + evidence.escape[source, length[source]])
            known = _share_out(spoken, total, found, evidence.recency[source], evidence.recent_first, scratch, known)
            open_mass -= spoken
        node[source] = rows[node[source], LINK]
        length[source] -= 1
    return known


@compiled
def _race(known: int, shape: Shape, position: np.uint64, scratch: Scratch) -> None:
    """Turn probabilities into chances of winning the shared race, given its noise.

    Token x has the weight (p(x)**power / E(x))**sharpness; what is not a candidate races with its expected noise.
    """
    probs = scratch.probs
    rest = 1.0
    for i in range(known):
        rest -= probs[i]
    total = max(rest, 1e-3) ** (shape.power * shape.sharpness)
    for i in range(known):
        noise = exponential(shape.seed, position, np.uint64(scratch.candidates[i]))
        probs[i] = (probs[i] ** shape.power / noise) ** shape.sharpness
        total += probs[i]
    for i in range(known):
        probs[i] /= total


@compiled
def _sink(worth: Reals, items: Numbers, place: int) -> None:
    """Restore the heap (largest first) upward from its new last entry."""
    while place > 0:
        above = (place - 1) >> 1
        if worth[items[above]] >= worth[items[place]]:
            return
        items[above], items[place] = items[place], items[above]
        place = above


@compiled
def _pop(worth: Reals, items: Numbers, size: int) -> int:
    """Take the most worthy item; `size` counts items before."""
    top = items[0]
    items[0] = items[size - 1]
    size -= 1
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            return top
        if child + 1 < size and worth[items[child + 1]] > worth[items[child]]:
            child += 1
        if worth[items[place]] >= worth[items[child]]:
            return top
        items[place], items[child] = items[child], items[place]
        place = child


@compiled
def _best(scratch: Scratch, known: int) -> int:
    """The index of the most probable candidate left, or -1."""
    best, prob = -1, 0.0
    for i in range(known):
        if scratch.probs[i] > prob:
            best, prob = i, scratch.probs[i]
    return best


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


@compiled
def grow(
    tries: Tries, context: Tokens, evidence: Evidence, shape: Shape, tokens: Numbers, parents: Numbers, scores: Reals
) -> int:
    """Grow a tree, the most worthy node first: worth is the product of scores along a node's path.

    Args:
        context: the sequence's last tokens, the root last.
        tokens, parents, scores: [1 + shape.nodes], filled; row 0, the root, is left to the caller.

    Returns:
        Rows, the root among them. Parents stand before children, and worth falls from row to row.
    """
    scratch, longest = make_scratch(), evidence.max_match
    states = np.empty((shape.nodes + 1, SOURCES), np.int32)
    lengths = np.empty((shape.nodes + 1, SOURCES), np.int32)
    depths = np.zeros(shape.nodes + 1, np.int32)
    room = (shape.nodes + 1) * shape.breadth + 1
    worth, items, score = np.empty(room), np.empty(room, np.int32), np.empty(room)
    item_token, item_parent = np.empty(room, np.int32), np.empty(room, np.int32)
    worth[0], items[0], size, made, row = 1.0, 0, 1, 1, 0
    while size > 0:
        item = _pop(worth, items, size)
        size -= 1
        if item == 0:
            start_states(tries, context, states, lengths, longest)
        else:
            tokens[row], parents[row], scores[row] = item_token[item], item_parent[item], score[item]
            depths[row] = depths[parents[row]] + 1
        row += 1
        if row > shape.nodes:
            break
        here = row - 1
        if depths[here] >= shape.depth:
            continue
        if here > 0:
            follow(tries, states, lengths, here, parents[here], tokens[here], longest)
        known = predict(tries, states[here], lengths[here], evidence, scratch)
        if shape.coupled:
            _race(known, shape, shape.position + np.uint64(depths[here]), scratch)
        for _ in range(shape.breadth):
            best = _best(scratch, known)
            if best < 0 or worth[item] * scratch.probs[best] < shape.floor:
                break
            item_token[made], item_parent[made] = scratch.candidates[best], here
            score[made] = min(scratch.probs[best], 1.0)
            worth[made] = worth[item] * score[made]
            items[size] = made
            _sink(worth, items, size)
            scratch.probs[best] = 0.0
            made += 1
            size += 1
    return row
