"""The Medusa drafter: trees against brute force over all paths, and what it makes of hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from eagle_drafting import COUPLED, GREEDY, REJECTION, feed, same_tree, scores_of, sequence_of, text
from medusa_heads import HEADS, VOCABULARY, WIDTH, make_heads
from torch import Tensor

from draft_service.drafters.base import DraftSequence, features_of
from draft_service.drafters.merged import MergedConfig, MergedDrafter
from draft_service.drafters.prompt_lookup import PromptLookupConfig, PromptLookupDrafter
from draft_service.medusa.config import MedusaConfig
from draft_service.medusa.drafter import MedusaDrafter
from draft_service.medusa.head import MedusaHead
from outrider import noise
from outrider.errors import InvalidField
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import FeatureRequest
from tree_kernels.growth import GREEDY_TEMPERATURE

pytestmark = pytest.mark.values

SETTINGS: dict[str, Any] = {
    "topk": 3,
    "num_draft_tokens": 14,
    "min_score": 0.0,
    "gumbel_candidates": VOCABULARY,
    "feature_dtype": "float32",
    "dtype": "float32",
}
Scored = list[dict[int, float]]


def make_drafter(heads: MedusaHead | None = None, **settings: Any) -> MedusaDrafter:
    drafter = MedusaDrafter(MedusaConfig(**(SETTINGS | settings)), heads or make_heads())
    drafter.start()
    return drafter


def state_of(seed: int = 0) -> Tensor:
    """[1, H]."""
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))


def draft(drafter: MedusaDrafter, sequence: DraftSequence, state: Tensor) -> TokenTree:
    drafter.open(sequence)
    feed(sequence, state, len(sequence.token_ids) - 2)
    (tree,) = drafter.propose([sequence])
    drafter.close(sequence)
    return tree


def depth_scores(heads: MedusaHead, state: Tensor, sequence: DraftSequence) -> Scored:
    """Of every depth the score of each token, by the target's id: its probability, or its chance in the race."""
    temperature = GREEDY_TEMPERATURE if sequence.mode is VerificationMode.GREEDY else 1.0
    probs = (heads(state)[:, 0].double() / temperature).softmax(-1)
    ids = np.arange(VOCABULARY) if heads.token_ids is None else heads.token_ids.numpy()
    scored = []
    for depth, row in enumerate(probs):
        if sequence.mode is COUPLED:
            words = noise.noise_words(sequence.seed, len(sequence.token_ids) + depth, ids)
            row = row / torch.from_numpy(noise.exponentials(words))
            row = row / row.sum()
        scored.append(dict(zip(ids.tolist(), row.tolist(), strict=True)))
    return scored


def best_tokens(scored: Scored, topk: int) -> list[list[int]]:
    return [sorted(depth, key=lambda token: -depth[token])[:topk] for depth in scored]


def path_probs(paths: Sequence[tuple[int, ...]], scored: Scored) -> dict[tuple[int, ...], float]:
    return {path: float(np.prod([depth[token] for depth, token in zip(scored, path, strict=False)])) for path in paths}


def plain_tree(root: int, kept: Sequence[tuple[int, ...]], scored: Scored) -> TokenTree:
    rows = {(): 0} | {path: row for row, path in enumerate(kept, start=1)}
    return TokenTree(
        (root, *(path[-1] for path in kept)),
        (0, *(rows[path[:-1]] for path in kept)),
        (1.0, *(scored[len(path) - 1][path[-1]] for path in kept)),
    )


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("nodes", [1, 5, 14, 60])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("topk", [1, 3])
def test_best_first_keeps_the_most_probable_of_all_paths(
    mode: VerificationMode, nodes: int, steps: int, topk: int
) -> None:
    heads, state, sequence = make_heads(), state_of(nodes), sequence_of(text(9), mode)
    scored = depth_scores(heads, state, sequence)
    choices = best_tokens(scored, topk)
    every = [path for depth in range(1, steps + 1) for path in itertools.product(*choices[:depth])]
    worth = path_probs(every, scored)
    kept = sorted(every, key=lambda path: -worth[path])[:nodes]
    found = draft(make_drafter(heads, num_draft_tokens=nodes, num_steps=steps, topk=topk), sequence, state)
    same_tree(found, plain_tree(sequence.root, kept, scored))


@pytest.mark.parametrize("sampling", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.4}], ids=["top_k", "top_p", "min_p"])
def test_what_a_request_filters_out_is_not_drafted(sampling: dict[str, Any]) -> None:
    heads = make_heads(draft_vocab_size=VOCABULARY)
    probs = heads(state_of())[:, 0].double().softmax(-1)
    found = draft(make_drafter(heads), sequence_of(text(5), COUPLED, **sampling), state_of())
    assert found.drafted
    for path in scores_of(found):
        own = probs[len(path) - 1].sort(descending=True).values
        rank = int((own > probs[len(path) - 1][path[-1]]).sum())
        allowed = {
            "top_k": 2,
            "top_p": int((own.cumsum(0) < 0.5).sum()) + 1,
            "min_p": int((own >= 0.4 * own[0]).sum()),
        }
        assert rank < allowed[next(iter(sampling))]


def test_drawn_trees_carry_the_distribution_of_their_depth() -> None:
    heads = make_heads()
    assert heads.token_ids is not None
    ids = heads.token_ids.tolist()
    probs = heads(state_of())[:, 0].double().softmax(-1)
    trees = [draft(make_drafter(heads), sequence_of(text(6), REJECTION, seed=seed), state_of()) for seed in range(8)]
    assert len({tree.token_ids for tree in trees}) > 4
    for tree in trees:
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        assert tree.distributions.keys() == set(tree.parents[1:])
        for row, found in tree.distributions.items():
            expected = probs[len(paths[row])]
            # In integers, of which each is rounded.
            for token, weight in zip(found.token_ids, found.weights, strict=True):
                share = float(expected[ids.index(token)] / expected.max())
                assert weight == pytest.approx(max(1.0, share * max(found.weights)), abs=1.5)


