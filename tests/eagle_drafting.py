"""Followed sequences for the EAGLE drafter, and the plain tree that its trees are held to."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from eagle_heads import VOCABULARY, PlainHead, make_head
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits
from tree_kernels.growth import GREEDY_TEMPERATURE

GREEDY, COUPLED, REJECTION = VerificationMode.GREEDY, VerificationMode.COUPLED, VerificationMode.REJECTION
SETTINGS: dict[str, Any] = {
    "num_steps": 4,
    "topk": 3,
    "num_draft_tokens": 14,
    "min_score": 0.0,
    "gumbel_candidates": VOCABULARY,
    "projection": "draft",
    "feature_dtype": "float32",
    "dtype": "float32",
    "kv_tokens": 2048,
    "page_size": 8,
    "captured_sequences": 1,
}


def make_drafter(head: EagleHead | None = None, **settings: Any) -> EagleDrafter:
    drafter = EagleDrafter(EagleConfig(**(SETTINGS | settings)), head or make_head())
    drafter.start()
    return drafter


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def states_of(head: EagleHead, length: int, seed: int = 0) -> Tensor:
    """[length, F * W] hidden states, as a target might have them."""
    return torch.randn(length, head.projection.input_width, generator=torch.Generator().manual_seed(seed + 1000))


def sequence_of(
    tokens: Sequence[int],
    mode: VerificationMode = GREEDY,
    *,
    seed: int = 7,
    limits: TreeLimits | None = None,
    **sampling: Any,
) -> DraftSequence:
    temperature = sampling.pop("temperature", 0.0 if mode is GREEDY else 1.0)
    return DraftSequence(
        1,
        list(tokens),
        1,
        VOCABULARY,
        seed=seed,
        mode=mode,
        sampling=SamplingParams(temperature=temperature, **sampling),
        limits=limits or TreeLimits(),
    )


def feed(sequence: DraftSequence, states: Tensor, position: int) -> None:
    assert sequence.features is not None
    sequence.features.append(states, position)


def opened(drafter: EagleDrafter, sequence: DraftSequence, states: Tensor) -> DraftSequence:
    """Followed, with the states of all tokens but the root."""
    drafter.open(sequence)
    feed(sequence, states[: len(sequence.token_ids) - 1], 0)
    return sequence


@dataclass
class Node:
    """A node of the plain tree; `path` are the tokens from the root's child down to it."""

    path_prob: float
    score: float
    parent: int
    path: tuple[int, ...]


def plain_growth(root: int, distribution_of: Callable[[tuple[int, ...]], Tensor], **options: Any) -> TokenTree:
    """EAGLE-2's tree, written down one node at a time.

    `distribution_of` gives the distribution [vocabulary] after a path below the root. `options` as SETTINGS, and
    `score(distribution, depth)`.
    """
    shape = SETTINGS | options
    score = options.get("score", lambda distribution, _: distribution)
    nodes = [Node(1.0, 1.0, 0, ())]
    frontier = [0]
    for depth in range(1, shape["num_steps"] + 1):
        first_new = len(nodes)
        for number in frontier:
            node = nodes[number]
            scores = score(distribution_of(node.path), depth)
            for token in scores.argsort(descending=True)[: shape["topk"]].tolist():
                own = float(scores[token])
                nodes.append(Node(node.path_prob * own, own, number, (*node.path, token)))
        added = range(first_new, len(nodes))
        frontier = heapq.nlargest(shape["topk"], added, key=lambda number: nodes[number].path_prob)
    ranked = sorted(range(1, len(nodes)), key=lambda number: -nodes[number].path_prob)
    rows = {number: row for row, number in enumerate([0, *ranked[: shape["num_draft_tokens"]]])}
    return TokenTree(
        tuple(nodes[number].path[-1] if number else root for number in rows),
        tuple(rows[nodes[number].parent] for number in rows),
        tuple(nodes[number].score for number in rows),
    )


def plain_tree(head: EagleHead, tokens: Sequence[int], states: Tensor, first: int = 0, **options: Any) -> TokenTree:
    """The tree of a plain head that read the states from `first` on."""
    plain = PlainHead(head)
    plain.read(tokens, states[first : len(tokens) - 1], first)
    # COUPLED trees are scored by a race.
    temperature = 1.0 if "score" in options else GREEDY_TEMPERATURE
    root = len(plain.rows) - 1
    rows: dict[tuple[int, ...], int] = {(): root}

    def distribution_of(path: tuple[int, ...]) -> Tensor:
        if path not in rows:
            above = [rows[path[:length]] for length in range(1, len(path))]
            feature = plain.rows[rows[path[:-1]]].feature
            rows[path] = plain.add(path[-1], feature, len(tokens) - 2 + len(path), [*range(root + 1), *above])
        return plain.distribution(rows[path], temperature)

    return plain_growth(tokens[-1], distribution_of, **options)


def same_tree(found: TokenTree, expected: TokenTree) -> None:
    assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
    assert found.scores == pytest.approx(expected.scores, rel=1e-3)
    assert found.distributions.keys() == expected.distributions.keys()
    for row, distribution in expected.distributions.items():
        # Rounded to integers, sums in another order may differ by one or two.
        weights = dict(zip(distribution.token_ids, distribution.weights, strict=True))
        other = found.distributions[row]
        assert dict(zip(other.token_ids, other.weights, strict=True)) == pytest.approx(weights, abs=2)


def scores_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The score of every node, by the tokens down to it."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], tree.scores[1:], strict=True))


def alike(found: TokenTree, expected: TokenTree) -> None:
    """The same nodes and scores but for near-ties, which sums in another order may turn."""
    one, other = scores_of(found), scores_of(expected)
    shared = one.keys() & other.keys()
    assert other and len(one) == len(other) and len(shared) >= len(other) - 1 - len(other) // 20
    assert [one[path] for path in shared] == pytest.approx([other[path] for path in shared], rel=1e-3)


def draft(drafter: EagleDrafter, tokens: Sequence[int], states: Tensor, *arguments: Any, **options: Any) -> TokenTree:
    """The tree of a sequence that is followed for this tree alone."""
    sequence = opened(drafter, sequence_of(tokens, *arguments, **options), states)
    (tree,) = drafter.propose([sequence])
    drafter.close(sequence)
    assert drafter.stats()["eagle_cache_used_tokens"] == 0
    return tree
