"""The chain that is taken of a tree, held to every path of random trees."""

from __future__ import annotations

import random

import pytest

from outrider_vllm.drafting import best_chain


def expected_tokens(path: list[int], scores: list[float]) -> float:
    """By definition: for each length, the probability that so much is accepted."""
    total = 0.0
    for depth in range(len(path)):
        probability = 1.0
        for node in path[: depth + 1]:
            probability *= scores[node]
        total += probability
    return total


def path_to(node: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("seed", range(20))
def test_no_path_of_a_random_tree_is_expected_to_bring_more(seed: int) -> None:
    coins = random.Random(seed)
    nodes = 40
    tokens = list(range(100, 100 + nodes))
    parents = [0] + [coins.randrange(max(0, node - 4), node) for node in range(1, nodes)]
    scores = [1.0] + [coins.random() for _ in range(1, nodes)]
    for most in (1, 2, 5, nodes):
        chain = best_chain(tokens, parents, scores, most)
        path = [token - 100 for token in chain]
        assert path == path_to(path[-1], parents) and len(path) <= most
        every = [path_to(node, parents) for node in range(1, nodes)]
        best = max(expected_tokens(one, scores) for one in every if len(one) <= most)
        assert expected_tokens(path, scores) == pytest.approx(best)


def test_a_root_alone_and_nodes_that_cannot_be_accepted_give_nothing() -> None:
    assert best_chain([5], [0], [1.0], 4) == []
    assert best_chain([5, 6, 7], [0, 0, 1], [1.0, 0.0, 1.0], 4) == []


def test_a_sure_chain_goes_before_a_likely_first_token() -> None:
    #        root -> 6 (0.6); root -> 7 (0.4) -> 8 (1) -> 9 (1)
    assert best_chain([5, 6, 7, 8, 9], [0, 0, 0, 2, 3], [1.0, 0.6, 0.4, 1.0, 1.0], 3) == [7, 8, 9]
    assert best_chain([5, 6, 7, 8, 9], [0, 0, 0, 2, 3], [1.0, 0.6, 0.4, 1.0, 1.0], 1) == [6]
