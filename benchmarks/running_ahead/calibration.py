"""How well a drafter's probabilities are calibrated on recorded texts, and corrections that calibrate them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.running_ahead.walk import Chain, Table

Reals = npt.NDArray[np.float64]
# Lower ends of the bins of path probabilities.
BINS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Scores beyond these count as these: log-odds must stay finite.
_LEAST, _MOST = 1e-4, 0.9999
# Of Newton's method; far more than it needs to converge.
_ROUNDS = 30


@dataclass(frozen=True)
class Judged:
    """Nodes whose parent agrees with the text, [n] each: score, depth, and 1 where the node agrees too."""

    scores: Reals
    depths: Reals
    right: Reals


@dataclass(frozen=True, slots=True)
class Correction:
    """Calibrates a score: log-odds become `base + slope * log-odds + deeper * log2(depth)`."""

    base: float = 0.0
    slope: float = 1.0
    deeper: float = 0.0

    def __call__(self, score: float, depth: int) -> float:
        """`depth` is 1 for a child of the root."""
        clipped = min(max(score, _LEAST), _MOST)
        odds = self.base + self.slope * math.log(clipped / (1 - clipped)) + self.deeper * math.log2(depth)
        return 1 / (1 + math.exp(-odds))


def table_of_chain(chain: Chain) -> Table:
    """A looked-up chain as a tree."""
    table, node = Table(), 0
    for place, token in enumerate(chain.tokens):
        node = table.add(node, token, chain.following if place else chain.first)
    return table


def paths(table: Table, future: Sequence[int]) -> Iterator[tuple[float, float, int, bool, bool]]:
    """Of every node: score, probability of its path, depth, whether its parent is right, and whether it is."""
    waiting = [(0, 1.0, 0, True)]
    while waiting:
        node, path_prob, depth, right = waiting.pop()
        for token, (child, score) in table.children[node].items():
            same = right and depth < len(future) and token == future[depth]
            yield score, path_prob * score, depth + 1, right, same
            waiting.append((child, path_prob * score, depth + 1, same))


def by_bin(tables: Iterable[tuple[Table, Sequence[int]]]) -> list[dict[str, float]]:
    """By path probability: nodes, their mean probability, and the share that agrees with the text."""
    counts, path_probs, rights = np.zeros(len(BINS)), np.zeros(len(BINS)), np.zeros(len(BINS))
    for table, future in tables:
        found = [(path_prob, same) for _, path_prob, _, _, same in paths(table, future)]
        if found:
            own, same = np.array(found).T
            places = np.searchsorted(BINS, own, side="right") - 1
            for sums, weights in ((counts, None), (path_probs, own), (rights, same)):
                sums += np.bincount(places, weights, len(BINS))
    return [
        {"from": low, "nodes": int(count), "promised": round(path_prob / count, 4), "right": round(right / count, 4)}
        for low, (count, path_prob, right) in zip(BINS, np.stack([counts, path_probs, rights], 1).tolist(), strict=True)
        if count
    ]


def judged(tables: Iterable[tuple[Table, Sequence[int]]]) -> Judged:
    """All nodes whose parent is right."""
    found = [
        (score, depth, same)
        for table, future in tables
        for score, _, depth, right, same in paths(table, future)
        if right and depth <= len(future)
    ]
    scores, depths, right = np.array(found, np.float64).reshape(-1, 3).T
    return Judged(scores, depths, right)


def factor_of(nodes: Judged) -> float:
    """The factor that makes the sum of the scores the number of right nodes."""
    return float(nodes.right.sum() / nodes.scores.sum())


def fit(nodes: Judged, deeper: bool) -> Correction:
    """The maximum-likelihood correction, by Newton's method; with `deeper` it depends on depth."""
    clipped = nodes.scores.clip(_LEAST, _MOST)
    columns = [np.ones_like(clipped), np.log(clipped / (1 - clipped))]
    if deeper:
        columns.append(np.log2(nodes.depths))
    inputs, weights = np.stack(columns, 1), np.zeros(len(columns))
    weights[1] = 1.0
    for _ in range(_ROUNDS):
        probs = 1 / (1 + np.exp(-inputs @ weights))
        hessian = (inputs * (probs * (1 - probs))[:, None]).T @ inputs + 1e-6 * np.eye(len(weights))
        weights += np.linalg.solve(hessian, inputs.T @ (nodes.right - probs))
    return Correction(*weights.tolist())


def corrected(tables: Mapping[int, Table], correction: Callable[[float, int], float]) -> dict[int, Table]:
    """The same trees with corrected scores; a correction gets the score and the depth of a node."""
    found = {}
    for root, table in tables.items():
        new, depths = Table([{} for _ in table.children]), [0] * len(table.children)
        for node, below in enumerate(table.children):
            for token, (child, score) in below.items():
                # Children are numbered after their parents.
                depths[child] = depths[node] + 1
                new.children[node][token] = (child, correction(score, depths[child]))
        found[root] = new
    return found
