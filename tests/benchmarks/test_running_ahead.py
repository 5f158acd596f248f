"""Drafts that run ahead, on toy recordings: what passes accept, late trees, holds, pruning, and corrections."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_heads import beginning

from benchmarks.running_ahead import tables as running_ahead_tables
from benchmarks.running_ahead.calibration import Correction, by_bin, corrected, factor_of, fit, judged, table_of_chain
from benchmarks.running_ahead.costs import PLAIN_MS, fits, pass_ms, ratio
from benchmarks.running_ahead.drafts import LOOKUP, Drafts, read_trees, write_trees
from benchmarks.running_ahead.head import Drawn, HeadTrees, pruned
from benchmarks.running_ahead.recording import Recording
from benchmarks.running_ahead.simulate import USUAL, Study, claim, left_at
from benchmarks.running_ahead.tables import markdown
from benchmarks.running_ahead.walk import (
    ELSEWHERE,
    INSTEAD,
    NOWHERE,
    Chain,
    Table,
    Tally,
    Way,
    follow,
    looked_up,
    mended,
    merged,
    rows_of,
    table_of,
    tree_of,
    walk,
)
from draft_service.drafters.base import DraftSequence
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from outrider.tree import TokenTree

# The answer begins at position 2; roots are 2 .. 8.
TEXT = [50, 51, 0, 1, 2, 3, 4, 5, 6, 7]
ROOTS = range(2, 9)
NO_CHAINS = dict.fromkeys(ROOTS, Chain())


def chain_table(tokens: list[int], score: float = 0.9) -> Table:
    table, node = Table(), 0
    for token in tokens:
        node = table.add(node, token, score)
    return table


def right_trees(depth: int) -> dict[int, Table]:
    """From every root, what the text says next."""
    return {root: chain_table(TEXT[root + 1 : root + 1 + depth]) for root in ROOTS}


def test_lockstep_accepts_what_is_drafted_and_one_more() -> None:
    tally = walk(TEXT, ROOTS, right_trees(2), NO_CHAINS, Way(2, 0))
    # Roots 2, 5, 8.
    assert (tally.passes, tally.tokens, tally.rows, tally.hits) == (3, 7, 5, 3)


def test_one_behind_walks_down_an_older_tree() -> None:
    tally = walk(TEXT, ROOTS, right_trees(8), NO_CHAINS, Way(2, 1))
    # Root 2 has nothing yet; 3 and 6 have what hangs below them in the trees of 2 and 3.
    assert (tally.passes, tally.hits, tally.misses) == (3, 2, 1)
    assert (tally.miss_tokens, tally.hit_tokens) == (1, 6)


def test_a_leaf_is_a_miss() -> None:
    tally = walk(TEXT, ROOTS, right_trees(1), NO_CHAINS, Way(2, 1))
    assert (tally.hits, tally.passes) == (0, 7)


def test_two_behind_needs_deeper_trees() -> None:
    shallow = walk(TEXT, ROOTS, right_trees(3), NO_CHAINS, Way(1, 2))
    deep = walk(TEXT, ROOTS, right_trees(5), NO_CHAINS, Way(1, 2))
    # Roots 2, 3, 4, 6, 7, 8: the first two have nothing yet, and 6 and 7 stand at leaves of the trees of 3 and 4.
    assert (shallow.tokens, shallow.passes, shallow.hits) == (7, 6, 2)
    # Roots 2, 3, 4, 6, 8.
    assert (deep.tokens, deep.passes, deep.hits) == (7, 5, 3)


def test_held_passes_have_the_tree_of_their_own_root() -> None:
    never = walk(TEXT, ROOTS, right_trees(2), NO_CHAINS, Way(2, 1))
    missed = walk(TEXT, ROOTS, right_trees(2), NO_CHAINS, Way(2, 1, "miss"))
    assert missed.held > 0
    assert missed.passes < never.passes
    assert missed.hits + missed.held == missed.passes


def test_a_promise_that_is_short_holds_a_pass() -> None:
    trees = {root: chain_table(TEXT[root + 1 : root + 5], 0.1) for root in ROOTS}
    assert walk(TEXT, ROOTS, trees, NO_CHAINS, Way(2, 1, "promise", 1.05)).held == 1
    tally = walk(TEXT, ROOTS, trees, NO_CHAINS, Way(2, 1, "promise", 2.0))
    assert tally.held == tally.passes


def test_near_trees_are_for_held_passes_alone() -> None:
    nothing = {root: Table() for root in ROOTS}
    tally = walk(TEXT, ROOTS, nothing, NO_CHAINS, Way(2, 1, "miss"), right_trees(2))
    assert (tally.passes, tally.held, tally.held_tokens) == (3, 3, 7)


def test_rows_are_the_most_probable_paths() -> None:
    table = Table()
    low, high = table.add(0, 1, 0.3), table.add(0, 2, 0.6)
    table.add(low, 3, 1.0)
    table.add(high, 4, 0.4)
    found = rows_of(table, 0, Chain(), 3, [1, 3, 9])
    # 2 (0.6), 1 (0.3), 1 3 (0.3); 2 4 (0.24) is left out.
    assert (found.count, found.accepted) == (3, 2)
    assert found.expected == pytest.approx(1.2)
    assert rows_of(table, 0, Chain(), 2, [1, 3, 9]).accepted == 1
    assert rows_of(table, NOWHERE, Chain(), 2, [1]).count == 0


def test_a_tree_that_was_left_is_mended() -> None:
    table = Table()
    first, other = table.add(0, 1, 0.6), table.add(0, 2, 0.2)
    table.add(table.add(first, 3, 0.5), 4, 0.5)
    table.add(other, 5, 0.5)
    # 9 stands where 1 was to: 3 4 may follow.
    new = mended(table, 0, 9, last=True)
    assert new.walk([3, 4]) != NOWHERE
    assert new.walk([1]) == NOWHERE
    assert new.walk([5]) == NOWHERE
    assert new.children[0][3][1] == pytest.approx(0.5 * INSTEAD)
    assert follow(table, [9, 3], mend=True)[1] != NOWHERE
    assert follow(table, [9, 3], mend=False)[1] == NOWHERE
    assert follow(table, [2, 5, 7], mend=True)[1] == NOWHERE


def test_a_tree_that_was_left_lends_what_follows_a_token_elsewhere() -> None:
    table = Table()
    table.add(table.add(table.add(0, 1, 0.6), 3, 0.5), 4, 0.5)
    table.add(table.add(table.add(0, 2, 0.2), 3, 0.9), 5, 0.5)
    table.add(0, 6, 0.1)
    # The likelier 3 of both, whether its place was another or a leaf's, or the tree was left before.
    for tokens in ([3], [9, 3], [1, 9, 3]):
        new, node = follow(table, tokens, mend=True)
        assert new.children[node][4][1] == pytest.approx(0.5 * ELSEWHERE) and 5 not in new.children[node]
    assert follow(table, [6], mend=True) == (table, 5 + 2)
    assert mended(table, 0, 8, last=False).children == [{}]


def test_mended_trees_say_more_where_a_word_was_exchanged() -> None:
    trees = {root: chain_table([77, *TEXT[root + 2 :]]) for root in ROOTS}
    plain = walk(TEXT, ROOTS, trees, NO_CHAINS, Way(4, 1))
    better = walk(TEXT, ROOTS, trees, NO_CHAINS, Way(4, 1, mend=True))
    assert plain.tokens == better.tokens
    assert better.passes < plain.passes
    # A tree that was left is a miss all the same.
    assert better.hits == plain.hits == 0


def test_a_looked_up_chain_hangs_where_it_leaves_the_tree() -> None:
    table = chain_table([1, 2], 0.5)
    found = rows_of(table, 0, Chain((1, 7, 8), 0.8, 0.9), 9, [1, 7, 8])
    # 1 is one node, with the higher probability; below it 2 and 7 are scaled to 1.
    assert (found.count, found.accepted) == (4, 3)
    below = 0.8 * (0.5 + 0.9 + 0.9 * 0.9) / 1.4
    assert found.expected == pytest.approx(0.8 + below)


def test_rows_are_those_of_merged_trees() -> None:
    dice = np.random.default_rng(0)
    for _ in range(20):
        table, chain = Table(), Chain((1, 2, 1), 0.7, 0.6)
        while len(table.children) < 30:
            parent, token = int(dice.integers(len(table.children))), int(dice.integers(4))
            if token not in table.children[parent]:
                table.add(parent, token, float(dice.random()))
        future = [1, 2, 1, 3]
        whole = merged([table, table_of_chain(chain)], 10)
        found = rows_of(table, 0, chain, 10, future)
        assert found.count == len(whole.children) - 1
        assert found.accepted == rows_of(whole, 0, Chain(), 10, future).accepted


def test_tables_are_trees() -> None:
    tree = TokenTree((9, 1, 2, 3), (0, 0, 0, 1), (1.0, 0.5, 0.25, 0.5))
    assert tree_of(table_of(tree, 3), 9) == tree
    assert table_of(tree, 2).walk([1, 3]) == NOWHERE
    assert table_of(tree, 3).walk([1, 3]) == 3


def test_lookup_goes_on_with_itself() -> None:
    chain = looked_up([1, 2, 3, 1, 2])
    assert chain.tokens[:6] == (3, 1, 2, 3, 1, 2)
    assert looked_up([1, 2, 3]) == Chain()


def test_misses_say_where_tokens_left_the_tree() -> None:
    table = chain_table([1, 2])
    said = [left_at(table, tokens) for tokens in ([1], [5], [1, 5, 3], [1, 2], [1, 2, 3])]
    assert said == [
        "hit",
        "own token is another child",
        "accepted token is another child",
        "root is a leaf",
        "own token is below a leaf",
    ]


def test_a_figure_sums_its_recordings_by_task() -> None:
    drafts = []
    for task, repeats in (("a", 4), ("b", 1), ("a", 1)):
        recording = Recording(task, [1, 2, 3] * repeats + [8, 9, 7], 3)
        chains = {root: looked_up(recording.token_ids[: root + 1]) for root in recording.roots}
        drafts.append(Drafts(recording, {}, {}, chains))
    figure = Study(drafts).figure("blind", LOOKUP, USUAL, Way(15, 1))
    # The first has passes at 3, which accepts all that repeats, 12 and 13: 9 + 1 + 1 tokens. The others repeat nothing.
    assert figure["tasks"] == {"a": 2.6, "b": 1.0}
    assert figure["passes"] == 7
    assert figure["tokens"] == pytest.approx(15 / 7, abs=1e-3)
    assert figure["ratio_by_prompt"][1] == figure["ratio_by_prompt"][2] < figure["ratio_by_prompt"][0]


def test_costs() -> None:
    assert pass_ms(1) == PLAIN_MS
    assert pass_ms(4) < pass_ms(10) < pass_ms(16)
    assert fits(16)
    assert not fits(17)
    tally = Tally(passes=2, tokens=4, held=1)
    assert ratio(tally, Way(0, 1), 4.37) == pytest.approx(4 / 3)
    assert ratio(tally, Way(0, 0), 4.37) == pytest.approx(1.0)


def test_corrections_are_found_again() -> None:
    dice = np.random.default_rng(1)
    pairs = []
    for _ in range(4000):
        score = float(dice.uniform(0.05, 0.95))
        odds = 0.5 + 1.5 * math.log(score / (1 - score))
        right = dice.random() < 1 / (1 + math.exp(-odds))
        pairs.append((chain_table([1], score), [1 if right else 2]))
    nodes = judged(pairs)
    correction = fit(nodes, deeper=False)
    assert correction.base == pytest.approx(0.5, abs=0.15)
    assert correction.slope == pytest.approx(1.5, abs=0.15)
    assert Correction()(0.3, 4) == pytest.approx(0.3)
    assert factor_of(nodes) > 1.0
    assert sum(one["nodes"] for one in by_bin(pairs)) == 4000


def test_corrections_are_those_of_a_nodes_depth() -> None:
    table = chain_table([1, 2], 0.5)
    found = corrected({4: table}, lambda score, depth: score / depth)
    assert found[4].children[0][1] == (1, 0.5)
    assert found[4].children[1][2] == (2, 0.25)
    assert table.children[1][2] == (2, 0.5)


def test_a_folder_is_kept_for_one_choice_of_settings(tmp_path: Path) -> None:
    claim(tmp_path / "kept", {"tokens": 112})
    claim(tmp_path / "kept", {"tokens": 112})
    with pytest.raises(ValueError, match="other settings"):
        claim(tmp_path / "kept", {"tokens": 64})
    with pytest.raises(ValueError, match="has no settings"):
        claim(tmp_path, {"tokens": 112})


def test_stored_tables_are_those_of_the_stored_figures() -> None:
    results = Path(running_ahead_tables.__file__).parents[1] / "results"
    document = json.loads((results / "2026-11-22-cpu-running-ahead.json").read_text())
    assert markdown(document) == (results / "2026-11-22-cpu-running-ahead.md").read_text()


@pytest.fixture(scope="module")
def drawn() -> tuple[EagleHead, Recording]:
    """A head with random weights, and random states."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 90, "draft_vocab_size": 90, "target_hidden_size": 32}
    shape = HeadConfig("eagle3", 32, 64, 4, 2, 8, num_features=3, feature_layers=(0, 1, 2), **sizes)
    head = beginning(EagleHead(shape)).requires_grad_(False).eval()
    with torch.no_grad():
        head.lm_head.weight.mul_(4.0)
    text = torch.randint(0, 90, (24,)).tolist()
    return head, Recording("toy", text, 18, torch.randn(24, 96))


