"""The distribution of what a verify step says, by enumerating every tree that may be drawn and every branch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tree_kernels.verification import Walk, match_walk, rejection_walk

pytestmark = pytest.mark.values

Path = tuple[int, ...]
Distribution = tuple[tuple[int, ...], tuple[int, ...]]
TOLERANCE = 1e-12


class BranchingChance:
    """Takes scripted branches, then the first possible one of each new decision, and weighs the whole run."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.probability = 1.0
        # Branches of each decision that have a positive probability.
        self.open: list[list[int]] = []

    def accept(self, probability: float) -> bool:
        chance = min(1.0, probability)
        return bool(self._decide({1: chance, 0: 1.0 - chance}))

    def draw(self, weights: Tensor) -> int:
        return self._decide(dict(enumerate((weights / weights.sum()).tolist())))

    def _decide(self, chances: dict[int, float]) -> int:
        possible = [branch for branch, chance in chances.items() if chance > 0.0]
        place = len(self.open)
        if place == len(self.script):
            self.script.append(possible[0])
        self.open.append(possible)
        branch = self.script[place]
        self.probability *= chances[branch]
        return branch


def every_run(run: Callable[[BranchingChance], Walk]) -> Iterator[tuple[float, Walk]]:
    """Each way `run` can end, with its probability."""
    script: list[int] = []
    while True:
        chance = BranchingChance(script)
        walk = run(chance)
        yield chance.probability, walk
        while chance.open and script[-1] == chance.open[-1][-1]:
            script.pop()
            chance.open.pop()
        if not chance.open:
            return
        script[-1] = chance.open[-1][chance.open[-1].index(script[-1]) + 1]


@dataclass
class Tree:
    tokens: list[int] = field(default_factory=lambda: [0])
    parents: list[int] = field(default_factory=lambda: [0])
    paths: list[Path] = field(default_factory=lambda: [()])
    distributions: dict[int, Distribution] = field(default_factory=dict)


# children[i] of the i-th child: a shape is the tuple of its children's shapes.
Shape = tuple["Shape", ...]
LEAF: Shape = ()
SHAPES: dict[str, Shape] = {
    "root only": LEAF,
    "one": (LEAF,),
    "chain": ((((LEAF,),),)),
    "two": (LEAF, LEAF),
    "three": (LEAF, LEAF, LEAF),
    "two by two": ((LEAF, LEAF), (LEAF, LEAF)),
    "lopsided": (((LEAF,),), LEAF),
    "deep second": (LEAF, (LEAF, LEAF)),
}


def drawn_trees(shape: Shape, draft_of: Callable[[Path], Distribution]) -> Iterator[tuple[float, Tree]]:
    """Every tree of a shape whose siblings are drawn without replacement, with its probability.

    Where a support is exhausted, the children that remain are dropped.
    """
    tree = Tree()
    pending = [(0, shape)]
    yield from _grow(tree, pending, draft_of, 1.0)


def _grow(
    tree: Tree, pending: list[tuple[int, Shape]], draft_of: Callable[[Path], Distribution], probability: float
) -> Iterator[tuple[float, Tree]]:
    if not pending:
        yield probability, tree
        return
    (row, shape), rest = pending[0], pending[1:]
    if not shape:
        yield from _grow(tree, rest, draft_of, probability)
        return
    ids, weights = draft_of(tree.paths[row])
    for picks in itertools.permutations(range(len(ids)), min(len(shape), len(ids))):
        left, chance = sum(weights), probability
        grown = Tree(list(tree.tokens), list(tree.parents), list(tree.paths), dict(tree.distributions))
        grown.distributions[row] = (ids, weights)
        todo = list(rest)
        for pick, child_shape in zip(picks, shape, strict=False):
            chance *= weights[pick] / left
            left -= weights[pick]
            todo.append((len(grown.tokens), child_shape))
            grown.tokens.append(ids[pick])
            grown.parents.append(row)
            grown.paths.append((*tree.paths[row], ids[pick]))
        yield from _grow(grown, todo, draft_of, chance)


