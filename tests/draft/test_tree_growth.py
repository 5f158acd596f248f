"""Trees: always well formed, longest matches first, candidates raced as by the target, draws by their distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from chi_squared import chi_squared
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from trie_trees import build_tree

from draft_service.drafters.base import DraftSequence
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.prediction import UNIT
from draft_service.ngram.trie import NgramTrie
from outrider import noise
from outrider.sampling import LOSSLESS_MODES, SamplingParams, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits
from tree_kernels.verification import Chance, rejection_walk

VOCABULARY = 12
NOTHING = NgramTrie(2, 4).arrays()
MODES = st.sampled_from(list(LOSSLESS_MODES))


def draft(
    own: Sequence[int],
    context: Sequence[int],
    mode: VerificationMode = VerificationMode.GREEDY,
    *,
    tenant: Sequence[int] = (),
    seed: int = 0,
    temperature: float = 0.0,
    nodes: int = 32,
    depth: int = 16,
    breadth: int = 8,
    floor: float = 1e-4,
) -> TokenTree:
    """The tree after `context`, from a trie that learnt `own` and one that learnt `tenant`."""
    config = TrieConfig()
    tries = []
    for text in (own, tenant):
        trie = NgramTrie(config.depth, 100_000)
        trie.insert(np.array(text, dtype=np.int32), weight=UNIT)
        tries.append(trie.arrays())
    sequence = DraftSequence(
        1,
        list(context),
        len(context),
        VOCABULARY,
        seed=seed,
        mode=mode,
        sampling=SamplingParams(temperature=temperature),
    )
    limits = TreeLimits(nodes, depth)
    return build_tree((tries[0], tries[1], NOTHING), sequence, config.evidence(), limits, breadth, floor)


def path_probs(tree: TokenTree) -> list[float]:
    path_prob = [1.0]
    for row in range(1, len(tree)):
        path_prob.append(path_prob[tree.parents[row]] * tree.scores[row])
    return path_prob


texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=80)


@examples(150)
@given(texts, texts, MODES, st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(1, 10), st.integers(1, 4))
def test_every_tree_is_well_formed(
    own: list[int], tenant: list[int], mode: VerificationMode, seed: int, nodes: int, depth: int, breadth: int
) -> None:
    tree = draft(own, own, mode, tenant=tenant, seed=seed, nodes=nodes, depth=depth, breadth=breadth)
    checked = TokenTree.checked(
        tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=VOCABULARY, max_rows=nodes + 1
    )
    assert tree.token_ids[0] == own[-1]
    assert max(checked.depths) <= depth
    assert all(len(children) <= breadth for children in checked.children)
    assert all(sum(checked.scores[child] for child in children) <= 1.0 + 1e-9 for children in checked.children)
    path_prob = path_probs(tree)
    assert all(path_prob[row] >= path_prob[row + 1] - 1e-12 for row in range(1, len(tree) - 1)), "best first"
    drawn = {parent for parent in tree.parents[1:]} if mode is VerificationMode.REJECTION else set()
    assert tree.distributions.keys() == drawn


def test_nothing_known_is_a_root_alone() -> None:
    assert draft([1], [1]) == TokenTree.root_only(1)


def test_a_loop_is_drafted_to_the_full_depth() -> None:
    loop = [1, 2, 3, 4] * 12
    tree = draft(loop, loop, depth=16, breadth=1)
    assert tree.is_chain
    assert tree.token_ids == tuple(([4, 1, 2, 3] * 5)[:17])


def test_the_longest_match_comes_first() -> None:
    # After "7 8" came 1 once; after the longer "6 7 8" came 2, and that is what the context ends in.
    text = [5, 7, 8, 1, 0, 6, 7, 8, 2, 0]
    tree = draft(text, [6, 7, 8])
    assert tree.token_ids[1] == 2
    assert tree.scores[1] > tree.scores[tree.children[0][1]]


def test_drafts_grow_with_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    lengths = [draft(text, text[8 - matched : 8], floor=0.3, breadth=1, depth=3).drafted for matched in (1, 2, 4, 6)]
    assert lengths == sorted(lengths)
    scores = [draft(text, text[8 - matched : 8], breadth=1).scores[1] for matched in (1, 2, 4, 6)]
    assert scores == sorted(scores) and scores[-1] > scores[0]


def test_one_branch_or_many() -> None:
    text = [1, 2, 1, 3, 1, 4, 1, 2, 1]
    assert draft(text, [1], breadth=1).is_chain
    assert len(draft(text, [1], breadth=8).children[0]) == 3


def test_what_came_often_goes_before_what_came_last() -> None:
    text = [1, 2] * 6 + [1, 3, 0]
    assert draft(text, [1]).token_ids[1] == 2


def test_a_sequence_trusts_its_own_words_over_its_tenants() -> None:
    own, tenant = [1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 6, 0]
    assert draft(own, [1, 2, 3, 4], tenant=tenant).token_ids[1] == 5
    assert draft([9, 9], [1, 2, 3, 4], tenant=tenant).token_ids[1] == 6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_coupled_candidates_stand_in_the_order_of_the_race(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCABULARY, 400).tolist()
    context = text[-3:]
    known = draft(text, context, breadth=VOCABULARY, depth=1, floor=1e-12)
    probs = {known.token_ids[child]: known.scores[child] for child in known.children[0]}
    mode, wide = VerificationMode.COUPLED, VOCABULARY
    coupled = draft(text, context, mode, seed=seed, temperature=temperature, breadth=wide, depth=1, floor=1e-12)
    tokens = np.array(list(probs))
    race = noise.exponentials(noise.noise_words(seed, len(context), tokens))
    finish = race / np.array(list(probs.values())) ** (1.0 / temperature)
    expected = tokens[np.argsort(finish)].tolist()
    assert [coupled.token_ids[child] for child in coupled.children[0]] == expected[: len(coupled.children[0])]


def test_deeper_rows_race_with_the_noise_of_their_position() -> None:
    text = np.random.default_rng(4).integers(0, 4, 300).tolist()
    tree = draft(text, text[-2:], VerificationMode.COUPLED, seed=9, temperature=1.0, nodes=60, floor=1e-9)
    first = tree.children[0][0]
    assert tree.children[first]
    longer = [*text[-2:], tree.token_ids[first]]
    again = draft(text, longer, VerificationMode.COUPLED, seed=9, temperature=1.0, floor=1e-9)
    pairs = list(zip(tree.children[first], again.children[0], strict=False))
    assert pairs and all(tree.token_ids[deeper] == again.token_ids[child] for deeper, child in pairs)


def _draws(seeds: int) -> tuple[list[TokenTree], dict[int, float]]:
    text = [1, 2, 1, 2, 1, 2, 1, 3, 1, 3, 1, 4, 1, 5, 1]
    trees = [
        draft(text, [1], VerificationMode.REJECTION, seed=seed, temperature=1.0, nodes=3, depth=1)
        for seed in range(seeds)
    ]
    distribution = trees[0].distributions[0]
    return trees, {
        token: weight / sum(distribution.weights)
        for token, weight in zip(distribution.token_ids, distribution.weights, strict=True)
    }


def test_draws_follow_their_distribution_without_replacement() -> None:
    trees, probs = _draws(4_000)
    firsts = Counter(tree.token_ids[1] for tree in trees)
    tokens = sorted(probs)
    expected = [probs[token] * len(trees) for token in tokens]
    assert chi_squared([firsts[token] for token in tokens], expected) > 1e-4
    # Of those that drew 2 first, the second draw has the distribution that is left.
    seconds = Counter(tree.token_ids[2] for tree in trees if tree.token_ids[1] == 2)
    rest = [token for token in tokens if token != 2]
    left = np.array([probs[token] for token in rest])
    observed = [seconds[token] for token in rest]
    assert chi_squared(observed, left / left.sum() * sum(observed)) > 1e-4


def test_scores_of_draws_tell_nothing_of_their_tokens() -> None:
    trees, _ = _draws(50)
    assert len({tree.token_ids for tree in trees}) > 1
    assert len({tree.scores for tree in trees}) == 1


def test_rejection_over_drawn_trees_keeps_the_targets_distribution() -> None:
    rng = np.random.default_rng(5)
    text = rng.integers(0, 5, 200).tolist()
    target = torch.tensor(rng.dirichlet(np.full(VOCABULARY, 0.5)), dtype=torch.float64)
    coins, outputs = np.random.default_rng(6), Counter[int]()
    samples = 4_000
    for seed in range(samples):
        tree = draft(text, text[-2:], VerificationMode.REJECTION, seed=seed, temperature=1.0, nodes=6, depth=2)
        distributions = {
            row: (distribution.token_ids, distribution.weights) for row, distribution in tree.distributions.items()
        }
        walk = rejection_walk(tree.parents, tree.token_ids, distributions, lambda *_: target, Chance(coins.random))
        outputs[tree.token_ids[walk.accepted_rows[0]] if walk.accepted_rows else walk.next_token] += 1
    expected = target.numpy() * samples
    likely = expected > 5
    observed = np.array([outputs[token] for token in range(VOCABULARY)])
    pooled = [*observed[likely], observed[~likely].sum()], [*expected[likely], expected[~likely].sum()]
    assert chi_squared(*(part if pooled[1][-1] > 0 else part[:-1] for part in pooled)) > 1e-4