def test_trees_are_those_of_the_drafter(drawn: tuple[EagleHead, Recording]) -> None:
    head, recording = drawn
    assert recording.states is not None
    trees = HeadTrees(head, levels=5, width=8, breadth=4, batch=3).draw(recording)
    assert list(trees) == list(recording.roots)
    config = EagleConfig(num_steps=4, topk=3, num_draft_tokens=20, min_score=0.0, dtype="float32", kv_tokens=4096)
    drafter = EagleDrafter(config, head)
    drafter.start()
    for root, tree in trees.items():
        sequence = DraftSequence(1, recording.token_ids[: root + 1], 18, 90)
        drafter.open(sequence)
        assert sequence.features is not None
        assert drafter.features is not None
        states = recording.states[:root]
        sequence.features.append(head.project(states).detach() if drafter.features.projected else states, 0)
        expected = drafter.propose([sequence])[0]
        drafter.close(sequence)
        items, missing = pruned(tree, 4, 3, 3, 20)
        assert missing == 0
        assert tree.path_probs[items][1:] == pytest.approx(path_probs(expected)[1:], rel=1e-3)


def path_probs(tree: TokenTree) -> list[float]:
    found = [1.0]
    for row in range(1, len(tree)):
        found.append(found[tree.parents[row]] * tree.scores[row])
    return found


def test_trees_are_kept_as_they_were_drawn(tmp_path: Path) -> None:
    drawn = Drawn(
        tokens=np.array([7, 8, 9], np.int32),
        parents=np.array([0, 0, 1], np.int32),
        levels=np.array([0, 1, 2], np.int32),
        scores=np.array([1.0, 0.5, 0.25]),
        path_probs=np.array([1.0, 0.5, 0.125]),
        expanded=np.array([True, True, False]),
    )
    write_trees(tmp_path / "trees.safetensors", {3: drawn, 12: drawn})
    found = read_trees(tmp_path / "trees.safetensors")
    assert list(found) == [3, 12]
    for tree in found.values():
        assert all(np.array_equal(getattr(tree, each.name), getattr(drawn, each.name)) for each in fields(Drawn))