def fixed_tree(shape: Shape, vocabulary: int) -> Tree:
    """A tree with point masses: the i-th child of a row carries token (row + 2 * i) % vocabulary."""
    tree = Tree()
    pending = [(0, shape)]
    while pending:
        row, children = pending.pop(0)
        for i, child_shape in enumerate(children):
            token = (row + 2 * i) % vocabulary
            pending.append((len(tree.tokens), child_shape))
            tree.tokens.append(token)
            tree.parents.append(row)
            tree.paths.append((*tree.paths[row], token))
    return tree


def assert_distribution(outputs: Mapping[Path, float], target_of: Callable[[Path], Tensor], length: int) -> None:
    """Outputs, continued by the target itself to `length` tokens, must have the target's own distribution."""
    assert math.isclose(sum(outputs.values()), 1.0, abs_tol=TOLERANCE)
    vocabulary = len(target_of(()))
    for text in itertools.product(range(vocabulary), repeat=length):
        conditionals = [float(target_of(text[:i])[text[i]]) for i in range(length)]
        said = sum(outputs.get(text[:n], 0.0) * math.prod(conditionals[n:]) for n in range(1, length + 1))
        assert abs(said - math.prod(conditionals)) < TOLERANCE, text


def rejection_outputs(trees: Iterator[tuple[float, Tree]], target_of: Callable[[Path], Tensor]) -> dict[Path, float]:
    outputs: dict[Path, float] = defaultdict(float)
    for probability, tree in trees:

        def run(chance: BranchingChance, tree: Tree = tree) -> Walk:
            def probs_of(row: int, depth: int) -> Tensor:
                assert depth == len(tree.paths[row])
                return target_of(tree.paths[row])

            return rejection_walk(tree.parents, tree.tokens, tree.distributions, probs_of, chance)

        for chance, walk in every_run(run):
            path = tree.paths[walk.accepted_rows[-1]] if walk.accepted_rows else ()
            outputs[(*path, walk.next_token)] += probability * chance
    return outputs


def depth_of(shape: Shape) -> int:
    return 1 + max(map(depth_of, shape)) if shape else 0


def target_distributions(kind: str, vocabulary: int) -> Callable[[Path], Tensor]:
    """A different distribution after every path, the same at every call."""

    def distribution(path: Path) -> Tensor:
        if kind == "point mass":
            return torch.eye(vocabulary, dtype=torch.float64)[sum(path, 1) % vocabulary]
        if kind == "as the draft":
            ids, weights = draft_distributions("full", vocabulary)(path)
            probs = torch.zeros(vocabulary, dtype=torch.float64)
            probs[list(ids)] = torch.tensor(weights, dtype=torch.float64)
            return probs / probs.sum()
        generator = torch.Generator().manual_seed(1 + sum((t + 1) * 7**i for i, t in enumerate(path)))
        probs = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 2
        if kind == "with zeros":
            probs[sum(path) % vocabulary] = 0.0
        return probs / probs.sum()

    return distribution


def draft_distributions(kind: str, vocabulary: int) -> Callable[[Path], Distribution]:
    def distribution(path: Path) -> Distribution:
        shift = sum(path)
        if kind == "truncated":
            return (shift % vocabulary, (shift + 1) % vocabulary), (3, 1 + len(path))
        if kind == "understated":
            return tuple(range(vocabulary)), tuple(65535 if t == shift % vocabulary else 1 for t in range(vocabulary))
        if kind == "single":
            return ((shift + 1) % vocabulary,), (1,)
        return tuple(range(vocabulary)), tuple(1 + (t + shift) % vocabulary for t in range(vocabulary))

    return distribution


