"""What drafts say on its way to the device's tables: the same tree, in its slot, brought there once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from preorder_tables import preorder

from outrider.errors import InvalidField
from outrider.wire.frames import SequenceGrowth
from target_service.execution.node_tables import ExpectedTree, NodeTables, owner_of
from tree_kernels.node_table import Mailboxes
from tree_kernels.node_table.layout import COST_OF_HALVING, MOST_COST, NODES
from tree_kernels.node_table.mailboxes import LAST_NUMBER, TURNS

SLOTS = 3
CPU = torch.device("cpu")
# What `NodeTables` takes for the surest that a node can be.
SUREST = 0.98

Path = tuple[int, ...]
# Of each node of a table, by its path from the root: depth and cost.
Nodes = dict[Path, tuple[int, int]]


@dataclass(frozen=True)
class Table:
    """A table as the device has it."""

    base: int
    root: int
    nodes: Nodes

    @classmethod
    def of(cls, table: Sequence[int]) -> Table | None:
        """None where it is empty. What it says of parents, ends and depths has to agree."""
        base, count = (int(each) for each in table[:2])
        if not count:
            return None
        tokens, parents, ends, depths, costs = np.array(table[2:]).reshape(5, NODES)[:, :count].tolist()
        again = preorder(tokens, parents, costs, base)[2:].reshape(5, NODES)[:, :count]
        assert again.tolist() == [tokens, parents, ends, depths, costs]
        paths: list[Path] = [()]
        nodes: Nodes = {(): (0, 0)}
        for place in range(1, count):
            paths.append((*paths[parents[place]], tokens[place]))
            nodes[paths[place]] = depths[place], costs[place]
        assert len(nodes) == count, "siblings' tokens differ"
        return cls(base, tokens[0], nodes)


class Device:
    """A device that looks into every box before each of its steps."""

    def __init__(self, tables: NodeTables) -> None:
        self._tables = tables
        self._taken = [0] * SLOTS
        self.slots: list[Table | None] = [None] * SLOTS
        self.assigned = [-1] * SLOTS

    def step(self, *sequence_ids: int) -> int:
        """Publish, take, and assign slots to these sequences. Tables that were taken."""
        self._tables.publish()
        slot_assignment = self._tables.slot_assignment(sequence_ids, ["tenant"] * len(sequence_ids))
        if slot_assignment is not None:
            assert slot_assignment.dtype == np.int32 and slot_assignment.shape == (2, SLOTS)
            self.assigned = slot_assignment[0].tolist()
            count = len(sequence_ids)
            assert slot_assignment[1].tolist() == [owner_of("tenant")] * count + [-1] * (SLOTS - count)
        mail, before = self._tables.mail, self._taken
        self._taken = mail.newest.tolist()
        news = [slot for slot in range(SLOTS) if self._taken[slot] != before[slot]]
        for slot in news:
            self.slots[slot] = Table.of(mail.tables[slot, self._taken[slot] % TURNS].tolist())
        return len(news)

    def table_of(self, place: int) -> Table | None:
        """What the sequence at a place of the step finds."""
        slot = self.assigned[place]
        return self.slots[slot] if slot >= 0 else None


def growth(
    first: int,
    parents: Sequence[int],
    tokens: Sequence[int],
    scores: Sequence[float] | None = None,
    *,
    sequence_id: int = 7,
    replaces: bool = False,
) -> SequenceGrowth:
    scores = (0.5,) * len(tokens) if scores is None else tuple(scores)
    return SequenceGrowth(sequence_id, 0, first, tuple(parents), tuple(tokens), tuple(scores), replaces=replaces)


def entered(*sequence_ids: int) -> tuple[NodeTables, Device]:
    tables = NodeTables(SLOTS, Mailboxes(SLOTS, CPU))
    for sequence_id in sequence_ids:
        tables.assign_slot(sequence_id)
    return tables, Device(tables)


def cost_of(score: float, trust: float = 1.0) -> int:
    """Of one edge."""
    chance = min(score * trust, SUREST)
    return min(MOST_COST, max(1, math.floor(-math.log2(chance) * COST_OF_HALVING + 0.5))) if chance > 0 else MOST_COST


def paths_of(table: Table | None) -> set[Path]:
    assert table is not None
    return set(table.nodes) - {()}


@st.composite
def trees(draw: st.DrawFn, most: int = 40) -> tuple[list[int], list[int], list[float]]:
    """Parents by number (0 the root), tokens that differ among siblings, scores."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(1, draw(st.integers(0, most)) + 1):
        parent = draw(st.integers(0, node - 1))
        taken = {token for above, token in zip(parents, tokens, strict=True) if above == parent}
        parents.append(parent)
        tokens.append(draw(st.integers(0, 99).filter(lambda token, taken=taken: token not in taken)))  # type: ignore[misc]
    scores = [draw(st.floats(0, 1, width=32)) for _ in tokens]
    return parents, tokens, scores


