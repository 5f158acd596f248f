"""Walks with real coins and real noise: adversarial trees, edge cases, distributions by sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from examples import is_full
from torch import Tensor

from outrider.noise import exponentials, noise_words
from tree_kernels.philox import uniforms
from tree_kernels.verification import Chance, Walk, coupled_token, match_walk, rejection_walk

V = 7
# A skew that is half as large takes four times as many.
SAMPLES = 8000 if is_full() else 2000


def random_probs(*key: int, vocabulary: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(vocabulary, generator=generator).mul(1.5).softmax(0)


def random_tree(seed: int, rows: int, vocabulary: int = V) -> tuple[list[int], list[int]]:
    """Parents and token ids with different siblings."""
    rng = np.random.default_rng(seed)
    parents, tokens, taken = [0], [0], set()
    while len(parents) < rows:
        parent, token = int(rng.integers(len(parents))), int(rng.integers(vocabulary))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return parents, tokens


def paths_of(parents: list[int], tokens: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@pytest.mark.parametrize("vocabulary", [2, 5, 211, 1000])
@pytest.mark.parametrize("nonzero", ["all", "few"])
def test_the_coupled_token_wins_the_race_as_it_is_defined(vocabulary: int, nonzero: str) -> None:
    for seed in range(30):
        probs = random_probs(seed, vocabulary=vocabulary).double()
        if nonzero == "few":
            probs[probs < probs.topk(min(5, vocabulary)).values[-1]] = 0.0
        position = seed * 2**30
        noise = exponentials(noise_words(seed, position, np.arange(vocabulary)))
        with np.errstate(divide="ignore"):
            assert coupled_token(probs, seed, position) == int(np.argmin(noise / probs.numpy()))


def test_a_token_of_probability_zero_never_wins_the_race() -> None:
    probs = torch.tensor([0.0, 1e-30, 0.0])
    assert {coupled_token(probs, seed, 3) for seed in range(50)} == {1}


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_a_coupled_walk_says_what_plain_seeded_sampling_says(rows: int) -> None:
    for seed in range(40):
        parents, tokens = random_tree(seed, rows)
        paths = paths_of(parents, tokens)
        plain: tuple[int, ...] = ()
        for _ in range(max(map(len, paths)) + 1):
            plain = (*plain, coupled_token(random_probs(seed, *plain), seed, 10 + len(plain)))
        walk = match_walk(
            parents,
            tokens,
            lambda row, depth, s=seed, p=paths: coupled_token(random_probs(s, *p[row]), s, 10 + depth),
        )
        said = (*(tokens[row] for row in walk.accepted_rows), walk.next_token)
        assert said == plain[: len(said)]


def distance(counts: dict[int, int], probs: Tensor) -> float:
    """Total variation between a sample and a distribution."""
    total = sum(counts.values())
    return 0.5 * sum(abs(counts.get(t, 0) / total - float(p)) for t, p in enumerate(probs))


def assert_shrinks(samples: list[int], probs: Tensor) -> None:
    """The sample's distance to the distribution stays within what n independent draws give, for growing n.

    The mean distance is at most sqrt(V / n) / 2, and one draw moves it by at most 1 / n (McDiarmid).
    """
    for n in (len(samples) // 16, len(samples) // 4, len(samples)):
        counts: dict[int, int] = {}
        for token in samples[:n]:
            counts[token] = counts.get(token, 0) + 1
        assert distance(counts, probs) < 0.5 * math.sqrt(len(probs) / n) + math.sqrt(math.log(1e3) / (2 * n))


def test_coupled_tokens_follow_the_distribution_over_positions_and_over_seeds() -> None:
    probs = random_probs(1)
    assert_shrinks([coupled_token(probs, 99, position) for position in range(SAMPLES)], probs)
    assert_shrinks([coupled_token(probs, seed * 2**33 + 1, 5) for seed in range(SAMPLES)], probs)


def test_rejection_with_coins_follows_the_distribution() -> None:
    target = random_probs(2)
    ids, weights = (0, 2, 3, 6), (50, 10, 30, 10)
    rng = np.random.default_rng(0)
    samples = []
    for i in range(SAMPLES):
        drafted = rng.choice(ids, size=2, replace=False, p=np.array(weights) / 100)
        coins = iter(uniforms(7, i, 8).tolist())
        walk = rejection_walk(
            [0, 0, 0], [0, *map(int, drafted)], {0: (ids, weights)}, lambda *_: target, Chance(lambda c=coins: next(c))
        )
        samples.append(int(drafted[walk.accepted_rows[0] - 1]) if walk.accepted_rows else walk.next_token)
    assert_shrinks(samples, target)


def test_a_coin_of_zero_accepts_no_token_of_probability_zero() -> None:
    target = torch.tensor([0.0, 0.0, 0.25, 0.75])
    for distributions in ({}, {0: ((0, 1), (1, 1))}):
        walk = rejection_walk([0, 0, 0], [3, 0, 1], distributions, lambda *_: target, Chance(lambda: 0.0))
        assert walk == Walk((), 2)


def test_the_largest_coin_still_draws_a_token_of_positive_probability() -> None:
    chance = Chance(lambda: 1.0 - 2.0**-53)
    weights = torch.cat([torch.full((1000,), 0.1, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)])
    assert chance.draw(weights) == 999
    assert Chance(lambda: 0.0).draw(torch.tensor([0.0, 0.0, 1e-300, 1.0], dtype=torch.float64)) == 2


@pytest.mark.parametrize("drawn", [False, True], ids=["fixed", "drawn"])
def test_a_tree_of_one_row_says_the_targets_own_token(drawn: bool) -> None:
    target = torch.tensor([0.5, 0.5])
    distributions = {0: ((0,), (1,))} if drawn else {}
    assert rejection_walk([0], [0], distributions, lambda *_: target, Chance(lambda: 0.7)) == Walk((), 1)
    assert match_walk([0], [0], lambda *_: 1) == Walk((), 1)


def test_a_tree_that_is_all_right_is_accepted_to_the_leaf() -> None:
    parents, tokens = [0, 0, 0, 2, 3], [9, 1, 2, 3, 4]
    target = {0: 2, 2: 3, 3: 4, 4: 5}
    walk = match_walk(parents, tokens, lambda row, _: target[row])
    assert walk == Walk((2, 3, 4), 5)
    distribution = rejection_walk(
        parents, tokens, {}, lambda row, _: torch.eye(V)[target[row]], Chance(lambda: 0.999999)
    )
    assert distribution == walk


def test_a_tree_that_is_all_wrong_costs_nothing_but_its_rows() -> None:
    parents, tokens = random_tree(3, rows=20)
    tokens = [0] + [t if t != 4 else 5 for t in tokens[1:]]
    assert match_walk(parents, tokens, lambda *_: 4) == Walk((), 4)
    assert rejection_walk(parents, tokens, {}, lambda *_: torch.eye(V)[4], Chance(lambda: 0.0)) == Walk((), 4)


@pytest.mark.parametrize("form", ["chain", "star"])
def test_the_largest_tree(form: str) -> None:
    parents = [0, *range(255)] if form == "chain" else [0] * 256
    tokens = [0, *range(255)]
    asked: list[int] = []

    def choose(row: int, depth: int) -> int:
        asked.append(row)
        assert depth == len(asked) - 1
        return tokens[row + 1] if form == "chain" and row < 255 else 254

    walk = match_walk(parents, tokens, choose)
    assert walk.accepted_rows == (tuple(range(1, 256)) if form == "chain" else (255,))
    assert len(asked) == len(walk.accepted_rows) + 1
    coins = iter(uniforms(1, 1, 600).tolist())
    wanted = torch.full((300,), 1 / 300)
    drawn = rejection_walk(parents, tokens, {}, lambda *_: wanted, Chance(lambda: next(coins)))
    assert 0 <= drawn.next_token < 300
    if form == "star" and not drawn.accepted_rows:
        assert drawn.next_token >= 255


def test_an_exhausted_support_leaves_what_the_draft_could_not_say() -> None:
    target = torch.tensor([0.1, 0.1, 0.8])
    coins = iter([0.9, 0.9, 0.5])
    walk = rejection_walk([0, 0, 0], [0, 0, 1], {0: ((0, 1), (1, 1))}, lambda *_: target, Chance(lambda: next(coins)))
    assert walk == Walk((), 2)


def test_equal_distributions_never_leave_an_empty_residual() -> None:
    ids, weights = tuple(range(V)), (3, 1, 4, 1, 5, 9, 2)
    target = torch.tensor(weights).float() / sum(weights)
    for i in range(300):
        coins = iter([1.0 - 2.0**-53, 1.0 - 2.0**-53, 0.5])
        drafted = i % V
        walk = rejection_walk(
            [0, 0], [0, drafted], {0: (ids, weights)}, lambda *_: target, Chance(lambda c=coins: next(c))
        )
        assert 0 <= walk.next_token < V


def test_probs_are_asked_once_for_each_row_of_the_path_and_left_as_they_were() -> None:
    target = random_probs(5)
    before = target.clone()
    rows: list[int] = []

    def probs_of(row: int, depth: int) -> Tensor:
        assert depth == len(rows)
        rows.append(row)
        return target

    walk = rejection_walk([0, 0, 1, 2], [0, 1, 2, 3], {}, probs_of, Chance(lambda: 0.0))
    assert rows == [0, 1, 2, 3] and walk.accepted_rows == (1, 2, 3)
    assert torch.equal(target, before)
