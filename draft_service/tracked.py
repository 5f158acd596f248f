"""One open sequence of a stream: the drafter's view of it, where it stands on the wire, and its growth."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.packing import signed
from outrider.tree import TokenTree
from outrider.wire.frames import ROOT_ID, SequenceGrowth


@dataclass(slots=True)
class Tracked:
    """One open sequence: the drafter's view of it, and where it stands on the wire.

    Node ids are uint32 and never used twice: at 2,046 a step they suffice for any context.
    """

    draft: DraftSequence
    step: int
    next_node_id: int = 1

    @property
    def head(self) -> tuple[int, int, int, int]:
        """The head of its tree, see `drafters.packing.pack`."""
        draft = self.draft
        return signed(draft.sequence_id), signed(self.step), self.next_node_id, draft.vocabulary_size

    def growth(self, tree: TokenTree) -> SequenceGrowth:
        """The whole tree under fresh ids: it replaces what was sent before."""
        tree = _below(tree, self.draft.vocabulary_size)
        first = self.next_node_id
        self.next_node_id += tree.drafted
        shift = first - 1
        return SequenceGrowth(
            sequence_id=self.draft.sequence_id,
            base_step=self.step,
            first_node_id=first,
            parent_ids=tuple([parent + shift if parent else ROOT_ID for parent in tree.parents[1:]]),
            token_ids=tree.token_ids[1:],
            scores=tree.scores[1:],
            distributions={row + shift if row else ROOT_ID: drawn for row, drawn in tree.distributions.items()},
            replaces=True,
        )


def _below(tree: TokenTree, vocabulary_size: int) -> TokenTree:
    """The tree without tokens past the target's vocabulary, and without their subtrees.

    A drafter for any vocabulary may have learnt from a target with a larger one.
    """
    if max(tree.token_ids) < vocabulary_size:
        return tree
    rows = {0: 0}
    for row in range(1, len(tree)):
        if tree.parents[row] in rows and tree.token_ids[row] < vocabulary_size:
            rows[row] = len(rows)
    return TokenTree(
        token_ids=tuple(tree.token_ids[row] for row in rows),
        parents=tuple(rows[tree.parents[row]] for row in rows),
        scores=tuple(tree.scores[row] for row in rows),
    )
