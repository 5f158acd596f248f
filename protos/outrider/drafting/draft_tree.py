"""The target's copy of each sequence's growing tree: graft what the draft sends, cut what can be afforded, re-root.

Growth may cross an advance on the wire. Each growth names the step it was made for, and ids never change their
meaning, so a late growth is walked down the tokens committed since: what agrees with them lands under the new root,
the rest is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import replace

from outrider.errors import InvalidField
from outrider.tree import MAX_ROWS, DraftDistribution, TokenTree
from outrider.wire.frames import ROOT_ID, SequenceGrowth, is_self_contained

# Steps a late growth may lie behind, and committed tokens whose node ids are remembered for it.
MEMORY_STEPS = 64
MEMORY_TOKENS = 256
# Node ids that are remembered between two commits. A draft sends a tree or two then; one that names the same node again
# and again would have every commit look through all its names.
MEMORY_IDS = 8 * MAX_ROWS
# Trees that were replaced before they were used, whose committed ids a later growth may name. Chosen, not measured: a
# draft sends one or two between two commits.
MEMORY_UNUSED = 8
_ROOT = 0


class GrowingTree:
    """What the draft has sent of one sequence.

    Nodes are numbered in order of arrival, 0 being the root, so parents come before children. A node id stands
    either for a live node (its number) or for a committed token (minus the sequence's length up to it).
    """

    def __init__(self, token_ids: list[int], step: int) -> None:
        """Start at the last of `token_ids`, which stays the sequence's own list and grows with each commit."""
        self._committed = token_ids
        self._length = len(token_ids)
        self._step = step
        self._lengths = {step: self._length}
        self._next_id = 1
        self._where: dict[int, int] = {}
        # The step that the draft has answered, and the one that it was asked about last.
        self.answered_step, self._asked_step = -1, step
        self._held: SequenceGrowth | None = None
        # Self-contained growths that were replaced before they were used.
        self._unused: deque[SequenceGrowth] = deque(maxlen=MEMORY_UNUSED)
        self._clear()

    def _clear(self) -> None:
        self._tokens = [self._committed[self._length - 1]]
        self._parents = [_ROOT]
        self._scores = [1.0]
        self._children: list[dict[int, int]] = [{}]
        self._distributions: dict[int, DraftDistribution] = {}
        if self._where:
            self._where = {node_id: place for node_id, place in self._where.items() if place <= _ROOT}

    @property
    def step(self) -> int:
        """The sequence's step as of the last commit."""
        return self._step

    @property
    def answered(self) -> bool:
        """Whether the draft has spoken since it was last asked."""
        return self.answered_step >= self._asked_step

    def ask(self) -> None:
        """The last commit was sent to the draft."""
        self._asked_step = self._step

    @property
    def nodes(self) -> int:
        """Live nodes below the root."""
        return len(self._tokens) - 1

    @property
    def scores(self) -> SequenceOf[float]:
        """Per live node, the root first: the probability of acceptance given that the parent is accepted. The root's is
        1."""
        return self._scores

    @property
    def token_ids(self) -> SequenceOf[int]:
        """Per live node, the root first."""
        return self._tokens

    @property
    def parents(self) -> SequenceOf[int]:
        """Per live node, the root first: the number of its parent."""
        return self._parents

    def length_at(self, step: int) -> int | None:
        """Tokens that the sequence had at a step, if that is remembered."""
        return self._lengths.get(step)

    def lag(self, growth: SequenceGrowth) -> int:
        """How many commits `growth` lies behind. Negative for a step that has not happened."""
        return self._step - growth.base_step

    def graft(self, growth: SequenceGrowth) -> None:
        """Add the growth's nodes. Raises `InvalidField` for ids that were never given or steps that never were."""
        self.hold(growth)
        self.settle()

    def hold(self, growth: SequenceGrowth) -> None:
        """Keep the growth, and leave it to `settle` to add its nodes, which must come before the tree is read.

        What replaces the tree may be replaced itself before it is read, as when drafts are followed and not used.
        Raises `InvalidField` as `graft`, or leaves that to `settle`.
        """
        if growth.base_step > self._step:
            raise InvalidField("growth.base_step", "lies ahead of the sequence")
        if growth.first_node_id < self._next_id:
            raise InvalidField("growth.first_node_id", "was given before")
        self.answered_step = max(self.answered_step, growth.base_step)
        self._next_id = growth.first_node_id + len(growth.token_ids)
        self_contained = growth.self_contained
        if self_contained is None:
            self_contained = is_self_contained(growth.parent_ids, growth.first_node_id)
        if not (growth.replaces and self_contained):
            self.settle()
        if not growth.replaces:
            self._add(growth)
        elif not self_contained:
            # `settle` has added the nodes that it hangs below.
            self._clear()
            self._add(growth)
        else:
            if self._held is not None:
                # Its scores and distributions are of no more use.
                self._unused.append(replace(self._held, scores=(), distributions={}))
            self._clear()
            self._held = growth

    def settle(self) -> None:
        """Add the nodes of a growth that is held. Raises `InvalidField` when it is malformed."""
        while self._unused:
            self._keep_committed(self._unused.popleft())
        held, self._held = self._held, None
        if held is not None:
            self._add(held)

    def _keep_committed(self, growth: SequenceGrowth) -> None:
        """Remember the ids of committed tokens in a growth that was replaced unused."""
        # The path from its root with those tokens.
        length, parent_id, place = self._lengths.get(growth.base_step, self._length), ROOT_ID, -1
        while length < self._length:
            place = _child(growth, parent_id, self._committed[length], place + 1)
            if place < 0:
                return
            length, parent_id = length + 1, growth.first_node_id + place
            self._where[parent_id] = self._place_of(length)

    def _place_of(self, length: int) -> int:
        """Where the committed token that ends the sequence at this length stands."""
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
            raise InvalidField("growth.first_node_id", f"more than {MEMORY_IDS} nodes were named at one step")
        for parent_id, distribution in growth.distributions.items():
            parent = base_place if parent_id == ROOT_ID else self._where.get(parent_id)
            if parent is not None and parent >= _ROOT:
                self._set_distribution(parent, distribution)

    def _set_distribution(self, parent: int, distribution: DraftDistribution) -> None:
        if not self._children[parent].keys() <= set(distribution.token_ids):
            raise InvalidField("growth.distributions", "does not hold every child of its parent")
        self._distributions[parent] = distribution

    def _place(self, parent: int, token: int, score: float) -> int | None:
        """Where a child of `parent` stands: a live node, a committed token, or None when another was committed."""
        if parent < _ROOT:
            length = -parent
            if self._committed[length] != token:
                return None
            return self._place_of(length + 1)
        known = self._children[parent].get(token)
        if known is not None:
            self._scores[known] = score
            return known
        distribution = self._distributions.get(parent)
        if len(self._tokens) >= MAX_ROWS or (distribution is not None and token not in distribution.token_ids):
            return None
        node = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._scores.append(score)
        self._children.append({})
        self._children[parent][token] = node
        return node

    def advance(self, committed: int, *, asked: bool = True) -> None:
        """Re-root after `committed` tokens were appended to the sequence: keep the subtree they lead to. Unless the
        draft is `asked` about them now, the answer to what it was asked before will do until `ask`."""
        path: dict[int, int] = {}
        node: int | None = _ROOT
        for length in range(self._length, self._length + committed):
            if node is None:
                break
            path[node] = -length
            node = self._children[node].get(self._committed[length])
        self._length += committed
        self._step += 1
        self._lengths[self._step] = self._length
        self._lengths.pop(self._step - MEMORY_STEPS, None)
        if asked:
            self.ask()
        self._reroot(node, path)

    def _reroot(self, root: int | None, path: dict[int, int]) -> None:
        """Keep what hangs below `root`; ids of committed nodes turn into the lengths in `path`."""
        renumbered: dict[int, int] = {}
        tokens, parents, scores, distributions = self._tokens, self._parents, self._scores, self._distributions
        where, oldest = self._where, self._length - MEMORY_TOKENS
        self._where = {}
        self._clear()
        if root is not None:
            renumbered[root] = _ROOT
            for node in range(root + 1, len(tokens)):
                parent = renumbered.get(parents[node])
                if parent is not None:
                    renumbered[node] = self._append(tokens[node], parent, scores[node])
            self._distributions = {
                renumbered[node]: distribution for node, distribution in distributions.items() if node in renumbered
            }
        for node_id, place in where.items():
            moved = place if place < _ROOT else renumbered.get(place, path.get(place))
            if moved is not None and (moved >= _ROOT or -moved >= oldest):
                self._where[node_id] = moved

    def _append(self, token: int, parent: int, score: float) -> int:
        placed = self._place(parent, token, score)
        assert placed is not None
        return placed

    def cut(self, nodes: Set[int]) -> TokenTree:
        """The tree of the root and `nodes`, which must hold every node's ancestors. Rows keep order of arrival."""
        rows = {_ROOT: 0}
        for node in sorted(nodes):
            rows[node] = len(rows)
        return TokenTree(
            token_ids=tuple(self._tokens[node] for node in rows),
            parents=tuple(rows[self._parents[node]] for node in rows),
            scores=tuple(self._scores[node] for node in rows),
            distributions={
                rows[node]: distribution for node, distribution in self._distributions.items() if node in rows
            },
        )


def _child(growth: SequenceGrowth, parent_id: int, token: int, begin: int) -> int:
    """The place in a growth, from `begin` on, of the child of a node with a token; -1 where there is none."""
    tokens, parents = growth.token_ids, growth.parent_ids
    while True:
        # In C: a loop over 239 nodes took half of what a growth takes of the engine's thread.
        try:
            place = tokens.index(token, begin)
        except ValueError:
            return -1
        if parents[place] == parent_id:
            return place
        begin = place + 1
