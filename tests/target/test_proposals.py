"""The growing tree against a model that keeps whole paths."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.draft_tree import MEMORY_STEPS, MEMORY_UNUSED, GrowingTree
from outrider.errors import InvalidField
from outrider.tree import DraftDistribution, TokenTree
from outrider.wire.frames import SequenceGrowth

Path = tuple[int, ...]


def growth(step: int, first: int, parents: list[int], tokens: list[int], **options: object) -> SequenceGrowth:
    scores = tuple(options.pop("scores", (0.5,) * len(tokens)))  # type: ignore[arg-type]
    return SequenceGrowth(7, step, first, tuple(parents), tuple(tokens), scores, **options)  # type: ignore[arg-type]


def paths_of(tree: GrowingTree) -> set[Path]:
    whole = tree.cut(set(range(1, tree.nodes + 1)))
    return {path_to(whole, row) for row in range(1, len(whole))}


def path_to(tree: TokenTree, row: int) -> Path:
    return () if row == 0 else (*path_to(tree, tree.parents[row]), tree.token_ids[row])


@dataclass
class PathModel:
    """The same tree as a set of absolute paths: a node lives while its path extends what is committed."""

    committed: list[int]
    commits: list[int] = field(default_factory=list)
    path_of_id: dict[int, Path] = field(default_factory=dict)
    live: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.commits.append(len(self.committed))

    def graft(self, sent: SequenceGrowth) -> None:
        now = tuple(self.committed)
        if sent.replaces:
            self.live.clear()
            self.path_of_id = {i: p for i, p in self.path_of_id.items() if p == now[: len(p)]}
        base = now[: self.commits[sent.base_step]]
        for offset, (parent, token) in enumerate(zip(sent.parent_ids, sent.token_ids, strict=True)):
            path = (*(base if parent == 0 else self.path_of_id[parent]), token)
            self.path_of_id[sent.first_node_id + offset] = path
            if path[: len(now)] == now and len(path) > len(now):
                self.live.add(path)

    def advance(self, tokens: list[int]) -> None:
        self.committed.extend(tokens)
        self.commits.append(len(self.committed))
        now = tuple(self.committed)
        self.live = {path for path in self.live if path[: len(now)] == now and len(path) > len(now)}

    def relative(self) -> set[Path]:
        return {path[len(self.committed) :] for path in self.live}


def graft(tree: GrowingTree, sent: SequenceGrowth) -> None:
    """Have the growth's nodes in the tree at once."""
    tree.hold(sent)
    tree.settle()


@examples(600)
@given(st.data())
def test_late_and_crossing_growth_lands_where_the_paths_say(data: st.DataObject) -> None:
    tokens = st.integers(0, 2)
    model = PathModel([0])
    committed = [0]
    tree = GrowingTree(committed, step=0)
    base_step, next_id = 0, 1
    lazily = data.draw(st.booleans(), "held until looked at")
    for _ in range(data.draw(st.integers(1, 8), "events")):
        if data.draw(st.booleans(), "commit"):
            new = data.draw(st.lists(tokens, min_size=1, max_size=3), "committed")
            committed.extend(new)
            tree.move_root(len(new))
            model.advance(new)
        else:
            # A growth may be late by any number of commits, but growths stay in order.
            base_step = data.draw(st.integers(base_step, len(model.commits) - 1), "base step")
            replaces = data.draw(st.booleans(), "replaces")
            now = tuple(committed)
            known = [i for i, p in model.path_of_id.items() if not replaces or p == now[: len(p)]]
            base = now[: model.commits[base_step]]
            reachable = [i for i in known if model.path_of_id[i][: len(base)] == base]
            count = data.draw(st.integers(0, 5), "nodes")
            parents, named = [], []
            for offset in range(count):
                options = [0, *reachable, *(next_id + o for o in range(offset))]
                parents.append(data.draw(st.sampled_from(options), "parent"))
                named.append(data.draw(tokens, "token"))
            sent = growth(base_step, next_id, parents, named, replaces=replaces)
            next_id += count
            tree.hold(sent)
            model.graft(sent)
        if not lazily or data.draw(st.booleans(), "looked at"):
            tree.settle()
            assert paths_of(tree) == model.relative()


def test_a_proposal_survives_the_commit_that_walks_into_it() -> None:
    committed = [9]
    tree = GrowingTree(committed, step=0)
    graft(tree, growth(0, 1, [0, 1, 2, 1], [5, 6, 7, 8]))
    committed.extend([5, 6])
    tree.move_root(2)
    assert paths_of(tree) == {(7,)}
    assert not tree.answered


def test_growth_made_before_a_commit_is_used_below_the_new_root() -> None:
    committed = [9]
    tree = GrowingTree(committed, step=0)
    committed.append(5)
    tree.move_root(1)
    graft(tree, growth(0, 1, [0, 1, 0], [5, 6, 7]))
    assert paths_of(tree) == {(6,)}
    assert tree.lag(growth(0, 4, [], [])) == 1