@examples(200)
@given(trees(), st.floats(0.05, 1.25), st.integers(1, 500))
def test_a_growth_becomes_the_table_of_its_tree(
    tree: tuple[list[int], list[int], list[float]], trust: float, first: int
) -> None:
    parents, tokens, scores = tree
    tables, _ = entered(7)
    tables.trust = trust
    ids = [parent + first - 1 if parent else 0 for parent in parents]
    tables.grow(growth(first, ids, tokens, scores, replaces=True), 4, [1, 2, 3, 90])
    tables.publish()
    (number, *others), costs = tables.mail.newest.tolist(), [0]
    for parent, score in zip(parents, scores, strict=True):
        costs.append(costs[parent] + cost_of(score, trust))
    expected = preorder([90, *tokens], [0, *parents], costs, 4)
    table = tables.mail.tables[0, number].tolist()
    assert number == 1 and not any(others) and table[:2] == [4, 1 + len(tokens)]
    assert Table.of(table) == Table.of(expected)
    nodes = Table.of(table)
    assert nodes is not None
    for path, (depth, cost) in nodes.nodes.items():
        above = nodes.nodes[path[:-1]][1] if path else 0
        assert depth == len(path) and (not path or 1 <= cost - above <= MOST_COST)


@examples(100)
@given(trees(), st.integers(0, 3))
def test_expected_nodes_are_published_as_a_draft_with_them_would_be(
    tree: tuple[list[int], list[int], list[float]], committed: int
) -> None:
    """Alone they are written without a tree of the sequence; `committed` tokens follow those that they begin behind."""
    parents, tokens, scores = tree
    nodes = np.array([tokens, [parent - 1 for parent in parents]], np.int32)
    tables, _ = entered(7)
    text = [1, 2, 3, 90]
    expected = ExpectedTree.of(4, nodes, np.array(scores, np.float64), text)
    text += tokens[:committed]
    tables.expect(7, expected)
    tables.publish()
    found = Table.of(tables.mail.tables[0, int(tables.mail.newest[0])].tolist())
    costs = [0]
    for parent, score in zip(parents, scores, strict=True):
        costs.append(costs[parent] + cost_of(score))
    assert found == Table.of(preorder([90, *tokens], [0, *parents], costs, 4))
    # A draft that has nothing but their root.
    tables.grow(growth(1, [], [], [], replaces=True), 4, text)
    tables.publish()
    assert Table.of(tables.mail.tables[0, int(tables.mail.newest[0])].tolist()) == found