@pytest.mark.parametrize("target", ["any", "with zeros", "point mass", "as the draft"])
@pytest.mark.parametrize("draft", ["full", "truncated", "understated", "single"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rejection_has_the_targets_distribution_for_trees_drawn_without_replacement(
    shape: Shape, draft: str, target: str
) -> None:
    target_of = target_distributions(target, vocabulary=3)
    outputs = rejection_outputs(drawn_trees(shape, draft_distributions(draft, vocabulary=3)), target_of)
    assert_distribution(outputs, target_of, length=depth_of(shape) + 1)


@pytest.mark.parametrize("target", ["any", "with zeros", "point mass"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rejection_has_the_targets_distribution_for_fixed_trees(shape: Shape, target: str) -> None:
    target_of = target_distributions(target, vocabulary=5)
    outputs = rejection_outputs(iter([(1.0, fixed_tree(shape, vocabulary=5))]), target_of)
    assert_distribution(outputs, target_of, length=depth_of(shape) + 1)


@pytest.mark.parametrize("drawn", [(LEAF,), (LEAF, LEAF)], ids=["support left", "support exhausted"])
def test_rejection_has_the_targets_distribution_where_drawn_and_fixed_rows_mix(drawn: Shape) -> None:
    target_of = target_distributions("any", vocabulary=3)

    def trees() -> Iterator[tuple[float, Tree]]:
        for probability, tree in drawn_trees(drawn, draft_distributions("truncated", vocabulary=3)):
            # A child outside the distribution, and children of a row without one.
            outside = ({0, 1, 2} - set(tree.distributions[0][0])).pop()
            mixed = Tree([*tree.tokens, outside], [*tree.parents, 0], [*tree.paths, (outside,)], tree.distributions)
            for token in (2, 0):
                mixed.tokens.append(token)
                mixed.parents.append(1)
                mixed.paths.append((*mixed.paths[1], token))
            yield probability, mixed

    assert_distribution(rejection_outputs(trees(), target_of), target_of, length=3)


def test_rejection_accepts_every_draft_where_draft_and_target_agree() -> None:
    target_of = target_distributions("as the draft", vocabulary=3)
    for _, tree in drawn_trees(SHAPES["chain"], draft_distributions("full", vocabulary=3)):

        def run(chance: BranchingChance, tree: Tree = tree) -> Walk:
            return rejection_walk(
                tree.parents, tree.tokens, tree.distributions, lambda row, _: target_of(tree.paths[row]), chance
            )

        rejected = sum(chance for chance, walk in every_run(run) if len(walk.accepted_rows) < 3)
        assert rejected < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matching_a_draw_has_the_targets_distribution(shape: Shape) -> None:
    """COUPLED: whatever draws from the target's distribution at each row, a walk that follows its draws has it."""
    target_of = target_distributions("any", vocabulary=5)
    tree = fixed_tree(shape, vocabulary=5)
    outputs: dict[Path, float] = defaultdict(float)

    def run(chance: BranchingChance) -> Walk:
        return match_walk(tree.parents, tree.tokens, lambda row, _: chance.draw(target_of(tree.paths[row])))

    for probability, walk in every_run(run):
        path = tree.paths[walk.accepted_rows[-1]] if walk.accepted_rows else ()
        outputs[(*path, walk.next_token)] += probability
    assert_distribution(outputs, target_of, length=depth_of(shape) + 1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matching_the_argmax_is_greedy_decoding(shape: Shape) -> None:
    """GREEDY: over every tree, the output is the beginning of the one greedy text."""
    target_of = target_distributions("any", vocabulary=3)
    greedy: Path = ()
    for _ in range(depth_of(shape) + 1):
        greedy = (*greedy, int(target_of(greedy).argmax()))
    for _, tree in drawn_trees(shape, draft_distributions("full", vocabulary=3)):
        walk = match_walk(tree.parents, tree.tokens, lambda row, _, t=tree: int(target_of(t.paths[row]).argmax()))
        said = (*(tree.tokens[row] for row in walk.accepted_rows), walk.next_token)
        assert said == greedy[: len(said)]
        accepted = tree.paths[walk.accepted_rows[-1]] if walk.accepted_rows else ()
        assert accepted == max((p for p in tree.paths if p == greedy[: len(p)]), key=len)
