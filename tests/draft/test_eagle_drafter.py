"""The EAGLE drafter against a plain head: the same trees, however features come in and whoever else is drafted for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from eagle_heads import KINDS, VOCABULARY, PlainHead, make_head
from torch import Tensor

from draft_service.drafter import DraftSequence, FeatureDrafter, features_of
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.features import FeatureWindow
from outrider import noise
from outrider.errors import InvalidField
from outrider.frames import FeatureRequest, TreeLimits
from outrider.sampling import SamplingParams, VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree

GREEDY, COUPLED, REJECTION = VerificationMode.GREEDY, VerificationMode.COUPLED, VerificationMode.REJECTION
SETTINGS: dict[str, Any] = {
    "num_steps": 4,
    "topk": 3,
    "num_draft_tokens": 14,
    "min_score": 0.0,
    "race_entrants": VOCABULARY,
    "projection": "draft",
    "feature_dtype": "float32",
    "dtype": "float32",
    "kv_tokens": 2048,
    "page_size": 8,
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
    """A node of the plain tree."""

    worth: float
    score: float
    token: int
    parent: int
    path: list[int]
    row: int | None = None


def plain_tree(head: EagleHead, tokens: Sequence[int], states: Tensor, first: int = 0, **options: Any) -> TokenTree:
    """EAGLE-2's tree, written down one node at a time. `options` as SETTINGS, and `score(law, depth)`."""
    shape = SETTINGS | options
    score = options.get("score", lambda law, _: law)
    plain = PlainHead(head)
    plain.read(tokens, states[first : len(tokens) - 1], first)
    root = len(plain.rows) - 1
    # Node 0 is the root; `row` is the plain head's, once it was expanded, and `path` those of the nodes above it.
    nodes = [Node(1.0, 1.0, tokens[-1], 0, [], row=root)]
    frontier = [0]
    for depth in range(1, shape["num_steps"] + 1):
        first_new = len(nodes)
        for number in frontier:
            node = nodes[number]
            if node.row is None:
                above = plain.rows[nodes[node.parent].row or 0]
                node.row = plain.add(node.token, above.feature, len(tokens) - 3 + depth, [*range(root + 1), *node.path])
            scores = score(plain.law(node.row), depth)
            path = [*node.path, node.row] if number else []
            for token in scores.argsort(descending=True)[: shape["topk"]].tolist():
                own = float(scores[token])
                nodes.append(Node(node.worth * own, own, token, number, path))
        added = range(first_new, len(nodes))
        frontier = heapq.nlargest(shape["topk"], added, key=lambda number: nodes[number].worth)
    ranked = sorted(range(1, len(nodes)), key=lambda number: -nodes[number].worth)
    rows = {number: row for row, number in enumerate([0, *ranked[: shape["num_draft_tokens"]]])}
    return TokenTree(
        tuple(nodes[number].token for number in rows),
        tuple(rows[nodes[number].parent] for number in rows),
        tuple(nodes[number].score for number in rows),
    )


def same_tree(found: TokenTree, expected: TokenTree) -> None:
    assert (found.token_ids, found.parents) == (expected.token_ids, expected.parents)
    assert found.scores == pytest.approx(expected.scores, rel=1e-3)
    assert found.distributions.keys() == expected.distributions.keys()
    for row, law in expected.distributions.items():
        # Rounded to integers, sums in another order may differ by one or two.
        weights = dict(zip(law.token_ids, law.weights, strict=True))
        other = found.distributions[row]
        assert dict(zip(other.token_ids, other.weights, strict=True)) == pytest.approx(weights, abs=2)


def draft(drafter: EagleDrafter, tokens: Sequence[int], states: Tensor, *arguments: Any, **options: Any) -> TokenTree:
    """The tree of a sequence that is followed for this tree alone."""
    sequence = opened(drafter, sequence_of(tokens, *arguments, **options), states)
    (tree,) = drafter.propose([sequence])
    drafter.close(sequence)
    assert drafter.stats()["eagle_cache_used_tokens"] == 0
    return tree


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
    """Scores of COUPLED: each token's chance of winning the race, when the law is trusted so far."""

    def score(law: Tensor, depth: int) -> Tensor:
        ids = np.arange(VOCABULARY)
        noises = noise.exponentials(noise.noise_words(seed, length + depth - 1, ids))
        weights = (law / torch.from_numpy(noises)) ** sharpness
        return weights / weights.sum()

    return score


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_coupled_trees_run_the_shared_race(sharpness: float) -> None:
    head = make_head()
    tokens, states = text(12), states_of(head, 12)
    seed = 2**63 + 5
    found = draft(make_drafter(head, race_sharpness=sharpness), tokens, states, COUPLED, seed=seed)
    expected = plain_tree(head, tokens, states, score=race_of(seed, len(tokens), sharpness))
    same_tree(found, expected)