def test_a_node_named_twice_takes_the_newer_score() -> None:
    tree = GrowingTree([9], step=0)
    graft(tree, growth(0, 1, [0], [5], scores=(0.2,)))
    graft(tree, growth(0, 2, [0, 2], [5, 6], scores=(0.7, 0.9)))
    assert tree.cut({1, 2}).scores == (1.0, 0.7, 0.9)


@pytest.mark.parametrize(
    ("sent", "field_path"),
    [
        pytest.param(growth(1, 1, [], []), "growth.base_step", id="from the future"),
        pytest.param(growth(0, 1, [0, 3], [5, 6]), "growth.parent_ids[1]", id="parent after child"),
        pytest.param(growth(0, 0, [0], [5]), "growth.first_node_id", id="id of the root"),
        pytest.param(
            growth(0, 1, [0], [5], distributions={0: DraftDistribution((6,), (1,))}),
            "growth.distributions",
            id="child outside its distribution",
        ),
    ],
)
def test_malformed_growth_is_named(sent: SequenceGrowth, field_path: str) -> None:
    tree = GrowingTree([9], step=0)
    with pytest.raises(InvalidField) as caught:
        graft(tree, sent)
    assert caught.value.field == field_path


def test_ids_are_never_given_twice() -> None:
    tree = GrowingTree([9], step=0)
    graft(tree, growth(0, 1, [0], [5]))
    with pytest.raises(InvalidField, match="used before"):
        graft(tree, growth(0, 1, [0], [6]))


def test_what_is_replaced_unused_is_remembered_where_it_was_committed() -> None:
    committed = [0]
    tree = GrowingTree(committed, step=0)
    committed.extend([5])
    tree.move_root(1)
    tree.hold(growth(0, 1, [0, 1], [5, 6], replaces=True))
    tree.hold(growth(1, 3, [0], [9], replaces=True))
    # Node 1 is the token that was committed, node 2 went with its tree.
    tree.hold(growth(1, 4, [1, 2], [7, 8]))
    tree.settle()
    assert paths_of(tree) == {(9,), (7,)}


@pytest.mark.parametrize("seed", range(40))
def test_what_was_committed_is_found_as_by_looking_at_every_node(seed: int) -> None:
    """Of what was replaced unseen, one path is walked down."""
    dice = random.Random(seed)
    nodes = dice.randrange(1, 40)
    parents = [0] * nodes
    for i in range(1, nodes):
        parents[i] = dice.choice([0, dice.randrange(1, i + 1)])
    tokens = [dice.randrange(4) for _ in range(nodes)]
    # Siblings say different tokens.
    for i in range(nodes):
        taken = {tokens[j] for j in range(i) if parents[j] == parents[i]}
        while tokens[i] in taken:
            tokens[i] += 1
    committed_since = [dice.randrange(4) for _ in range(dice.randrange(6))]
    committed = [9]
    tree = GrowingTree(committed, step=0)
    for token in committed_since:
        committed.append(token)
        tree.move_root(1)
    tree.hold(growth(0, 1, parents, tokens, replaces=True))
    tree.hold(growth(0, 1 + nodes, [], [], replaces=True))
    tree.settle()
    lengths, expected = {0: 1}, {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), 1):
        length = lengths.get(parent, len(committed))
        if length < len(committed) and committed[length] == token:
            lengths[node] = length + 1
            expected[node] = 0 if length + 1 == len(committed) else -length - 1
    assert tree._where == expected


def test_few_trees_are_remembered_that_were_replaced_unused() -> None:
    committed = [0]
    tree = GrowingTree(committed, step=0)
    committed.append(5)
    tree.move_root(1)
    for first in range(1, MEMORY_UNUSED + 4):
        tree.hold(growth(0, first, [0], [5], replaces=True))
    # Below the token that was committed, as the first and as the last of them name it.
    tree.hold(growth(1, first + 1, [1, first - 1], [7, 8]))
    assert paths_of(tree) == {(8,)}


def test_steps_are_remembered_by_their_lengths() -> None:
    committed = [9, 8]
    tree = GrowingTree(committed, step=3)
    committed.extend([5, 6])
    tree.move_root(2)
    assert [tree.length_at(step) for step in (2, 3, 4, 5)] == [None, 2, 4, None]
    for _ in range(MEMORY_STEPS):
        committed.append(1)
        tree.move_root(1)
    assert tree.length_at(4) is None and tree.length_at(4 + MEMORY_STEPS) == len(committed)


def test_an_answer_is_to_the_last_commit() -> None:
    committed = [9]
    tree = GrowingTree(committed, step=0)
    graft(tree, growth(0, 1, [0], [5]))
    assert tree.answered
    committed.append(5)
    tree.move_root(1)
    assert not tree.answered
    graft(tree, growth(1, 2, [0], [6]))
    assert tree.answered