@dataclass
class PathModel:
    """The same as paths from the tree's root: what a growth brings is there until the tree begins anew."""

    base: int = 0
    ids: dict[int, Path] = field(default_factory=dict)

    def grow(self, sent: SequenceGrowth, base: int, text: list[int]) -> None:
        walked = tuple(text[self.base : base])
        known = 0 < self.base <= base and (not walked or walked in self.ids.values())
        if sent.replaces or not known:
            self.base, self.ids, walked = base, {}, ()
        nodes = zip(sent.parent_ids, sent.token_ids, strict=True)
        for node_id, (parent, token) in enumerate(nodes, sent.first_node_id):
            above = walked if parent == 0 else self.ids.get(parent)
            if above is not None:
                self.ids[node_id] = (*above, token)


@examples(300)
@given(st.data())
def test_growths_land_where_the_paths_say(data: st.DataObject) -> None:
    """Replacing and not, of ids that are known or not, from roots that the tree holds or not."""
    tables, device = entered(7)
    model, text, first = PathModel(), [0], 1
    for _ in range(data.draw(st.integers(1, 8), "growths")):
        for _ in range(data.draw(st.integers(0, 3), "committed")):
            walked = tuple(text[model.base :])
            below = [path[-1] for path in model.ids.values() if path[:-1] == walked]
            text.append(data.draw(st.sampled_from([*below, *below, 0]), "committed token"))
        base = data.draw(st.integers(max(1, len(text) - 2), len(text)), "base")
        # Each node's token is its id.
        count = data.draw(st.integers(0, 5), "nodes")
        names = [[0, *range(max(1, first - 9), first + place)] for place in range(count)]
        parents = [data.draw(st.sampled_from(known), "parent") for known in names]
        sent = growth(first, parents, range(first, first + count), replaces=data.draw(st.integers(0, 4)) == 0)
        first += count + data.draw(st.integers(0, 2), "ids that are passed over")
        tables.grow(sent, base, text)
        model.grow(sent, base, text)
        assert device.step(7) == 1
        table = device.table_of(0)
        assert table is not None and table.base == model.base and table.root == text[model.base - 1]
        assert paths_of(table) == set(model.ids.values())


def test_a_growth_that_replaces_leaves_nothing_of_what_was_there() -> None:
    tables, device = entered(7)
    tables.grow(growth(1, [0, 1], [5, 6]), 1, [9])
    # An id of a node that is gone.
    tables.grow(growth(3, [0, 2], [7, 8], replaces=True), 1, [9])
    device.step(7)
    assert paths_of(device.table_of(0)) == {(7,)}


def test_a_delta_names_what_came_before() -> None:
    tables, device = entered(7)
    tables.grow(growth(1, [0, 1], [5, 6], [0.5, 0.5]), 1, [9])
    tables.grow(growth(3, [2, 1, 0], [7, 8, 4], [0.5, 0.25, 0.5]), 1, [9])
    device.step(7)
    table = device.table_of(0)
    assert table is not None
    halving = COST_OF_HALVING
    assert table.nodes == {
        (): (0, 0), (4,): (1, halving), (5,): (1, halving), (5, 6): (2, 2 * halving), (5, 6, 7): (3, 3 * halving),
        (5, 8): (2, 3 * halving),
    }  # fmt: skip


def test_a_delta_of_a_later_root_hangs_where_the_text_leads() -> None:
    tables, device = entered(7)
    text = [9]
    tables.grow(growth(1, [0, 1, 0], [5, 6, 8]), 1, text)
    text += [5, 6]
    tables.grow(growth(4, [0], [3]), 3, text)
    device.step(7)
    table = device.table_of(0)
    assert table is not None and table.base == 1 and paths_of(table) == {(5,), (5, 6), (5, 6, 3), (8,)}
    # The text leaves the tree: it begins anew, and ids of the old one are nobody's.
    text += [1]
    tables.grow(growth(5, [0, 3, 5], [2, 2, 4]), 4, text)
    device.step(7)
    table = device.table_of(0)
    assert table is not None and (table.base, table.root) == (4, 1) and paths_of(table) == {(2,), (2, 4)}