def test_a_sharp_race_drafts_the_token_that_the_target_will_draw() -> None:
    """Where the head's law is the target's own, the first child is the target's draw, at every depth."""
    head = make_head(draft_vocab_size=VOCABULARY)
    tokens, states = text(12), states_of(head, 12)
    for seed in range(20):
        tree = draft(make_drafter(head, race_sharpness=8.0, topk=1), tokens, states, COUPLED, seed=seed)
        plain = PlainHead(head)
        plain.read(tokens, states[:-1])
        row, visible = len(plain.rows) - 1, list(range(len(plain.rows)))
        for depth, token in enumerate(tree.token_ids[1:]):
            race = noise.exponentials(noise.noise_words(seed, len(tokens) + depth, np.arange(VOCABULARY)))
            assert token == int((torch.from_numpy(race) / plain.law(row)).argmin())
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
    law = plain.law(len(plain.rows) - 1, 1.4)
    allowed = allowed_by(law, **filters)
    for seed in range(5):
        tree = draft(make_drafter(head), tokens, states, mode, seed=seed, temperature=1.4, **filters)
        assert {tree.token_ids[child] for child in tree.children[0]} <= allowed
        if mode is REJECTION:
            drawn_from = tree.distributions[0]
            assert set(drawn_from.token_ids) == allowed
            share = law[list(drawn_from.token_ids)] / law[list(allowed)].sum()
            weights = torch.tensor(drawn_from.weights, dtype=torch.float64)
            assert torch.allclose(weights / weights.sum(), share, atol=1e-4)


def allowed_by(law: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """In the target's order: min_p, top_k, and top_p as a share of what they leave."""
    ranked = [token for token in law.argsort(descending=True).tolist() if law[token] >= min_p * law.max()]
    ranked = ranked[: top_k or None]
    share, before, kept = top_p * float(law[ranked].sum()), 0.0, set()
    for token in ranked:
        if before < share:
            kept.add(token)
        before += float(law[token])
    return kept


@pytest.mark.parametrize("mode", VerificationMode, ids=lambda mode: mode.value)
def test_features_may_come_in_any_pieces(mode: VerificationMode) -> None:
    """Trees along the way, rejected every time, leave no trace: what is read step by step is what is read at once."""
    head = make_head()
    tokens, states = text(40), states_of(head, 40)
    drafter = make_drafter(head, max_rows=5)
    sequence = sequence_of(tokens[:10], mode)
    drafter.open(sequence)
    for begin in range(0, 9, 4):
        feed(sequence, states[begin : min(begin + 4, 9)], begin)
    length = 10
    for step in (0, 1, 3, 1, 8, 2):
        before, length = length, length + step
        if step:
            sequence.token_ids.extend(tokens[before:length])
            feed(sequence, states[before - 1 : length - 1], before - 1)
            drafter.advance(sequence, tokens[before:length])
        (tree,) = drafter.propose([sequence])
        same_tree(tree, draft(make_drafter(head), tokens[:length], states, mode))
        (again,) = drafter.propose([sequence])
        same_tree(again, tree)


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


def test_a_window_may_begin_late() -> None:
    """Positions stay true, and the tree is that of a head that never saw what came before."""
    head = make_head()
    tokens, states = text(30), states_of(head, 30)
    drafter = make_drafter(head)
    sequence = sequence_of(tokens)
    drafter.open(sequence)
    feed(sequence, states[19:29], 19)
    (tree,) = drafter.propose([sequence])
    same_tree(tree, plain_tree(head, tokens, states, first=19))


def test_without_the_last_feature_nothing_is_drafted_and_later_it_is() -> None:
    head = make_head()
    tokens, states = text(20), states_of(head, 20)
    drafter = make_drafter(head)
    sequence = sequence_of(tokens[:8])
    drafter.open(sequence)
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[7])]
    feed(sequence, states[:4], 0)
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[7])]
    feed(sequence, states[4:7], 4)
    assert drafter.propose([sequence])[0].drafted
    # An advance without its features, and one with: what lies between is never known, and drafting goes on.
    sequence.token_ids.extend(tokens[8:11])
    drafter.advance(sequence, tokens[8:11])
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[10])]
    sequence.token_ids.extend(tokens[11:13])
    feed(sequence, states[10:12], 10)
    drafter.advance(sequence, tokens[11:13])
    assert drafter.propose([sequence])[0].drafted
    assert drafter.stats()["eagle_missing_features_total"] == 3


