"""What a draft and a prediction say of one sequence, as one tree, of which every node knows who said it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from collections.abc import Set
from dataclasses import dataclass

from outrider.drafting.draft_tree import GrowingTree
from outrider.tree import MAX_ROWS, TokenTree
from target_service.core.predicted_chain import PredictedChain

_ROOT = 0


@dataclass(frozen=True)
class PredictedTree(TokenTree):
    """A tree of which some rows were predicted.

    `predicted[i]` is the prediction's probability of row i given its parent, 0 where it does not say that row. A score
    of 0 is that of a row which the draft does not say.
    """

    predicted: tuple[float, ...] = ()

    @property
    def predicted_rows(self) -> int:
        """Rows that the prediction says."""
        return sum(score > 0.0 for score in self.predicted)

    def accepted_predicted(self, accepted_rows: SequenceOf[int]) -> int:
        """Of the accepted rows, those that the prediction says."""
        return sum(self.predicted[row] > 0.0 for row in accepted_rows)

    def accepted_drafted(self, accepted_rows: SequenceOf[int]) -> int:
        """Of the accepted rows, those that the draft says."""
        return sum(self.scores[row] > 0.0 for row in accepted_rows)


class MergedTree:
    """A growing tree, if there is one, and predicted chains below the same root. Equal nodes are one.

    Without distributions: not for rejection sampling, unless there is no growing tree.
    """

    def __init__(self, root: int, grown: GrowingTree | None, chains: SequenceOf[PredictedChain]) -> None:
        """`root` is the sequence's last token, which is the growing tree's root too."""
        self._tokens = [root] if grown is None else list(grown.token_ids)
        self._parents = [_ROOT] if grown is None else list(grown.parents)
        self._scores = [1.0] if grown is None else list(grown.scores)
        self._predicted = [0.0] * len(self._tokens)
        self._children = {(self._parents[node], self._tokens[node]): node for node in range(1, len(self._tokens))}
        for chain in chains:
            self._hang(chain)

    @property
    def nodes(self) -> int:
        """Nodes below the root."""
        return len(self._tokens) - 1

    @property
    def scores(self) -> SequenceOf[float]:
        """By node, the root first: the draft's; 0 where it does not say the node."""
        return self._scores

    @property
    def predicted(self) -> SequenceOf[float]:
        """By node, the root first: the prediction's; 0 where it does not say the node."""
        return self._predicted

    @property
    def parents(self) -> SequenceOf[int]:
        """By node, the root first: the number of its parent."""
        return self._parents

    def _hang(self, chain: PredictedChain) -> None:
        node = _ROOT
        for token, score in zip(*chain, strict=True):
            child = self._children.get((node, token))
            if child is None:
                if len(self._tokens) >= MAX_ROWS:
                    return
                child = len(self._tokens)
                self._children[node, token] = child
                self._tokens.append(token)
                self._parents.append(node)
                self._scores.append(0.0)
                self._predicted.append(0.0)
            self._predicted[child] = max(score, self._predicted[child])
            node = child

    def cut(self, nodes: Set[int]) -> TokenTree:
        """The tree of the root and `nodes`, which must hold every node's ancestors."""
        rows = {_ROOT: 0}
        for node in sorted(nodes):
            rows[node] = len(rows)
        return PredictedTree(
            token_ids=tuple(self._tokens[node] for node in rows),
            parents=tuple(rows[self._parents[node]] for node in rows),
            scores=tuple(self._scores[node] for node in rows),
            predicted=tuple(self._predicted[node] for node in rows),
        )