def test_a_delta_of_an_earlier_root_than_the_trees_begins_anew() -> None:
    tables, device = entered(7)
    text = [9, 5, 6]
    tables.grow(growth(1, [0], [3]), 3, text)
    tables.grow(growth(2, [0, 2], [5, 6]), 1, text)
    device.step(7)
    table = device.table_of(0)
    assert table is not None and (table.base, table.root) == (1, 9) and paths_of(table) == {(5,), (5, 6)}


def test_unknown_parents_are_left_out_with_what_hangs_below() -> None:
    tables, device = entered(7)
    tables.grow(growth(10, [4, 10, 11, 0, 13], [1, 2, 3, 4, 5]), 1, [9])
    device.step(7)
    assert paths_of(device.table_of(0)) == {(4,), (4, 5)}


def test_siblings_with_one_token_are_one() -> None:
    tables, device = entered(7)
    tables.grow(growth(1, [0, 0, 1, 2, 2], [5, 5, 6, 6, 7]), 1, [9])
    device.step(7)
    assert paths_of(device.table_of(0)) == {(5,), (5, 6), (5, 7)}


def test_a_token_named_twice_takes_the_newer_score() -> None:
    """As draft.proto has it."""
    tables, device = entered(7)
    tables.grow(growth(1, [0], [5], [0.25]), 1, [9])
    tables.grow(growth(2, [0, 2], [5, 6], [0.5, 0.5]), 1, [9])
    device.step(7)
    table = device.table_of(0)
    assert table is not None and table.nodes[(5,)] == (1, COST_OF_HALVING)


def test_the_text_is_followed_through_nodes_that_were_named_twice() -> None:
    tables, device = entered(7)
    text = [9]
    tables.grow(growth(1, [0, 0, 2], [5, 5, 6]), 1, text)
    text += [5, 6]
    tables.grow(growth(4, [0, 3], [7, 8]), 3, text)
    device.step(7)
    assert paths_of(device.table_of(0)) == {(5,), (5, 6), (5, 6, 7), (5, 6, 8)}


@pytest.mark.parametrize("chain", [True, False])
def test_what_a_table_has_no_room_for_is_cut(chain: bool) -> None:
    tables, device = entered(7)
    count = NODES + 60
    parents = list(range(count)) if chain else [0] * count
    tables.grow(growth(1, parents, range(count)), 1, [9])
    device.step(7)
    paths = paths_of(device.table_of(0))
    assert len(paths) == NODES - 1
    assert paths == ({tuple(range(end + 1)) for end in range(NODES - 1)} if chain else {(i,) for i in range(NODES - 1)})
    # What comes then begins anew; a node whose parent was cut off is left out.
    tables.grow(growth(1 + count, [0, count], [999, 998]), 1, [9])
    device.step(7)
    assert paths_of(device.table_of(0)) == {(999,)}


def test_a_draft_that_sends_deltas_is_not_cut_off_for_ever() -> None:
    """Each growth adds a few nodes below what was said meanwhile, and nothing is ever replaced."""
    tables, device = entered(7)
    text, first = [9], 1
    for turn in range(100):
        tables.grow(growth(first, [0, 0, 0, 0], [turn, 1000, 1001, 1002]), len(text), text)
        first += 4
        device.step(7)
        table = device.table_of(0)
        assert table is not None
        walked = tuple(text[table.base :])
        assert {(*walked, token) for token in (turn, 1000, 1001, 1002)} <= paths_of(table), f"growth {turn}"
        text.append(turn)


@pytest.mark.parametrize("parents", [[1], [0, 3], [0, 2], [0, 1, 90]])
def test_a_parent_that_is_not_earlier_is_refused(parents: list[int]) -> None:
    tables, _ = entered(7)
    with pytest.raises(InvalidField) as caught:
        tables.grow(growth(1, parents, range(len(parents))), 1, [9])
    assert caught.value.field.startswith("growth.parent_ids")


