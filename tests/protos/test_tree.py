"""The token tree keeps its rules, and refuses whatever breaks them with the path of the part at fault."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidField
from outrider.tree import MAX_ROWS, DraftDistribution, TokenTree

VOCABULARY = 50


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 40) -> TokenTree:
    rows = draw(st.integers(1, max_rows))
    parents = [0] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]
    tokens = [draw(st.integers(0, VOCABULARY - 1))]
    taken: dict[int, set[int]] = {}
    for row in range(1, rows):
        siblings = taken.setdefault(parents[row], set())
        token = draw(st.integers(0, VOCABULARY - 1).filter(lambda each, used=siblings: each not in used))
        siblings.add(token)
        tokens.append(token)
    scores = [1.0] + [draw(st.floats(0, 1, width=32)) for _ in range(1, rows)]
    return TokenTree.checked(tokens, parents, scores, vocabulary_size=VOCABULARY)


@given(trees())
def test_every_row_hangs_below_the_root_at_its_depth(tree: TokenTree) -> None:
    assert tree.drafted == len(tree) - 1
    for row in range(len(tree)):
        steps, at = 0, row
        while at:
            assert row in tree.children[row] or tree.parents[at] < at
            at, steps = tree.parents[at], steps + 1
        assert tree.depths[row] == steps


@given(trees())
def test_children_and_parents_tell_the_same(tree: TokenTree) -> None:
    listed = [(parent, child) for parent, children in enumerate(tree.children) for child in children]
    assert sorted(listed) == sorted((tree.parents[row], row) for row in range(1, len(tree)))
    assert tree.is_chain == all(len(children) <= 1 for children in tree.children)


@given(st.lists(st.integers(-2, 9), max_size=12), st.lists(st.integers(-2, 9), max_size=12))
def test_whatever_is_accepted_keeps_the_rules(tokens: list[int], parents: list[int]) -> None:
    try:
        tree = TokenTree.checked(tokens, parents, vocabulary_size=8, max_rows=10)
    except InvalidField as error:
        assert error.field.startswith("tree.")
        return
    assert 1 <= len(tree) <= 10 and tree.parents[0] == 0
    assert all(0 <= token < 8 for token in tree.token_ids)
    assert all(0 <= tree.parents[row] < row for row in range(1, len(tree)))
    assert len({(tree.parents[row], tree.token_ids[row]) for row in range(1, len(tree))}) == tree.drafted


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        pytest.param({"token_ids": (), "parents": ()}, "tree.token_ids", id="empty"),
        pytest.param({"token_ids": (1,) * 257, "parents": (0,) * 257}, "tree.token_ids", id="oversize"),
        pytest.param({"token_ids": (1, -1), "parents": (0, 0)}, "tree.token_ids[1]", id="token -1"),
        pytest.param({"token_ids": (1, 50), "parents": (0, 0)}, "tree.token_ids[1]", id="token = vocabulary"),
        pytest.param({"token_ids": (2**32, 1), "parents": (0, 0)}, "tree.token_ids[0]", id="token 2**32"),
        pytest.param({"parents": (0, 0)}, "tree.parents", id="parents too short"),
        pytest.param({"parents": (1, 0, 1)}, "tree.parents[0]", id="root with a parent"),
        pytest.param({"parents": (0, 1, 1)}, "tree.parents[1]", id="own parent"),
        pytest.param({"parents": (0, 2, 1)}, "tree.parents[1]", id="parent after child"),
        pytest.param({"parents": (0, -1, 1)}, "tree.parents[1]", id="parent -1"),
        pytest.param({"token_ids": (1, 2, 2), "parents": (0, 0, 0)}, "tree.token_ids[2]", id="equal siblings"),
        pytest.param({"scores": (1.0, 0.5)}, "tree.scores", id="scores too short"),
        pytest.param({"scores": (1.0, 0.5, math.nan)}, "tree.scores[2]", id="NaN"),
        pytest.param({"scores": (1.0, -0.1, 0.5)}, "tree.scores[1]", id="negative score"),
        pytest.param({"scores": (1.0, 0.1, math.inf)}, "tree.scores[2]", id="infinite score"),
        pytest.param({"distributions": {3: DraftDistribution((1,), (1,))}}, "tree.distributions", id="law of no row"),
        pytest.param(
            {"distributions": {0: DraftDistribution((4, 5), (1, 1))}},
            "tree.token_ids[1]",
            id="child outside its law",
        ),
    ],
)
def test_a_broken_rule_is_named(parts: dict[str, Any], field: str) -> None:
    whole: dict[str, Any] = {"token_ids": (1, 2, 3), "parents": (0, 0, 1)} | parts
    with pytest.raises(InvalidField) as caught:
        TokenTree.checked(vocabulary_size=VOCABULARY, **whole)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("distribution", "field"),
    [
        pytest.param(DraftDistribution((), ()), "law.token_ids", id="empty"),
        pytest.param(DraftDistribution(tuple(range(65)), (1,) * 65), "law.token_ids", id="wide"),
        pytest.param(DraftDistribution((1, 2), (1,)), "law.weights", id="lengths differ"),
        pytest.param(DraftDistribution((1, 1), (1, 1)), "law.token_ids", id="twice"),
        pytest.param(DraftDistribution((1, 50), (1, 1)), "law.token_ids[1]", id="token out of range"),
        pytest.param(DraftDistribution((1, 2), (1, 0)), "law.weights[1]", id="weight 0"),
        pytest.param(DraftDistribution((1, 2), (65536, 1)), "law.weights[0]", id="weight 65536"),
    ],
)
def test_a_broken_distribution_is_named(distribution: DraftDistribution, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        distribution.check(VOCABULARY, "law")
    assert caught.value.field == field


def test_the_largest_tree_and_the_smallest() -> None:
    chain = TokenTree.checked([7] * MAX_ROWS, [max(0, row - 1) for row in range(MAX_ROWS)], vocabulary_size=8)
    assert chain.is_chain and chain.depths[-1] == MAX_ROWS - 1 and chain.scores == (1.0,) * MAX_ROWS
    assert TokenTree.root_only(7) == TokenTree.checked([7], [0], vocabulary_size=8)
