"""That simulated acceptance is what was asked for, whatever the head drafts."""

from __future__ import annotations

import random

import pytest

from benchmarks.engine.simulated_drafter import Simulation, _Script, likeliest_path, read_answers, write_answers
from outrider.tree import TokenTree

VOCABULARY = 50


def drafted(dice: random.Random, chain: bool) -> TokenTree:
    """A chain of five, or five levels of three, with tokens that may be right by chance."""
    if chain:
        tokens = [dice.randrange(VOCABULARY) for _ in range(6)]
        return TokenTree(tuple(tokens), (0, 0, 1, 2, 3, 4), (1.0,) * 6)
    tokens, parents, last = [3], [0], 0
    for _ in range(5):
        tokens += dice.sample(range(VOCABULARY), 3)
        parents += [last] * 3
        last = len(tokens) - 3
    return TokenTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens))


def accepted(tree: TokenTree, ahead: list[int]) -> int:
    """Nodes that a greedy target keeps."""
    row = depth = 0
    while True:
        hits = [child for child in tree.children[row] if depth < len(ahead) and tree.token_ids[child] == ahead[depth]]
        if not hits:
            return depth
        row, depth = hits[0], depth + 1


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_depths_are_reached_with_the_rates_asked_for(chain: bool) -> None:
    dice, rates, runs = random.Random(1), (0.9, 0.5, 0.8), 3000
    simulation, reached = Simulation(rates, VOCABULARY), [0] * 5
    script = _Script([dice.randrange(VOCABULARY) for _ in range(40)], random.Random(2))
    for _ in range(runs):
        script.committed = dice.randrange(30)
        tree = simulation.rewrite(drafted(dice, chain), script)
        TokenTree.checked(tree.token_ids, tree.parents, tree.scores, vocabulary_size=VOCABULARY)
        for depth in range(accepted(tree, list(script.answer[script.committed :]))):
            reached[depth] += 1
    expected = [0.9, 0.45, 0.36, 0.288, 0.2304]
    # Three standard deviations of a share of so many runs.
    assert [count / runs for count in reached] == pytest.approx(expected, abs=3 * (0.25 / runs) ** 0.5)


def test_nothing_right_is_drafted_past_the_answer_or_for_one_that_was_left() -> None:
    dice = random.Random(3)
    simulation, answer = Simulation((1.0,), VOCABULARY), [5, 6, 7]
    assert accepted(simulation.rewrite(drafted(dice, True), _Script(answer, dice, committed=1)), [6, 7]) == 2
    left = _Script(answer, dice, committed=1, departed=True)
    tree = TokenTree((1, 9, 9), (0, 0, 1), (1.0, 1.0, 1.0))
    assert simulation.rewrite(tree, left).token_ids == tree.token_ids


def test_scores_say_what_was_promised() -> None:
    dice = random.Random(4)
    tree = Simulation((0.7, 0.6), VOCABULARY).rewrite(drafted(dice, False), _Script([1] * 9, dice))
    path = likeliest_path(tree)
    assert [tree.scores[row] for row in path] == [0.7, 0.6, 0.6, 0.6, 0.6]
    assert sum(tree.scores[row] for row in tree.children[0]) == pytest.approx(1.0)


def test_answers_come_back_from_their_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "answers.json"
    write_answers(path, [((1, 2), (3, 4)), ((5,), ())])
    assert read_answers(path) == {(1, 2): (3, 4), (5,): ()}
