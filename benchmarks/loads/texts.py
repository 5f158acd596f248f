"""Texts and drafts that are made up: what a pass of any number of rows would accept at every place of a text.

All of it is drawn from a text's own seed, so that two policies meet the same texts and the same drafts, whatever rows
they take.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tree_kernels.node_table.layout import KEPT, LONGEST, PROSPECTS, RIGHT

Reals = NDArray[np.float64]

VOCABULARY = 30_000
# Tokens that are looked up at most, and no node is surer than this on the device.
LOOKED_UP = 15
_SUREST = 0.98
# Trees of each kind that places are drawn from, and their nodes.
_TREES, _NODES = 160, 90
# Sureness of a draft in texts of three kinds, and the share of a text that repeats what stands before.
_KINDS = ((0.8, 0.1), (0.65, 0.3), (0.45, 0.2), (0.7, 0.6))
# Mean tokens of a stretch that is new, and of one that repeats.
_NEW, _REPEATED = 24, 10


class Candidates(NamedTuple):
    """What may follow a root, the best first: [n] chance of each node's path, its depth, and the places among them of
    those that the text goes on with, by depth."""

    chances: Reals
    depths: NDArray[np.int64]
    right: tuple[int, ...]


_NONE = Candidates(np.zeros(0), np.zeros(0, np.int64), ())


@functools.cache
def draft_trees(sureness: float, quality: float, seed: int = 0) -> tuple[Candidates, ...]:
    """Trees whose nodes are as likely as they say, times `quality` for each."""
    dice = random.Random(f"{sureness} {quality} {seed}")
    return tuple(_tree(dice, sureness, quality) for _ in range(_TREES))


def _tree(dice: random.Random, sureness: float, quality: float) -> Candidates:
    sureness = min(0.95, max(0.05, dice.gauss(sureness, 0.2)))
    parents, chances, scores, depths, left = [0], [1.0], [1.0], [0], [1.0]
    # The likeliest place for the next node first, more or less.
    open_nodes = [(-1.0, 0)]
    while len(parents) <= _NODES:
        _, parent = heapq.heappop(open_nodes)
        score = left[parent] * min(0.97, max(0.02, dice.gauss(sureness, 0.15)))
        left[parent] -= score
        node = len(parents)
        parents.append(parent)
        scores.append(score)
        chances.append(chances[parent] * score)
        depths.append(depths[parent] + 1)
        left.append(1.0)
        for open_node in (parent, node):
            heapq.heappush(open_nodes, (-chances[open_node] * left[open_node] * dice.uniform(0.3, 1.0), open_node))
    order = sorted(range(1, len(parents)), key=lambda node: (-chances[node], node))[:KEPT]
    places, right, at = {node: place for place, node in enumerate(order)}, [], 0
    while True:
        drawn, following = dice.random(), -1
        for node in (child for child in range(1, len(parents)) if parents[child] == at):
            drawn -= scores[node] * quality
            if drawn < 0:
                following = node
                break
        if following not in places:
            break
        right.append(places[following])
        at = following
    return Candidates(
        np.array([chances[node] for node in order]), np.array([depths[node] for node in order]), (*right,)
    )


@functools.cache
def lookup_chain(run: int, tokens: int) -> Candidates:
    """Tokens that are looked up behind a run of so many, of which the text goes on with so many `tokens`."""
    first, following = RIGHT[min(run, LONGEST)]
    chances: Reals = first * np.power(following, np.arange(LOOKED_UP, dtype=np.float64))
    return Candidates(chances, np.arange(1, LOOKED_UP + 1), tuple(range(min(tokens, LOOKED_UP))))


@dataclass(frozen=True)
class SimulatedDrafts:
    """How good a draft is: the chance that a node is right, for each chance that it says; and how often a tree that was
    made for the root before holds the new one."""

    quality: float = 0.9
    late_hits: float = 0.5


@dataclass
class SimulatedText:
    """A prompt and its answer, with what is known at every place of it."""

    seed: int
    prompt_tokens: int
    answer_tokens: int
    drafter: SimulatedDrafts
    token_ids: list[int] = field(init=False)
    # By place in the text: of what repeats, the tokens since it began and those until it ends; 0 elsewhere.
    runs: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        sureness, repeats = _KINDS[self.seed % len(_KINDS)]
        self._trees = draft_trees(sureness, self.drafter.quality)
        # Behind its end as well, where passes that are under way go on.
        whole = self.prompt_tokens + self.answer_tokens + 8 * KEPT
        text, runs = dice.choices(range(VOCABULARY), k=self.prompt_tokens), [(0, 0)] * self.prompt_tokens
        while len(text) < whole:
            length = 1 + int(dice.expovariate(1 / _NEW))
            text += dice.choices(range(VOCABULARY), k=length)
            runs += [(0, 0)] * length
            if dice.random() < repeats * (_NEW + _REPEATED) / _REPEATED / 2:
                length = 2 + int(dice.expovariate(1 / _REPEATED))
                begin = dice.randrange(max(1, len(text) - length))
                copied = text[begin : begin + length]
                text += copied
                runs += [(done + 1, len(copied) - done - 1) for done in range(len(copied))]
        self.token_ids, self.runs = text, runs
        # Which tree, and whether a late one holds the root, by place.
        self._drawn = np.random.default_rng(self.seed).integers(0, 1 << 30, (len(text), 2))

    def candidates(self, place: int, lag: int | None, looks_up: bool) -> tuple[Candidates, Candidates]:
        """What follows the token at a `place`, by a draft whose tree is `lag` passes behind, None for no draft, and by
        lookup."""
        drafted, looked_up = _NONE, _NONE
        if lag is not None:
            tree, hit = self._drawn[place]
            if (hit % 1000) / 1000 < self.drafter.late_hits**lag:
                drafted = self._trees[tree % _TREES]
        run, left = self.runs[place]
        if looks_up and run:
            looked_up = lookup_chain(run, left)
        return drafted, looked_up


@functools.lru_cache(1024)
def made_up_text(seed: int, prompt_tokens: int, answer_tokens: int, drafter: SimulatedDrafts) -> SimulatedText:
    """The text of a seed, which is kept for when it is met again."""
    return SimulatedText(seed, prompt_tokens, answer_tokens, drafter)


class RankedCandidates(NamedTuple):
    """The candidates of one root, merged: [n] chances of the best, falling; which are a draft's; and by how many of
    them the first, the second .. token of the text is among them, by draft and by lookup."""

    chances: Reals
    drafted: NDArray[np.bool_]
    right_drafted: list[int]
    right_looked_up: list[int]

    def accepted(self, rows: int) -> tuple[int, int]:
        """Tokens that the best `rows` of them hold of the text, and those of them by the draft alone."""
        drafted = sum(place < rows for place in self.right_drafted)
        return max(drafted, sum(place < rows for place in self.right_looked_up)), drafted

    def prospects(self, limit: int) -> tuple[float, ...]:
        """Expected tokens of the best 1, 3, 7 .. rows, at most `limit`."""
        sums = np.concatenate((np.zeros(1), np.cumsum(self.chances)))
        return tuple(float(sums[min(count, limit, len(self.chances))]) for count in PROSPECTS)


def ranked(drafted: Candidates, looked_up: Candidates, trust: float) -> RankedCandidates:
    """Both kinds of candidates, the best first; a draft's chances are scaled by the `trust` in them."""
    own = np.minimum(_SUREST, drafted.chances * trust**drafted.depths) if len(drafted.chances) else drafted.chances
    chances = np.concatenate((own, looked_up.chances))
    order = np.argsort(-chances, kind="stable")[:KEPT]
    places = np.empty(len(chances), np.int64)
    places.fill(KEPT)
    places[order] = np.arange(len(order))
    count = len(own)
    return RankedCandidates(
        chances[order],
        order < count,
        _reached(places[:count], drafted.right),
        _reached(places[count:], looked_up.right),
    )


def _reached(places: NDArray[np.int64], right: Sequence[int]) -> list[int]:
    """By depth, the last place of the path so far: a node counts with all above it."""
    found: list[int] = []
    for node in right:
        found.append(max(int(places[node]), found[-1] if found else 0))
    return found
