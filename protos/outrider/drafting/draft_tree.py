"""The target's copy of each sequence's growing tree: graft what the draft sends, cut the best rows, re-root.

Growth may cross an advance on the wire. Each growth carries the step it was made for, and node ids are never reused, so
a late growth is walked down the tokens committed since: the part that agrees is put under the new root.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from outrider.errors import InvalidField
from outrider.tree import MAX_ROWS, DraftDistribution, TokenTree
from outrider.wire.frames import ROOT_ID, SequenceGrowth, is_self_contained

# Steps that a late growth may lie behind, and committed tokens whose node ids are kept for it.
MEMORY_STEPS = 64
MEMORY_TOKENS = 256
# Node ids that are kept between two commits, in which a draft sends a tree or two. One that sends the same node under
# ever new ids would make every commit search them all.
MEMORY_IDS = 8 * MAX_ROWS
# Trees replaced unused whose committed ids a later growth may name. Chosen, not measured: a draft sends one or two.
MEMORY_UNUSED = 8
_ROOT = 0
# What the draft counts a sequence's nodes from.
_FIRST_ID = 1


class GrowingTree:
    """The tree that the draft has sent for one sequence. Nodes are numbered in order of arrival, 0 being the root, so
    parents come before children. A node id refers to a *place*: a live node (its number) or a committed token (minus
    the sequence's length up to it)."""

    def __init__(self, token_ids: list[int], step: int, *, reopened: bool = False) -> None:
        """Start at the last of `token_ids`, which stays the sequence's own list and grows with each commit. `reopened`:
        the sequence was opened at this draft before, so growths of that time may come until the first one of this
        opening, whose ids begin at 1 again."""
        self._reopened = reopened
        self._committed = token_ids
        self._length = len(token_ids)
        # As of the last commit.
        self.step = step
        self._lengths = {step: self._length}
        self._next_id = _FIRST_ID
        self._where: dict[int, int] = {}
        # The last step that the draft has answered.
        self.answered_step = -1
        self._held: SequenceGrowth | None = None
        # Self-contained growths that were replaced before they were used.
        self._unused: deque[SequenceGrowth] = deque(maxlen=MEMORY_UNUSED)
        self._clear()

    def _clear(self) -> None:
        # Per live node, the root first: its token, its parent's number, and the probability that it is accepted given
        # that its parent is, which is 1 for the root.
        self.token_ids = [self._committed[self._length - 1]]
        self.parents = [_ROOT]
        self.scores = [1.0]
        self._children: list[dict[int, int]] = [{}]
        self._distributions: dict[int, DraftDistribution] = {}
        if self._where:
            self._where = {node_id: place for node_id, place in self._where.items() if place <= _ROOT}

    @property
    def answered(self) -> bool:
        """Whether the draft has answered the last commit."""
        return self.answered_step >= self.step

    @property
    def nodes(self) -> int:
        """Live nodes below the root."""
        return len(self.token_ids) - 1

    def length_at(self, step: int) -> int | None:
        """How many tokens the sequence had at a step; None for one that is too old."""
        return self._lengths.get(step)

    def lag(self, growth: SequenceGrowth) -> int:
        """How many commits `growth` lies behind; negative for a step that lies ahead."""
        return self.step - growth.base_step

    def begins_again(self, growth: SequenceGrowth) -> bool:
        """Whether the growth is the first of this opening, though some came. Those, of an earlier one, are dropped."""
        if not self._reopened or growth.first_node_id != _FIRST_ID or self._next_id == _FIRST_ID:
            return False
        self._reopened, self._next_id, self._held = False, _FIRST_ID, None
        self._unused.clear()
        self._where.clear()
        self._clear()
        return True

    def hold(self, growth: SequenceGrowth) -> None:
        """Keep the growth; `settle` adds its nodes, and must be called before the tree is read: a growth that replaces
        the tree may itself be replaced before, as when drafts are followed but not used. Raises `InvalidField` for a
        growth that is malformed, that uses ids again, or whose step lies ahead, or leaves that to `settle`."""
        if growth.base_step > self.step:
            raise InvalidField("growth.base_step", "lies ahead of the sequence")
        if growth.first_node_id < self._next_id:
            raise InvalidField("growth.first_node_id", "was used before")
        self.answered_step = max(self.answered_step, growth.base_step)
        self._next_id = growth.first_node_id + len(growth.token_ids)
        self_contained = growth.self_contained
        if self_contained is None:
            self_contained = is_self_contained(growth.parent_ids, growth.first_node_id)
        if growth.replaces and self_contained:
            if self._held is not None:
                # As it is: a copy without scores takes longer than its place among so few is worth.
                self._unused.append(self._held)
            self._clear()
            self._held = growth
            return
        self.settle()
        if growth.replaces:
            # `settle` has added its parents.
            self._clear()
        self._add(growth)

    def settle(self) -> None:
        """Add the nodes of a held growth. Raises `InvalidField` when it is malformed."""
        while self._unused:
            self._keep_committed(self._unused.popleft())
        held, self._held = self._held, None
        if held is not None:
            self._add(held)

    def _keep_committed(self, growth: SequenceGrowth) -> None:
        """Keep the ids of committed tokens in a growth that was replaced unused."""
        # The path from its root with those tokens.
        length, parent_id, index = self._lengths.get(growth.base_step, self._length), ROOT_ID, -1
        while length < self._length:
            index = _child(growth, parent_id, self._committed[length], index + 1)
            if index < 0:
                return
            length, parent_id = length + 1, growth.first_node_id + index
            self._where[parent_id] = self._place_of(length)

    def _place_of(self, length: int) -> int:
        """The place of the committed token that ends the sequence at this length."""
        return _ROOT if length == self._length else -length

    def _add(self, growth: SequenceGrowth) -> None:
        base = self._lengths.get(growth.base_step)
        if base is None:
            return
        base_place = self._place_of(base)
        for offset, (parent_id, token) in enumerate(zip(growth.parent_ids, growth.token_ids, strict=True)):
            node_id = growth.first_node_id + offset
            if parent_id >= node_id:
                raise InvalidField(f"growth.parent_ids[{offset}]", "is not an earlier node")
            parent = base_place if parent_id == ROOT_ID else self._where.get(parent_id)
            if parent is None:
                continue
            place = self._place(parent, token, growth.scores[offset])
            if place is not None:
                self._where[node_id] = place
        if len(self._where) > MEMORY_IDS:
            raise InvalidField("growth.first_node_id", f"more than {MEMORY_IDS} node ids were used at one step")
        for parent_id, distribution in growth.distributions.items():
            parent = base_place if parent_id == ROOT_ID else self._where.get(parent_id)
            if parent is not None and parent >= _ROOT:
                if not self._children[parent].keys() <= set(distribution.token_ids):
                    raise InvalidField("growth.distributions", "does not hold every child of its parent")
                self._distributions[parent] = distribution

    def _place(self, parent: int, token: int, score: float) -> int | None:
        """The place of a child of `parent`, added if new; None if it cannot be one, or another token was committed."""
        if parent < _ROOT:
            length = -parent
            if self._committed[length] != token:
                return None
            return self._place_of(length + 1)
        known = self._children[parent].get(token)
        if known is not None:
            self.scores[known] = score
            return known
        distribution = self._distributions.get(parent)
        if len(self.token_ids) >= MAX_ROWS or (distribution is not None and token not in distribution.token_ids):
            return None
        node = len(self.token_ids)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self._children.append({})
        self._children[parent][token] = node
        return node

    def move_root(self, committed: int) -> None:
        """Re-root after `committed` tokens were appended to the sequence: keep the subtree they lead to."""
        before, self._length = self._length, self._length + committed
        self.step += 1
        self._lengths[self.step] = self._length
        self._lengths.pop(self.step - MEMORY_STEPS, None)
        if not self.nodes and not self._where:
            # In most steps where the device chooses rows: growth is held, and then replaced by newer growth.
            self._clear()
            return
        path: dict[int, int] = {}
        node: int | None = _ROOT
        for length in range(before, self._length):
            if node is None:
                break
            path[node] = -length
            node = self._children[node].get(self._committed[length])
        self._reroot(node, path)

    def _reroot(self, root: int | None, path: dict[int, int]) -> None:
        """Keep the subtree of `root`; ids of committed nodes turn into the places in `path`."""
        renumbered: dict[int, int] = {}
        tokens, parents, scores, distributions = self.token_ids, self.parents, self.scores, self._distributions
        where, oldest = self._where, self._length - MEMORY_TOKENS
        self._where = {}
        self._clear()
        if root is not None:
            renumbered[root] = _ROOT
            for node in range(root + 1, len(tokens)):
                parent = renumbered.get(parents[node])
                if parent is not None:
                    placed = self._place(parent, tokens[node], scores[node])
                    assert placed is not None
                    renumbered[node] = placed
            self._distributions = {
                renumbered[node]: distribution for node, distribution in distributions.items() if node in renumbered
            }
        for node_id, place in where.items():
            moved = place if place < _ROOT else renumbered.get(place, path.get(place))
            if moved is not None and (moved >= _ROOT or -moved >= oldest):
                self._where[node_id] = moved

    def cut(self, nodes: Set[int]) -> TokenTree:
        """The tree of the root and `nodes`, which must hold every node's ancestors. Rows keep the order of arrival."""
        rows = {node: row for row, node in enumerate([_ROOT, *sorted(nodes)])}
        return TokenTree(
            token_ids=tuple(self.token_ids[node] for node in rows),
            parents=tuple(rows[self.parents[node]] for node in rows),
            scores=tuple(self.scores[node] for node in rows),
            distributions={
                rows[node]: distribution for node, distribution in self._distributions.items() if node in rows
            },
        )


def _child(growth: SequenceGrowth, parent_id: int, token: int, begin: int) -> int:
    """The index in a growth, from `begin` on, of the child of a node with a token; -1 if there is none."""
    while True:
        # `index` runs in C: a loop over 239 nodes took half of a growth's time on the engine's thread.
        try:
            index = growth.token_ids.index(token, begin)
        except ValueError:
            return -1
        if growth.parent_ids[index] == parent_id:
            return index
        begin = index + 1
