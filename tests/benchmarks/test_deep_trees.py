"""Deep trees of a head: what passes accept from each shape, masses by which levels are left out, walks and times."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eagle_heads import beginning

from benchmarks.running_ahead.deep_trees import (
    FLOOR,
    UNRANKED,
    FlooredTrees,
    Limit,
    PassCost,
    Ranks,
    TreeCase,
    figures_of,
    held_out_gains,
    narrowed,
    ranks_of,
    walk,
)
from benchmarks.running_ahead.head import Drawn, HeadTrees, pruned
from benchmarks.running_ahead.recording import Recording
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig

LEVELS, BREADTH = 5, 4
COST = PassCost(4.0, 1.0, 0.25)


@pytest.fixture(scope="module")
def toy() -> tuple[EagleHead, Recording]:
    """A head with random weights over a few tokens, which random texts often agree with."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 5, "draft_vocab_size": 5, "target_hidden_size": 32}
    shape = HeadConfig("eagle3", 32, 64, 4, 2, 8, num_features=3, feature_layers=(0, 1, 2), **sizes)
    head = beginning(EagleHead(shape)).requires_grad_(False).eval()
    with torch.no_grad():
        head.lm_head.weight.mul_(8.0)
    return head, Recording("toy", torch.randint(0, 5, (80,)).tolist(), 10, torch.randn(80, 96))


def accepted_by(drawn: Drawn, nodes: list[int], tokens: list[int]) -> int:
    """How many tokens a path of these nodes has."""
    node, count = 0, 0
    for token in tokens:
        below = [n for n in nodes if n and drawn.parents[n] == node and drawn.tokens[n] == token]
        if not below:
            return count
        node, count = below[0], count + 1
    return count


@pytest.mark.parametrize("width", [1, 3, 6])
def test_ranks_say_what_every_smaller_tree_accepts(toy: tuple[EagleHead, Recording], width: int) -> None:
    head, recording = toy
    trees = HeadTrees(head, LEVELS, 6, BREADTH).draw(recording)
    found = ranks_of(recording, trees, LEVELS, width)
    missing = 0
    for rows in (2, 5, 12, 40):
        accepted = found.accepted(rows)
        for place, (root, drawn) in enumerate(trees.items()):
            future = recording.token_ids[root + 1 : root + 1 + LEVELS]
            for levels in range(1, LEVELS + 1):
                nodes, lost = pruned(drawn, levels, width, BREADTH, rows - 1)
                assert accepted[place, levels - 1] == accepted_by(drawn, nodes.tolist(), future)
            missing += lost
    # Else the text never agrees with a deep tree, and nothing was tried.
    assert accepted.max() >= 3
    assert missing == 4 * found.missing


def test_floored_trees_have_all_likelier_paths_alone(toy: tuple[EagleHead, Recording]) -> None:
    head, recording = toy
    whole, floored = (kind(head, LEVELS, 6, BREADTH).draw(recording) for kind in (HeadTrees, FlooredTrees))
    left_out = 0
    for root, tree in whole.items():
        likelier = tree.path_probs >= FLOOR
        left_out += int((~likelier).sum())
        assert floored[root].path_probs == pytest.approx(tree.path_probs[likelier])
    assert left_out


def two_levels() -> Drawn:
    """Children of 0.6 and 0.3, of which the second has the likelier child."""
    return Drawn(
        tokens=np.array([9, 1, 2, 3, 4], np.int32),
        parents=np.array([0, 0, 0, 1, 2], np.int32),
        levels=np.array([0, 1, 1, 2, 2], np.int32),
        scores=np.array([1.0, 0.6, 0.3, 0.4, 0.9]),
        path_probs=np.array([1.0, 0.6, 0.3, 0.24, 0.27]),
        expanded=np.array([True, True, True, False, False]),
    )


def test_masses_are_those_of_the_frontiers() -> None:
    kept, masses, missing = narrowed(two_levels(), 2, 2)
    assert (kept.all(), missing) == (True, 0)
    assert masses == pytest.approx([0.9, 0.51])
    kept, masses, _ = narrowed(two_levels(), 2, 1)
    # What hangs below the second child is not drafted.
    assert kept.tolist() == [True, True, True, True, False]
    assert masses == pytest.approx([0.6, 0.24])
    # Leaves of the tree at hand, which a third level would expand.
    assert narrowed(two_levels(), 3, 2)[2] == 2


def test_places_are_by_path_probability_in_trees_of_each_depth() -> None:
    found = ranks_of(Recording("toy", [9, 2, 4], 0), {0: two_levels()}, 2, 2)
    assert found.ranks[0].tolist() == [[2, UNRANKED], [2, 3]]
    assert [found.accepted(rows)[0].tolist() for rows in (2, 3, 4)] == [[0, 0], [1, 1], [1, 2]]


