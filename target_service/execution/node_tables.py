"""The host's side of the device's node tables: which slot each sequence has, and growth on its way into it.

A draft's growth names nodes by ids and parents; the device needs the whole tree of a sequence in depth-first order with
the cost of every path (`tree_kernels.node_table`). Growth is kept by sequence, and published in a mailbox of the slot,
which the device reads when it comes to the next pass, launched or not.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.errors import InvalidField
from outrider.wire.frames import ROOT_ID, SequenceGrowth
from target_service.compiling import compiled
from target_service.execution.pass_drafting import PassDrafting
from tree_kernels.node_table import Mailboxes
from tree_kernels.node_table.layout import COST_OF_HALVING, MOST_CHANCE, MOST_COST, NODES, TABLE

Ints = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

# Rows of `_Tree.nodes`.
_TOKEN, _PARENT, _CHILD, _SIBLING = range(4)
# A parent that is not in the tree: the node and its descendants are left out.
_MISSING = -1
_OWNER_SECRET = secrets.token_bytes(16)


class PredictedChain(NamedTuple):
    """Tokens that may follow the sequence's last one, and the probability of each given the one before."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(slots=True, eq=False)
class _Tree:
    """The nodes of one sequence since its tree last started over. Place 0 is the root, at token `base` - 1."""

    slot: int
    base: int = 0
    count: int = 0
    changed: bool = True  # whether it differs from what was published last
    # [4, NODES]: each node's token, parent, first child and next sibling; 0 for no child or sibling.
    nodes: Ints = field(default_factory=lambda: np.zeros((4, NODES), np.int32))
    scores: Reals = field(default_factory=lambda: np.ones(NODES, np.float64))
    # (first id, places of its nodes) of every growth, in order; -1 is the place of a node that was left out.
    growths: list[tuple[int, Ids]] = field(default_factory=list)
    # Nodes that the request predicts, and those that its form lets expect, merged when the tree is published.
    predicted: PredictedNodes | None = None
    expected: ExpectedTree | None = None

    def reset(self, base: int, root: int) -> None:
        """Start over with token `root` alone."""
        self.base, self.count = base, 1
        self.nodes[:, 0] = root, 0, 0, 0
        self.scores[0] = 1.0
        self.growths.clear()

    def place_of(self, node_id: int) -> int:
        """The place of a node of an earlier growth; -1 where it is not in the tree."""
        for first, places in reversed(self.growths):
            if first <= node_id:
                return int(places[node_id - first]) if node_id - first < len(places) else _MISSING
        return _MISSING


@dataclass(frozen=True, slots=True)
class PredictedNodes:
    """Chains that were predicted when the sequence had `base` tokens."""

    base: int
    # Places in the prediction where they begin, less `base`: constant for as long as the sequence follows it.
    places: tuple[int, ...]
    chains: tuple[PredictedChain, ...]
    token_ids: SequenceOf[int]  # the sequence's own list, which grows with each commit

    def from_base(self, base: int) -> list[tuple[SequenceOf[int], SequenceOf[float]]]:
        """Tokens and scores of every chain that agrees with the sequence's first `base` tokens, from there on."""
        if base <= self.base:
            committed = self.token_ids[base : self.base]
            certain = [1.0] * len(committed)
            return [([*committed, *chain.token_ids], [*certain, *chain.scores]) for chain in self.chains]
        committed = list(self.token_ids[self.base : base])
        count = len(committed)
        held = [chain for chain in self.chains if list(chain.token_ids[:count]) == committed]
        return [(chain.token_ids[count:], chain.scores[count:]) for chain in held]


