"""A sequence's drafted and predicted nodes as one tree, with a score of either source for every node."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass

from outrider.drafting.draft_tree import GrowingTree
from outrider.tree import MAX_ROWS, TokenTree
from target_service.execution.node_tables import PredictedChain

_ROOT = 0


@dataclass(frozen=True)
class PredictedTree(TokenTree):
    """A tree of which some rows were predicted. `predicted[i]` is the prediction's probability of row i given its
    parent, 0 for a row it does not hold. Rows that the draft does not hold have a score of 0."""

    predicted: tuple[float, ...] = ()

    @property
    def predicted_rows(self) -> int:
        """Rows that the prediction holds."""
        return sum(score > 0.0 for score in self.predicted)

    def accepted_predicted(self, accepted_rows: SequenceOf[int]) -> int:
        """How many of the accepted rows the prediction holds."""
        return sum(self.predicted[row] > 0.0 for row in accepted_rows)


class MergedTree:
    """A growing tree, if there is one, and predicted chains below the same root. Equal nodes are one.

    Without distributions: not for rejection sampling, unless there is no growing tree.

    Attributes, by node, the root first:
        parents: the node's parent.
        scores: the draft's probability of the node; 0 where it does not hold it.
        predicted: the prediction's probability of the node; 0 where it does not hold it.
    """

    def __init__(self, root: int, grown: GrowingTree | None, chains: SequenceOf[PredictedChain]) -> None:
        """`root` is the sequence's last token, which is the growing tree's root too."""
        self._tokens = [root] if grown is None else list(grown.token_ids)
        self.parents = [_ROOT] if grown is None else list(grown.parents)
        self.scores = [1.0] if grown is None else list(grown.scores)
        self.predicted = [0.0] * len(self._tokens)
        self._children = {(self.parents[node], self._tokens[node]): node for node in range(1, len(self._tokens))}
        for chain in chains:
            self._graft(chain)

    @property
    def nodes(self) -> int:
        """Nodes below the root."""
        return len(self._tokens) - 1

    def _graft(self, chain: PredictedChain) -> None:
        node = _ROOT
        for token, score in zip(*chain, strict=True):
            child = self._children.get((node, token))
            if child is None:
                if len(self._tokens) >= MAX_ROWS:
                    return
                child = len(self._tokens)
                self._children[node, token] = child
                self._tokens.append(token)
                self.parents.append(node)
                self.scores.append(0.0)
                self.predicted.append(0.0)
            self.predicted[child] = max(score, self.predicted[child])
            node = child

    def cut(self, nodes: Set[int]) -> TokenTree:
        """The tree of the root and `nodes`, which must hold every node's ancestors."""
        rows = {node: row for row, node in enumerate([_ROOT, *sorted(nodes)])}
        return PredictedTree(
            token_ids=tuple(self._tokens[node] for node in rows),
            parents=tuple(rows[self.parents[node]] for node in rows),
            scores=tuple(self.scores[node] for node in rows),
            predicted=tuple(self.predicted[node] for node in rows),
        )