def a_text(accepted: list[list[int]], masses: list[list[float]]) -> Ranks:
    """Accepted tokens and masses by position and levels."""
    levels = len(accepted[0])
    ranks = [[[1] * count + [UNRANKED] * (levels - count) for count in own] for own in accepted]
    return Ranks(np.array(ranks, np.int16), np.array(masses))


def test_levels_end_at_the_first_frontier_of_little_mass() -> None:
    masses = np.array([0.5, 0.1, 0.3, 0.2])
    assert [Limit(levels, 0.2).depth(masses) for levels in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert [Limit(4, mass).depth(masses) for mass in (0.0, 0.1, 0.6)] == [4, 4, 1]


def test_one_sequence_walks_a_text_to_its_end() -> None:
    text = a_text([[1, 2, 3]] * 6, [[0.9, 0.8, 0.7]] * 4 + [[0.1, 0.9, 0.9]] * 2)
    whole = walk([text], 1, 2, Limit(3), COST)
    # At 0 four tokens; at 4 there are two left.
    assert (whole.tokens, whole.passes, whole.levels) == (6, 2, 6)
    assert whole.milliseconds == 2 * 4.0 + 6 * 1.0
    less = walk([text], 1, 2, Limit(3, 0.5), COST)
    # At 4 two levels are left out.
    assert (less.tokens, less.passes, less.levels) == (6, 2, 4)
    assert less.milliseconds == 2 * 4.0 + 4 * 1.0 + 2 * 0.25
    assert less.figures() == {"tokens_per_s": 480.0, "tokens_per_pass": 3.0, "levels_per_pass": 2.0}
    both = walk([text, text], 1, 2, Limit(3, 0.5), COST)
    assert (both.tokens, both.passes, both.milliseconds) == (12, 4, 2 * less.milliseconds)
    # An answer of one token has no position.
    empty = Ranks(np.zeros((0, 3, 3), np.int16), np.zeros((0, 3)))
    assert walk([empty, text], 1, 2, Limit(3, 0.5), COST) == less


def test_sequences_of_a_pass_share_its_levels() -> None:
    sure, unsure = a_text([[1, 2]] * 6, [[0.9, 0.9]] * 6), a_text([[0, 1]] * 6, [[0.3, 0.3]] * 6)
    deep = walk([sure, unsure], 2, 2, Limit(2, 0.6), COST)
    # The mean mass is 0.6: three tokens and two, until the first text ends.
    assert (deep.tokens, deep.passes, deep.levels) == (10, 2, 4)
    assert deep.figures()["tokens_per_pass"] == 2.5
    flat = walk([sure, unsure], 2, 2, Limit(2, 0.61), COST)
    assert (flat.tokens, flat.passes, flat.levels) == (9, 3, 3)
    # A text behind takes the place of one that ends; a text left over is not walked alone.
    assert walk([unsure, sure, sure], 2, 2, Limit(2), COST).passes == 2 + 1
    assert walk([sure], 2, 2, Limit(2), COST).passes == 0


def test_a_case_has_figures_of_every_limit_and_counts_all_its_sequences() -> None:
    texts = [a_text([[1, 2]] * 6, [[0.9, 0.9]] * 6)] * 4
    alone, together = (
        figures_of(texts, TreeCase(streams, 2, 8, COST), [Limit(1), Limit(2)])["walks"] for streams in (1, 4)
    )
    assert [one["levels"] for one in alone] == [1, 2]
    for one, four in zip(alone, together, strict=True):
        assert four["tokens_per_s"] == pytest.approx(4 * one["tokens_per_s"], rel=1e-3)
        assert four["tokens_per_pass"] == one["tokens_per_pass"]


def test_gains_are_those_of_a_limit_in_texts_that_did_not_choose_it() -> None:
    case, flat, deep = TreeCase(1, 2, 8, COST), Limit(1), Limit(2)
    one, two = a_text([[1, 1]] * 6, [[0.9, 0.9]] * 6), a_text([[0, 2]] * 6, [[0.9, 0.9]] * 6)
    gains = held_out_gains([one, two], case, [deep], [flat, deep])
    # The first text chooses one level, which the second loses by: six passes of 5 ms for two of 6. That chooses two.
    assert {round(gain, 9) for gain in gains} == {round(12 / 30 - 1, 9), 0.0}


def test_gains_are_beside_the_best_fixed_depth() -> None:
    """Two of three positions accept nothing, and their masses say so."""
    text = a_text([[0, 0], [0, 0], [1, 2]] * 6, [[0.1, 0.9], [0.1, 0.9], [0.9, 0.9]] * 6)
    flat, deep, least = (walk([text], 1, 2, limit, COST) for limit in (Limit(1), Limit(2), Limit(2, 0.5)))
    assert least.tokens == deep.tokens == flat.tokens and least.levels < deep.levels
    gains = held_out_gains([text] * 4, TreeCase(1, 2, 8, COST), [Limit(1), Limit(2)], [Limit(2, 0.5)])
    fixed = min(flat.milliseconds, deep.milliseconds)
    assert gains == pytest.approx([fixed / least.milliseconds - 1] * len(gains))