@dataclass(frozen=True, slots=True)
class ExpectedTree:
    """Nodes that were expected when the sequence had `base` tokens."""

    base: int
    nodes: Ints  # [2, n] the token of each, and its parent among those before it, -1 for the root
    scores: Reals  # [n]
    heights: Ints  # [n] tokens of the longest path below each
    token_ids: SequenceOf[int]  # the sequence's own list, which grows with each commit

    @classmethod
    def of(cls, base: int, nodes: Ints, scores: Reals, text: list[int]) -> ExpectedTree:
        """Of nodes in an order in which parents come before children; `text` is the sequence's own list."""
        return cls(base, nodes, scores, heights_of(nodes), text)

    def left(self) -> int:
        """Tokens of the longest path below the sequence's last token; 0 where it is no node."""
        place = find_node(self.nodes, np.array(self.token_ids[self.base :], np.int32))
        return int(self.heights[place]) if place >= 0 else 0


class NodeTables:
    """Slots and trees by sequence, published through mailboxes. Used by the engine's thread alone."""

    def __init__(self, slots: int, mail: Mailboxes) -> None:
        """`slots` is the number of the device's tables, and of mailboxes."""
        self._slots = slots
        self.mail = mail
        self._free = list(range(slots - 1, -1, -1))
        self._trees: dict[int, _Tree] = {}
        # Of the last step.
        self._slot_assignment: list[list[int]] = []
        # Scores are multiplied by it: how well they predicted acceptance lately.
        self.trust = 1.0
        # Writes trees to the device's tables behind passes, if anything does.
        self.drafting: PassDrafting | None = None

    def assign_slot(self, sequence_id: int) -> None:
        """Give a sequence a slot with an empty tree, if one is free."""
        if sequence_id not in self._trees and self._free:
            self._trees[sequence_id] = _Tree(self._free.pop())

    def free_slot(self, sequence_id: int) -> None:
        """Free a sequence's slot. Its tree stays on the device until another sequence's replaces it."""
        tree = self._trees.pop(sequence_id, None)
        if tree is not None:
            self._free.append(tree.slot)

    def clear(self, sequence_id: int) -> None:
        """Drop a sequence's nodes."""
        tree = self._trees.get(sequence_id)
        if tree is not None and tree.count:
            tree.count, tree.changed = 0, True

    def of_draft(self, sequence_id: int) -> bool:
        """Whether the sequence has nodes, all of them a draft's."""
        tree = self._trees.get(sequence_id)
        if self.drafting is not None and tree is not None:
            return self.drafting.grows and tree.predicted is None and tree.expected is None
        return tree is not None and tree.count > 0 and tree.predicted is None and tree.expected is None

    def expect(self, sequence_id: int, expected: ExpectedTree | None) -> None:
        """Replace the nodes that the form of the sequence's output lets expect. A sequence without a slot gets one, if
        one is free."""
        self.assign_slot(sequence_id)
        tree = self._trees.get(sequence_id)
        if tree is not None and (expected is not None or tree.expected is not None):
            tree.expected, tree.changed = expected, True

    def expected(self, sequence_id: int) -> ExpectedTree | None:
        """The expected nodes that were last given for the sequence."""
        tree = self._trees.get(sequence_id)
        return None if tree is None else tree.expected

    def predict(self, sequence_id: int, predicted: PredictedNodes | None) -> None:
        """Replace the predicted nodes of the sequence's tree. A sequence without a slot gets one, if one is free."""
        self.assign_slot(sequence_id)
        tree = self._trees.get(sequence_id)
        if tree is not None and tree.predicted is not predicted:
            tree.predicted, tree.changed = predicted, True

    def predicted(self, sequence_id: int) -> PredictedNodes | None:
        """The predicted nodes that were last given for the sequence."""
        tree = self._trees.get(sequence_id)
        return None if tree is None else tree.predicted

    def grow(self, growth: SequenceGrowth, base: int, token_ids: SequenceOf[int]) -> None:
        """Add nodes to a sequence that had `base` of its `token_ids` when they were drafted. Raises `InvalidField`
        where a parent is not an earlier node."""
        tree = self._trees.get(growth.sequence_id)
        if tree is None:
            return
        first, ids = growth.first_node_id, np.asarray(growth.parent_ids, np.int64)
        root = self._root_of(tree, growth, base, token_ids)
        # First the parents as `insert` takes them, and then the places of the nodes themselves.
        places = np.empty(len(ids), np.int64)
        others = find_parents(ids, first, root, places)
        if others < 0:
            raise InvalidField("growth.parent_ids", "is not an earlier node")
        if others:
            for number in np.flatnonzero((ids != ROOT_ID) & (ids < first)):
                places[number] = tree.place_of(int(ids[number]))
        tokens, scores = np.asarray(growth.token_ids, np.int32), np.asarray(growth.scores, np.float64)
        tree.count = insert(tree.nodes, tree.scores, tree.count, tokens, scores, places)
        tree.growths.append((first, places))
        tree.changed = True

    def _root_of(self, tree: _Tree, growth: SequenceGrowth, base: int, token_ids: SequenceOf[int]) -> int:
        """The place of the token from which the growth starts. A tree that is full or does not hold it starts over."""
        # The ids of 64 growths are kept. Chosen, not measured: a draft sends one or two a step, most of which replace
        # the tree.
        full = tree.count + len(growth.token_ids) > NODES or len(tree.growths) >= 64
        if not growth.replaces and tree.count and tree.base <= base and not full:
            place = 0
            for token in token_ids[tree.base : base]:
                place = child_of(tree.nodes, place, token)
                if place == 0:
                    break
            else:
                return place
        tree.reset(base, token_ids[base - 1])
        return 0

    def slot_assignment(self, sequence_ids: SequenceOf[int], tenants: SequenceOf[str]) -> Ints | None:
        """[2, slots] int32, the slot and the owner of each sequence of a step, -1 for none; None where the step before
        had the same."""
        slots = [self._trees[each].slot if each in self._trees else -1 for each in sequence_ids]
        assignment = [slots, list(map(owner_of, tenants))]
        if assignment == self._slot_assignment:
            return None
        self._slot_assignment = assignment
        found = np.full((2, self._slots), -1, np.int32)
        found[:, : len(slots)] = assignment
        return found

    def publish(self) -> None:
        """Send every tree that changed to the device."""
        if self.drafting is not None:
            self.drafting.set_trust(self.trust)
        for tree in self._trees.values():
            # A tree that was grown behind a pass has taken the place of what was predicted.
            if tree.changed or (self.drafting is not None and tree.predicted is not None):
                self._publish(tree)
        self.mail.send()

    def _publish(self, tree: _Tree) -> None:
        tree.changed = False
        table, trust = self.mail.next_table(tree.slot), self.trust
        merged = tree
        if tree.expected is not None and tree.predicted is None and not tree.count:
            # As most trees of forms are.
            expected = tree.expected
            root = expected.token_ids[expected.base - 1]
            build_expected(expected.nodes, expected.scores, expected.base, root, table)
            self.mail.put(tree.slot)
            return
        if tree.predicted is not None:
            merged, trust = with_predicted(merged, tree.predicted, trust), 1.0
        if tree.expected is not None:
            merged, trust = with_expected(merged, tree.expected, trust), 1.0
        if merged.count:
            build_table(merged.nodes, merged.scores, merged.count, trust, merged.base, table)
        else:
            table[:2] = 0
        self.mail.put(tree.slot)