def test_costs_have_bounds() -> None:
    tables, device = entered(7)
    tables.grow(growth(1, [0, 0, 0, 3], [1, 2, 3, 4], [1.0, 0.0, 1e-30, 0.0]), 1, [9])
    device.step(7)
    table = device.table_of(0)
    assert table is not None
    surest = cost_of(1.0)
    assert {path: cost for path, (_, cost) in table.nodes.items()} == {
        (): 0, (1,): surest, (2,): MOST_COST, (3,): MOST_COST, (3, 4): 2 * MOST_COST,
    }  # fmt: skip
    assert surest >= 1


def test_without_news_nothing_is_published() -> None:
    tables, device = entered(1, 2)
    assert device.step(1, 2) == 2 and device.step(1, 2) == 0
    tables.grow(growth(1, [0], [5], sequence_id=2), 1, [9])
    assert device.step(1, 2) == 1 and device.step(1, 2) == 0
    assert device.table_of(0) is None and paths_of(device.table_of(1)) == {(5,)}


def test_a_step_of_others_says_who_they_are() -> None:
    tables, device = entered(1, 2)
    tables.grow(growth(1, [0], [5], sequence_id=1), 1, [9])
    tables.grow(growth(1, [0], [6], sequence_id=2), 1, [9])
    for order, found in (((1, 2), [{(5,)}, {(6,)}]), ((2, 1), [{(6,)}, {(5,)}]), ((2,), [{(6,)}])):
        assert device.step(*order) == (2 if order == (1, 2) else 0)
        for place, paths in enumerate(found):
            assert paths_of(device.table_of(place)) == paths
        assert device.assigned[len(order) :] == [-1] * (SLOTS - len(order))
    # One that has no table, at any place.
    assert device.step(8, 1) == 0 and device.table_of(0) is None and paths_of(device.table_of(1)) == {(5,)}
    assert tables.slot_assignment([8, 1], ["tenant"] * 2) is None
    slot_assignment = tables.slot_assignment([8, 1], ["tenant", "another"])
    assert (
        slot_assignment is not None
        and slot_assignment[0].tolist() == device.assigned
        and slot_assignment[1, 1] == owner_of("another")
    )


def test_tenants_are_told_apart() -> None:
    owners = [owner_of(str(number)) for number in range(1000)]
    assert len(set(owners)) == 1000 and min(owners) >= 0 and max(owners) < 2**31
    assert owners == [owner_of(str(number)) for number in range(1000)]


def test_what_is_said_is_there_before_its_turn() -> None:
    """A step that was launched before it finds it, whoever it is of."""
    tables, device = entered(1, 2)
    device.step(1, 2)
    tables.grow(growth(1, [0], [5], sequence_id=2), 1, [9])
    assert device.step(1) == 1
    assert device.step(1, 2) == 0 and paths_of(device.table_of(1)) == {(5,)}


def test_the_newest_table_is_whole_while_further_ones_are_written() -> None:
    mail = Mailboxes(SLOTS, CPU)
    for number in range(1, 3 * TURNS):
        mail.next_table(1)[:] = number
        mail.put(1)
        mail.send()
        assert mail.newest.tolist() == [0, number, 0]
        mail.next_table(1)[:] = -1
        assert bool((mail.tables[1, number % TURNS] == number).all())


@pytest.mark.parametrize("slots", [(0, 1, 2), (0, 2), (1,), (0, 39), (5, 6, 8, 30)], ids=str)
def test_boxes_that_lie_close_together_arrive_like_others(slots: tuple[int, ...]) -> None:
    mail = Mailboxes(40, CPU)
    for number in range(1, 2 * TURNS):
        for slot in slots:
            mail.next_table(slot)[:] = 100 * slot + number
            mail.put(slot)
        # One more box, whose next table is being written.
        mail.next_table(7)[:9] = -1
        mail.send()
        assert mail.newest.tolist() == [number if slot in slots else 0 for slot in range(40)]
        for slot in slots:
            kept = range(max(1, number - TURNS + 1), number + 1)
            assert all(bool((mail.tables[slot, old % TURNS] == 100 * slot + old).all()) for old in kept)


