"""The EAGLE drafter against a plain head: the same trees in every shape and mode, whoever else is drafted for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from eagle_drafting import (
    COUPLED,
    GREEDY,
    REJECTION,
    SETTINGS,
    draft,
    make_drafter,
    opened,
    plain_tree,
    same_tree,
    sequence_of,
    states_of,
    text,
)
from eagle_heads import KINDS, VOCABULARY, PlainHead, make_head
from torch import Tensor

from draft_service.drafters.base import FeatureDrafter
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from outrider import noise
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits

pytestmark = pytest.mark.values


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
def test_the_tree_is_the_plain_heads(kind: dict[str, Any], topk: int) -> None:
    head = make_head(**kind)
    tokens, states = text(21), states_of(head, 21)
    tree = draft(make_drafter(head, topk=topk), tokens, states)
    same_tree(tree, plain_tree(head, tokens, states, topk=topk))
    assert tree.is_chain == (topk == 1) and tree.drafted == (4 if topk == 1 else 14)


@pytest.mark.parametrize("kind", [KINDS["eagle-3"], KINDS["eagle-3.1"]], ids=["eagle-3", "eagle-3.1"])
@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize("nodes", [1, 5, 40])
def test_every_shape_is_the_plain_heads(kind: dict[str, Any], steps: int, nodes: int) -> None:
    head = make_head(**kind)
    tokens, states = text(9, 1), states_of(head, 9, 1)
    shape = {"num_steps": steps, "num_draft_tokens": nodes}
    same_tree(draft(make_drafter(head, **shape), tokens, states), plain_tree(head, tokens, states, **shape))


def race_of(seed: int, length: int, sharpness: float) -> Any:
    """Scores of COUPLED: each token's chance of winning the race, when the distribution is trusted so far."""

    def score(distribution: Tensor, depth: int) -> Tensor:
        ids = np.arange(VOCABULARY)
        noises = noise.exponentials(noise.noise_words(seed, length + depth - 1, ids))
        weights = (distribution / torch.from_numpy(noises)) ** sharpness
        return weights / weights.sum()

    return score


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_coupled_trees_run_the_shared_race(sharpness: float) -> None:
    head = make_head()
    tokens, states = text(12), states_of(head, 12)
    seed = 2**63 + 5
    found = draft(make_drafter(head, gumbel_sharpness=sharpness), tokens, states, COUPLED, seed=seed)
    expected = plain_tree(head, tokens, states, score=race_of(seed, len(tokens), sharpness))
    same_tree(found, expected)


def test_a_sharp_race_drafts_the_token_that_the_target_will_draw() -> None:
    """Where the head's distribution is the target's own, the first child is the target's draw, at every depth."""
    head = make_head(draft_vocab_size=VOCABULARY)
    tokens, states = text(12), states_of(head, 12)
    for seed in range(20):
        tree = draft(make_drafter(head, gumbel_sharpness=8.0, topk=1), tokens, states, COUPLED, seed=seed)
        plain = PlainHead(head)
        plain.read(tokens, states[:-1])
        row, visible = len(plain.rows) - 1, list(range(len(plain.rows)))
        for depth, token in enumerate(tree.token_ids[1:]):
            race = noise.exponentials(noise.noise_words(seed, len(tokens) + depth, np.arange(VOCABULARY)))
            assert token == int((torch.from_numpy(race) / plain.distribution(row)).argmin())
            row = plain.add(token, plain.rows[row].feature, len(tokens) - 1 + depth, visible)
            visible.append(row)