@functools.lru_cache(4096)
def owner_of(tenant: str) -> int:
    """31 bits that stand for a tenant: no name can be chosen to share another's recycled tokens."""
    digest = hashlib.blake2b(tenant.encode(), key=_OWNER_SECRET, digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def with_predicted(tree: _Tree, predicted: PredictedNodes, trust: float) -> _Tree:
    """A copy of a tree, the draft's scores multiplied by `trust`, with the predicted nodes. A node of both has the
    larger score."""
    merged = _Tree(tree.slot, tree.base, tree.count)
    merged.nodes[:], merged.scores[:] = tree.nodes, tree.scores * trust
    if not merged.count:
        merged.reset(predicted.base, predicted.token_ids[predicted.base - 1])
    for token_ids, scores in predicted.from_base(merged.base):
        before, count = merged.scores.copy(), merged.count
        # The parent of each is the one before it, that of the first the root.
        places = -1 - np.arange(len(token_ids))
        places[:1] = 0
        tokens, chances = np.array(token_ids, np.int32), np.array(scores, np.float64)
        merged.count = insert(merged.nodes, merged.scores, count, tokens, chances, places)
        merged.scores[1:count] = np.maximum(merged.scores[1:count], before[1:count])
    return merged


def with_expected(tree: _Tree, expected: ExpectedTree, trust: float) -> _Tree:
    """A copy of a tree, its scores multiplied by `trust`, with the expected nodes, whose scores go before others."""
    merged = _Tree(tree.slot, tree.base, tree.count)
    count, text = tree.count, expected.token_ids
    merged.nodes[:, :count], merged.scores[:count] = tree.nodes[:, :count], tree.scores[:count] * trust
    if not count:
        merged.reset(expected.base, text[expected.base - 1])
    between = np.array(text[merged.base : expected.base], np.int32)
    above = -1
    if merged.base > expected.base:
        above = find_node(expected.nodes, np.array(text[expected.base : merged.base], np.int32))
        if above < 0:
            return merged
    root, places = 0, np.zeros(1, np.int64)
    for token in between:
        places[0] = root
        merged.count = insert(merged.nodes, merged.scores, merged.count, token[None], np.ones(1), places)
        root = int(places[0])
    parents = expected.nodes[1].astype(np.int64)
    # As `insert` takes them: what hangs at -1 without being below the root is left out.
    places = np.where(parents == above, root, np.where(parents < 0, -1, -2 - parents))
    merged.count = insert(merged.nodes, merged.scores, merged.count, expected.nodes[0], expected.scores, places)
    return merged


@compiled
def find_node(nodes: Ints, tokens: Ints) -> int:
    """The place of the node to which tokens lead from the root; -1 where none does, and for no tokens. `nodes` as in
    `ExpectedTree`."""
    place = -1
    for token in tokens:
        found = -1
        for i in range(place + 1, nodes.shape[1]):
            if nodes[0, i] == token and nodes[1, i] == place:
                found = i
                break
        if found < 0:
            return -1
        place = found
    return place


@compiled
def heights_of(nodes: Ints) -> Ints:
    """[n] int32: see `ExpectedTree`."""
    heights = np.zeros(nodes.shape[1], np.int32)
    for i in range(nodes.shape[1] - 1, -1, -1):
        parent = nodes[1, i]
        if parent >= 0:
            heights[parent] = max(heights[parent], heights[i] + 1)
    return heights


@compiled
def child_of(nodes: Ints, place: int, token: int) -> int:
    """The place of a node's child with this token; 0 where there is none. `nodes` as in `_Tree`."""
    child = nodes[_CHILD, place]
    while child != 0 and nodes[_TOKEN, child] != token:
        child = nodes[_SIBLING, child]
    return int(child)


@compiled
def find_parents(ids: Ids, first: int, root: int, above: Ids) -> int:
    """Find the parents of a growth's nodes, as `insert` takes them. Returns how many are nodes of earlier growths, or
    -1 where one is not an earlier node.

    Args:
        ids: [n] the parents' ids; the ids of the growth's own nodes begin with `first`.
        root: the place from which the growth starts.
        above: [n], written: `root`, or -2 - i for the i-th node of the growth; not for nodes of earlier growths.
    """
    others = 0
    for i in range(len(ids)):
        if ids[i] >= first + i:
            return -1
        if ids[i] == ROOT_ID:
            above[i] = root
        elif ids[i] >= first:
            above[i] = first - 2 - ids[i]
        else:
            others += 1
    return others


@compiled
def insert(nodes: Ints, scores: Reals, count: int, new_tokens: Ints, new_scores: Reals, places: Ids) -> int:
    """Add nodes to a tree of `count` nodes, place 0 its root; returns the new number. A child that exists takes the
    newer score.

    Args:
        nodes, scores: [4, room] and [room] as in `_Tree`, written.
        new_tokens, new_scores: [n].
        places: [n] the place of each new node's parent, or -2 - i for the i-th new node; -1 leaves the node out. Then
            the place of each new node is written there, or -1 where there is no parent or no room.
    """
    for i in range(len(places)):
        parent = places[i] if places[i] >= -1 else places[-2 - places[i]]
        places[i] = -1
        if parent < 0:
            continue
        place = child_of(nodes, parent, new_tokens[i])
        if place == 0:
            if count == nodes.shape[1]:
                continue
            place = count
            count += 1
            nodes[_TOKEN, place], nodes[_PARENT, place] = new_tokens[i], parent
            nodes[_CHILD, place], nodes[_SIBLING, place] = 0, nodes[_CHILD, parent]
            nodes[_CHILD, parent] = place
        scores[place] = new_scores[i]
        places[i] = place
    return count


@compiled
def build_table(nodes: Ints, scores: Reals, count: int, trust: float, base: int, table: Ints) -> None:
    """Write a tree as the device reads it: depth first, with depths and the costs of paths.

    Args:
        nodes, scores: [4, at least `count`] and [at least `count`] as in `_Tree`, parents before children.
        trust: scores are multiplied by it.
        base: tokens of the sequence up to and with the root.
        table: [TABLE] int32, written; see `tree_kernels.node_table`.
    """
    tokens, parents = nodes[_TOKEN], nodes[_PARENT]
    sizes = np.ones(count, np.int32)
    for i in range(count - 1, 0, -1):
        sizes[parents[i]] += sizes[i]
    place, following = np.zeros(count, np.int32), np.ones(count, np.int32)
    table[0], table[1] = base, count
    rows = table[2:].reshape(5, NODES)
    rows[0, 0], rows[1, 0], rows[2, 0], rows[3, 0], rows[4, 0] = tokens[0], 0, count, 0, 0
    for i in range(1, count):
        own = following[parents[i]]
        following[parents[i]] += sizes[i]
        place[i], following[i] = own, own + 1
        chance = min(scores[i] * trust, MOST_CHANCE)
        cost = MOST_COST
        if chance > 0.0:
            cost = min(MOST_COST, max(1, int(-np.log2(chance) * COST_OF_HALVING + 0.5)))
        above = place[parents[i]]
        rows[0, own], rows[1, own], rows[2, own] = tokens[i], above, own + sizes[i]
        rows[3, own], rows[4, own] = rows[3, above] + 1, rows[4, above] + cost


@compiled
def build_expected(expected: Ints, scores: Reals, base: int, root: int, table: Ints) -> None:
    """Write expected nodes alone as the device reads them: what `build_table` writes of `with_expected`.

    Args:
        expected, scores: as in `ExpectedTree`.
        base: tokens of the sequence up to and with the `root`, the token behind which they were expected.
        table: [TABLE] int32, written; see `tree_kernels.node_table`.
    """
    nodes, chances, places = np.zeros((4, NODES), np.int32), np.ones(NODES), np.empty(len(scores), np.int64)
    nodes[_TOKEN, 0] = root
    for i in range(len(scores)):
        places[i] = 0 if expected[1, i] < 0 else -2 - expected[1, i]
    count = insert(nodes, chances, 1, expected[0], scores, places)
    build_table(nodes, chances, count, 1.0, base, table)


def warm_up() -> None:
    """Compile what the first growth would wait for."""
    tree = _Tree(0)
    tree.reset(1, 0)
    places = np.zeros(1, np.int64)
    find_parents(places, 1, 0, places.copy())
    count = insert(tree.nodes, tree.scores, 1, np.ones(1, np.int32), np.ones(1), places)
    child_of(tree.nodes, 0, 1)
    expected = ExpectedTree.of(1, np.array([[1], [-1]], np.int32), np.ones(1), [0, 1])
    expected.left()
    with_expected(tree, expected, 1.0)
    build_table(tree.nodes, tree.scores, count, 1.0, 1, np.zeros(TABLE, np.int32))
    build_expected(expected.nodes, expected.scores, 1, 0, np.zeros(TABLE, np.int32))