def test_only_the_newest_vector_counts_and_it_stays_until_the_next() -> None:
    drafter, tokens = make_drafter(), text(30)
    assert features_of(drafter) == FeatureRequest((12,), WIDTH, "float32", window=1)
    sequence = sequence_of(tokens[:20])
    drafter.open(sequence)
    assert drafter.propose([sequence]) == [TokenTree.root_only(sequence.root)]
    feed(sequence, torch.randn(12, WIDTH), 0)
    drafter.absorb([sequence])
    assert drafter.propose([sequence]) == [TokenTree.root_only(sequence.root)]
    feed(sequence, torch.cat([torch.randn(6, WIDTH), state_of(1)]), 12)
    (tree,) = drafter.propose([sequence])
    same_tree(tree, draft(make_drafter(), sequence_of(tokens[:20]), state_of(1)))
    assert drafter.propose([sequence]) == [tree]
    # An advance without its vector, and one with.
    sequence.token_ids.extend(tokens[20:22])
    drafter.advance(sequence, tokens[20:22])
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[21])]
    sequence.token_ids.append(tokens[22])
    feed(sequence, state_of(2), 21)
    drafter.advance(sequence, tokens[22:23])
    same_tree(drafter.propose([sequence])[0], draft(make_drafter(), sequence_of(tokens[:23]), state_of(2)))
    # One vector of each of three feeds reached the heads.
    assert drafter.stats() == {"medusa_feature_rows_total": 3, "medusa_missing_features_total": 3}


def test_features_that_cannot_be_are_refused() -> None:
    drafter = make_drafter()
    sequence = sequence_of(text(5))
    drafter.open(sequence)
    with pytest.raises(InvalidField, match="shape"):
        feed(sequence, torch.zeros(2, WIDTH + 1), 0)
    feed(sequence, torch.zeros(6, WIDTH), 0)
    assert drafter.propose([sequence]) == [TokenTree.root_only(sequence.root)]
    drafter.close(sequence)
    drafter.close(sequence)


@pytest.mark.parametrize("mode", LOSSLESS_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38], ids=str)
def test_features_that_are_no_numbers_harm_their_sequence_only(mode: VerificationMode, value: float) -> None:
    drafter = make_drafter()
    harmed, other = sequence_of(text(6), mode), sequence_of(text(6), mode)
    for sequence, state in ((harmed, torch.full((1, WIDTH), value)), (other, state_of())):
        drafter.open(sequence)
        feed(sequence, state, 4)
    tree, expected = drafter.propose([harmed, other])
    same_tree(expected, draft(make_drafter(), sequence_of(text(6), mode), state_of()))
    TokenTree.checked(tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=VOCABULARY)
    if value != value:
        assert tree == TokenTree.root_only(harmed.root)


def test_sequences_of_all_modes_share_a_pass() -> None:
    """Trees of a mixed frame are those of each alone, also of sequences that have no vector yet."""
    drafter = make_drafter()
    sequences = [sequence_of(text(8, seed), mode) for seed, mode in enumerate((GREEDY, REJECTION, COUPLED) * 2)]
    for seed, sequence in enumerate(sequences):
        drafter.open(sequence)
        if seed != 3:
            feed(sequence, state_of(seed), 6)
    for seed, (sequence, tree) in enumerate(zip(sequences, drafter.propose(sequences), strict=True)):
        if seed == 3:
            assert tree == TokenTree.root_only(sequence.root)
            continue
        same_tree(tree, draft(make_drafter(), sequence_of(text(8, seed), sequence.mode), state_of(seed)))


def test_trees_as_arrays_are_the_same() -> None:
    drafter = make_drafter()
    sequences = [sequence_of(text(8, seed), mode) for seed, mode in enumerate((GREEDY, COUPLED, GREEDY))]
    for seed, sequence in enumerate(sequences):
        drafter.open(sequence)
        if seed:
            feed(sequence, state_of(seed), 6)
    assert drafter.start_trees(sequences).fetch().as_trees() == drafter.propose(sequences)


def test_merged_with_another_drafter_their_trees_are_joined() -> None:
    heads = MedusaDrafter(MedusaConfig(**(SETTINGS | {"num_draft_tokens": 4})), make_heads())
    merged = MergedDrafter(
        MergedConfig(merged_drafters="medusa,prompt_lookup", merged_nodes=30),
        [heads, PromptLookupDrafter(PromptLookupConfig())],
    )
    merged.start()
    wanted = features_of(merged)
    assert wanted is not None and wanted.layers == (12,) and not wanted.required
    sequence = sequence_of([5, 6, 7, 8, 9, 5, 6])
    merged.open(sequence)
    looked_up = merged.propose([sequence])[0]
    assert looked_up.token_ids[1:4] == (7, 8, 9)
    feed(sequence, state_of(), 5)
    both = set(scores_of(merged.propose([sequence])[0]))
    alone = set(scores_of(draft(make_drafter(num_draft_tokens=4), sequence_of(sequence.token_ids), state_of())))
    assert both == set(scores_of(looked_up)) | alone and alone


def test_more_levels_than_heads_and_no_heads_are_refused() -> None:
    with pytest.raises(SettingsError, match=f"there are {HEADS} heads"):
        make_drafter(num_steps=HEADS + 1)
    with pytest.raises(SettingsError, match="--head"):
        MedusaDrafter(MedusaConfig())
    with pytest.raises(SettingsError, match="gumbel_candidates"):
        MedusaConfig(gumbel_candidates=3)