@pytest.mark.parametrize("mode", [COUPLED, REJECTION], ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_what_a_request_filters_out_is_not_drafted(mode: VerificationMode, filters: dict[str, Any]) -> None:
    head = make_head(draft_vocab_size=VOCABULARY)
    tokens, states = text(12), states_of(head, 12)
    plain = PlainHead(head)
    plain.read(tokens, states[:-1])
    distribution = plain.distribution(len(plain.rows) - 1, 1.4)
    allowed = allowed_by(distribution, **filters)
    for seed in range(5):
        tree = draft(make_drafter(head), tokens, states, mode, seed=seed, temperature=1.4, **filters)
        assert {tree.token_ids[child] for child in tree.children[0]} <= allowed
        if mode is REJECTION:
            drawn_from = tree.distributions[0]
            assert set(drawn_from.token_ids) == allowed
            share = distribution[list(drawn_from.token_ids)] / distribution[list(allowed)].sum()
            weights = torch.tensor(drawn_from.weights, dtype=torch.float64)
            assert torch.allclose(weights / weights.sum(), share, atol=1e-4)


def allowed_by(distribution: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """In the target's order: min_p, top_k, and top_p as a share of what they leave."""
    ranked = [
        token
        for token in distribution.argsort(descending=True).tolist()
        if distribution[token] >= min_p * distribution.max()
    ]
    ranked = ranked[: top_k or None]
    share, before, kept = top_p * float(distribution[ranked].sum()), 0.0, set()
    for token in ranked:
        if before < share:
            kept.add(token)
        before += float(distribution[token])
    return kept


def test_a_batch_is_drafted_as_one_by_one() -> None:
    head = make_head()
    drafter = make_drafter(head)
    wanted = [
        (text(length, i), states_of(head, length, i), mode, limits)
        for i, (length, mode, limits) in enumerate(
            [
                (5, GREEDY, TreeLimits()),
                (30, COUPLED, TreeLimits(max_nodes=4)),
                (17, REJECTION, TreeLimits(max_depth=1)),
                (2, COUPLED, TreeLimits(max_depth=2)),
                (23, REJECTION, TreeLimits()),
                (12, GREEDY, TreeLimits(max_nodes=1)),
            ]
        )
    ]
    sequences = [
        opened(drafter, sequence_of(tokens, mode, limits=limits, seed=i), states)
        for i, (tokens, states, mode, limits) in enumerate(wanted)
    ]
    trees = drafter.propose(sequences)
    for i, (tree, (tokens, states, mode, limits)) in enumerate(zip(trees, wanted, strict=True)):
        same_tree(tree, draft(make_drafter(head), tokens, states, mode, limits=limits, seed=i))
        assert 1 <= tree.drafted <= (limits.max_nodes or 14) and max(tree.depths) <= (limits.max_depth or 4)


def test_bfloat16_drafts_and_repeats_itself() -> None:
    head = make_head().to(torch.bfloat16)
    tokens, states = text(25), states_of(head, 25)
    trees = [draft(make_drafter(head), tokens, states, mode) for mode in LOSSLESS_MODES for _ in range(2)]
    assert trees[0] == trees[1] and trees[2] == trees[3] and trees[4] == trees[5]
    exact = draft(make_drafter(make_head()), tokens, states)
    assert trees[0].token_ids[1] == exact.token_ids[1]
    assert trees[0].scores[1] == pytest.approx(exact.scores[1], abs=0.05)


@pytest.mark.parametrize("mode", LOSSLESS_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("floor", [0.0, 0.02, 0.3])
def test_every_tree_is_well_formed(mode: VerificationMode, floor: float) -> None:
    head = make_head()
    drafter = make_drafter(head, min_score=floor, num_draft_tokens=20, num_steps=5, topk=4)
    for seed in range(8):
        tokens, states = text(6 + seed, seed), states_of(head, 6 + seed, seed)
        tree = draft(drafter, tokens, states, mode, seed=seed)
        TokenTree.checked(tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=VOCABULARY)
        path_probs = [1.0]
        for row in range(1, len(tree)):
            path_probs.append(path_probs[tree.parents[row]] * tree.scores[row])
        assert all(path_probs[row] >= path_probs[row + 1] - 1e-12 for row in range(1, len(tree) - 1)), "best first"
        assert all(path_prob >= floor - 1e-9 for path_prob in path_probs)
        assert tree.drafted <= 20 and max(tree.depths) <= 5
        assert all(len(children) <= 4 for children in tree.children)
        assert all(sum(tree.scores[child] for child in children) <= 1.0 + 1e-6 for children in tree.children)
        drawn = set(tree.parents[1:]) if mode is REJECTION else set()
        assert tree.distributions.keys() == drawn


def test_it_is_a_drafter_that_wants_features() -> None:
    drafter = make_drafter()
    assert isinstance(drafter, FeatureDrafter) and drafter.vocabulary_size == VOCABULARY
    assert drafter.limits == TreeLimits(14, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_draft_tokens": 1024},
        {"topk": -1},
        {"num_steps": 40, "topk": 8},
        {"min_score": 2.0},
        {"page_size": 0},
        {"gumbel_candidates": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        EagleConfig(**(SETTINGS | settings))
    with pytest.raises(SettingsError, match="needs a head"):
        EagleDrafter(EagleConfig(head=""))