def test_features_that_cannot_be_are_refused() -> None:
    drafter = make_drafter()
    sequence = sequence_of(text(5))
    drafter.open(sequence)
    width = 3 * 16
    with pytest.raises(InvalidField, match="shape"):
        feed(sequence, torch.zeros(2, width + 1), 0)
    with pytest.raises(InvalidField, match="floating"):
        feed(sequence, torch.zeros(2, width, dtype=torch.int32), 0)
    with pytest.raises(InvalidField, match="position"):
        feed(sequence, torch.zeros(2, width), -1)
    feed(sequence, torch.zeros(6, width), 0)
    # The root's own cannot be known, nor what comes after it.
    assert drafter.propose([sequence]) == [TokenTree.root_only(sequence.root)]
    sequence.token_ids.append(3)
    with pytest.raises(InvalidField, match="5 tokens can have one"):
        drafter.advance(sequence, [3])
    drafter.close(sequence)
    drafter.close(sequence)


def test_a_full_cache_costs_drafts_only() -> None:
    head = make_head()
    drafter = make_drafter(head, kv_tokens=64)
    states = states_of(head, 40)
    first, second = (opened(drafter, sequence_of(text(length, i)), states) for i, length in enumerate((35, 30)))
    trees = drafter.propose([first, second])
    assert trees[0].drafted and trees[1] == TokenTree.root_only(second.root)
    assert drafter.stats()["eagle_cache_full_total"] == 1
    drafter.close(first)
    (tree,) = drafter.propose([second])
    same_tree(tree, plain_tree(head, second.token_ids, states))


def test_features_may_be_projected_by_the_target() -> None:
    head = make_head(fc_norm=True)
    tokens, states = text(15), states_of(head, 15)
    drafter = make_drafter(head, projection="target")
    assert features_of(drafter) == FeatureRequest((1, 5, 8), 16, "float32", projected=True)
    assert features_of(make_drafter(head)) == FeatureRequest((1, 5, 8), 48, "float32", projected=False)
    same_tree(draft(drafter, tokens, head.project(states)), draft(make_drafter(head), tokens, states))


def test_bfloat16_drafts_and_repeats_itself() -> None:
    head = make_head().to(torch.bfloat16)
    tokens, states = text(25), states_of(head, 25)
    trees = [draft(make_drafter(head), tokens, states, mode) for mode in VerificationMode for _ in range(2)]
    assert trees[0] == trees[1] and trees[2] == trees[3] and trees[4] == trees[5]
    exact = draft(make_drafter(make_head()), tokens, states)
    assert trees[0].token_ids[1] == exact.token_ids[1]
    assert trees[0].scores[1] == pytest.approx(exact.scores[1], abs=0.05)


@pytest.mark.parametrize("mode", VerificationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("floor", [0.0, 0.02, 0.3])
def test_every_tree_is_well_formed(mode: VerificationMode, floor: float) -> None:
    head = make_head()
    drafter = make_drafter(head, min_score=floor, num_draft_tokens=20, num_steps=5, topk=4)
    for seed in range(8):
        tokens, states = text(6 + seed, seed), states_of(head, 6 + seed, seed)
        tree = draft(drafter, tokens, states, mode, seed=seed)
        TokenTree.checked(tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=VOCABULARY)
        worths = [1.0]
        for row in range(1, len(tree)):
            worths.append(worths[tree.parents[row]] * tree.scores[row])
        assert all(worths[row] >= worths[row + 1] - 1e-12 for row in range(1, len(tree) - 1)), "best first"
        assert all(worth >= floor - 1e-9 for worth in worths)
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
        {"num_draft_tokens": 256},
        {"topk": 0},
        {"num_steps": 40, "topk": 8},
        {"min_score": 2.0},
        {"page_size": 0},
        {"race_entrants": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        EagleConfig(**(SETTINGS | settings))
    with pytest.raises(SettingsError, match="needs a head"):
        EagleDrafter(EagleConfig())


def test_the_window_keeps_what_is_newest() -> None:
    window = FeatureWindow(2, 4)
    values = torch.arange(20.0).view(10, 2)
    window.append(values[:3], 0)
    window.append(values[2:6], 2)
    assert (window.begin, window.end, len(window)) == (2, 6, 4)
    begin, taken = window.take(3)
    assert begin == 2 and torch.equal(taken, values[2:5])
    window.append(values[9:], 9)
    begin, taken = window.take()
    assert (begin, window.begin, window.end) == (9, 10, 10) and torch.equal(taken, values[9:])
    assert window.take()[1].shape == (0, 2)