def test_a_table_is_on_the_device_once_it_is_sent() -> None:
    mail = Mailboxes(SLOTS, CPU)
    mail.next_table(1)[:] = 4
    mail.put(1)
    assert not mail.newest.any() and not mail.tables.any()
    mail.send()
    assert mail.newest.tolist() == [0, 1, 0] and bool((mail.tables[1, 1] == 4).all())
    # Nothing is sent twice.
    mail.tables.zero_()
    mail.send()
    assert not mail.tables.any()


def test_every_table_of_a_box_is_sent() -> None:
    """Or the device could read one while it is written over, with no number between that says so."""
    mail = Mailboxes(SLOTS, CPU)
    for number in range(1, TURNS + 1):
        mail.next_table(2)[:] = number
        mail.put(2)
        assert mail.newest.tolist() == [0, 0, number - 1]
    mail.send()
    assert mail.tables[2, :, 0].tolist() == [TURNS, *range(1, TURNS)] and mail.newest.tolist() == [0, 0, TURNS]


def test_numbers_of_tables_begin_again() -> None:
    mail = Mailboxes(1, CPU)
    mail._numbers[0] = LAST_NUMBER
    mail.next_table(0)[:] = 7
    mail.put(0)
    mail.send()
    assert mail.newest.tolist() == [0] and bool((mail.tables[0, 0] == 7).all())


def slot_of(tables: NodeTables, sequence_id: int) -> int:
    """The sequence's slot; -1 without one."""
    tree = tables._trees.get(sequence_id)
    return -1 if tree is None else tree.slot


def test_slots_are_given_out_and_back() -> None:
    tables, _ = entered(*range(SLOTS), 8)
    assert sorted(slot_of(tables, sequence_id) for sequence_id in range(SLOTS)) == list(range(SLOTS))
    assert slot_of(tables, 8) == -1
    # What is drafted for it meanwhile goes nowhere.
    tables.grow(growth(1, [0], [5], sequence_id=8), 1, [9])
    freed = slot_of(tables, 1)
    tables.free_slot(1)
    tables.free_slot(1)
    assert slot_of(tables, 1) == -1
    tables.assign_slot(8)
    tables.assign_slot(8)
    assert slot_of(tables, 8) == freed


def test_nothing_of_a_tenant_stays_for_the_next() -> None:
    tables, device = entered(1)
    tables.grow(growth(1, [0, 1], [5, 6], sequence_id=1), 1, [9])
    device.step(1)
    slot = slot_of(tables, 1)
    tables.free_slot(1)
    tables.assign_slot(2)
    assert slot_of(tables, 2) == slot and device.step(2) == 1
    assert device.slots[slot] is None
    # Ids begin again with each sequence.
    tables.grow(growth(3, [2], [7], sequence_id=2), 1, [9])
    device.step(2)
    assert paths_of(device.table_of(0)) == set()


def test_what_is_cleared_is_cleared_on_the_device() -> None:
    tables, device = entered(7)
    tables.grow(growth(1, [0], [5]), 1, [9])
    device.step(7)
    tables.clear(7)
    tables.clear(8)
    assert device.step(7) == 1 and device.table_of(0) is None
    tables.clear(7)
    assert device.step(7) == 0


def test_trust_counts_from_the_next_growth_on() -> None:
    tables, device = entered(7)
    for trust in (1.0, 0.5, 1.25):
        tables.trust = trust
        tables.grow(growth(1, [0], [5], [0.5], replaces=True), 1, [9])
        device.step(7)
        table = device.table_of(0)
        assert table is not None and table.nodes[(5,)] == (1, cost_of(0.5, trust))
