"""Several drafters for the same sequence, their trees merged: which one knows best changes from text to text.

GREEDY and COUPLED take any tree, so the trees are joined: a child that several drafters propose is one node with the
highest of their scores, and of all nodes the most worthy are kept. REJECTION does not: a node must have been drawn from
the one law that its parent carries, so there the tree is that of the first drafter that has one. That choice looks at
which drafters know nothing of a sequence, never at what was drawn, so the trees stay exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draft_service.drafter import (
    CorpusDrafter,
    CorpusGrowth,
    Drafter,
    DrafterSpec,
    DraftSequence,
    FeatureDrafter,
    MakePart,
    features_of,
    tree_limits,
)
from outrider.errors import NotSupported, OutriderError
from outrider.frames import FeatureRequest, TreeLimits
from outrider.sampling import VerificationMode
from outrider.settings import SettingsError, setting
from outrider.tree import MAX_ROWS, TokenTree


@dataclass(frozen=True)
class MergedConfig:
    """Settings of the merged drafter: flags, environment (`OUTRIDER_MERGED_*`) or the `[merged]` table.

    The drafters that are merged have theirs from the same sources; a flag that several have is for each of them.
    """

    merged_drafters: str = setting("eagle,trie", "drafters to merge, comma-separated; the first goes first where one")
    merged_nodes: int = setting(0, "nodes of a merged tree; 0 takes the largest of the drafters' own")

    def __post_init__(self) -> None:
        if not 0 <= self.merged_nodes < MAX_ROWS:
            raise SettingsError(f"merged_nodes must be 0..{MAX_ROWS - 1}")
        if len(self.names) < 2 or len(set(self.names)) != len(self.names) or "merged" in self.names:
            raise SettingsError("merged_drafters needs two or more different drafters")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.merged_drafters.split(","))


class MergedDrafter:
    """See `MergedConfig`. At most one of the drafters may want features."""

    name = "merged"

    def __init__(self, config: MergedConfig, parts: Sequence[Drafter]) -> None:
        """Raises `NotSupported` for drafters that cannot serve the same sequence."""
        self._parts = tuple(parts)
        nodes = config.merged_nodes or max(part.limits.max_nodes for part in parts)
        self.limits = TreeLimits(nodes, max(part.limits.max_depth for part in parts))
        self.max_context = min(part.max_context for part in parts)
        vocabularies = {part.vocabulary_size for part in parts} - {0}
        if len(vocabularies) > 1:
            raise NotSupported(f"the merged drafters have vocabularies of {sorted(vocabularies)}")
        self.vocabulary_size = max(vocabularies, default=0)
        wanted = [request for part in parts if (request := features_of(part)) is not None]
        if len(wanted) > 1:
            raise NotSupported("more than one of the merged drafters wants features")
        # The others draft without.
        self.features: FeatureRequest | None = replace(wanted[0], required=False) if wanted else None

    def start(self) -> None:
        """Start every drafter."""
        for part in self._parts:
            part.start()

    def stop(self) -> None:
        """Stop every drafter."""
        for part in self._parts:
            part.stop()

    def open(self, sequence: DraftSequence) -> None:
        # They share the list of tokens, and each has a state of its own.
        views = [replace(sequence, state=None, features=None) for _ in self._parts]
        opened = 0
        try:
            for part, view in zip(self._parts, views, strict=True):
                part.open(view)
                opened += 1
        except OutriderError:
            for part, view in zip(self._parts[:opened], views, strict=False):
                part.close(view)
            raise
        sequence.state = views
        sequence.features = next((view.features for view in views if view.features is not None), None)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        for part, view in zip(self._parts, sequence.state, strict=True):
            part.advance(view, committed)

    def close(self, sequence: DraftSequence) -> None:
        if sequence.state is not None:
            for part, view in zip(self._parts, sequence.state, strict=True):
                part.close(view)
        sequence.state = sequence.features = None

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """See `FeatureDrafter.absorb`."""
        for number, part in enumerate(self._parts):
            if isinstance(part, FeatureDrafter):
                part.absorb([sequence.state[number] for sequence in sequences])

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        found: list[list[TokenTree]] = [[] for _ in sequences]
        for number, part in enumerate(self._parts):
            asked = [
                place
                for place, sequence in enumerate(sequences)
                if sequence.mode is not VerificationMode.REJECTION or not any(tree.drafted for tree in found[place])
            ]
            trees = part.propose([sequences[place].state[number] for place in asked]) if asked else []
            for place, tree in zip(asked, trees, strict=True):
                found[place].append(tree)
        return [
            found[place][-1] if sequence.mode is VerificationMode.REJECTION else self._merge(sequence, found[place])
            for place, sequence in enumerate(sequences)
        ]

    def stats(self) -> Mapping[str, float]:
        return {name: value for part in self._parts for name, value in part.stats().items()}

    def _merge(self, sequence: DraftSequence, trees: Sequence[TokenTree]) -> TokenTree:
        return merge_trees(trees, tree_limits(self.limits, sequence.limits).max_nodes)


class MergedCorpusDrafter(MergedDrafter):
    """One that has a drafter which can be taught documents."""

    def add_corpus(self, tenant: str, corpus: str, token_ids: Sequence[int]) -> CorpusGrowth:
        """See `CorpusDrafter.add_corpus`."""
        learner = next(part for part in self._parts if isinstance(part, CorpusDrafter))
        return learner.add_corpus(tenant, corpus, token_ids)


def merge_trees(trees: Sequence[TokenTree], nodes: int) -> TokenTree:
    """The best `nodes` nodes of trees with one and the same root, in falling order of worth, parents first.

    A node that several trees have takes the highest of its scores. Siblings whose scores then sum to more than 1 are
    scaled, since only one of them can be accepted. Distributions are left out.
    """
    # Node 0 is the root.
    tokens, scores = [trees[0].token_ids[0]], [1.0]
    children: list[dict[int, int]] = [{}]
    for tree in trees:
        node_of = [0]
        for row in range(1, len(tree)):
            token, siblings = tree.token_ids[row], children[node_of[tree.parents[row]]]
            node = siblings.setdefault(token, len(tokens))
            if node == len(tokens):
                tokens.append(token)
                scores.append(0.0)
                children.append({})
            scores[node] = max(scores[node], tree.scores[row])
            node_of.append(node)
    kept, parents, kept_scores = [0], [0], [1.0]
    # The most worthy first; of equals, the one that was proposed first.
    waiting: list[tuple[float, int, int, float]] = []
    worth, row = 1.0, 0
    while True:
        below = children[kept[row]].values()
        total = max(1.0, sum(scores[node] for node in below))
        for node in below:
            heapq.heappush(waiting, (-worth * scores[node] / total, node, row, scores[node] / total))
        if not waiting or len(kept) > nodes:
            break
        negative, node, parent, score = heapq.heappop(waiting)
        worth, row = -negative, len(kept)
        kept.append(node)
        parents.append(parent)
        kept_scores.append(score)
    rows = slice(0, nodes + 1)
    return TokenTree(tuple(tokens[node] for node in kept[rows]), tuple(parents[rows]), tuple(kept_scores[rows]))


def _create(config: MergedConfig, make: MakePart) -> Drafter:
    parts = [make(name) for name in config.names]
    learns = any(isinstance(part, CorpusDrafter) for part in parts)
    return (MergedCorpusDrafter if learns else MergedDrafter)(config, parts)


SPEC = DrafterSpec("merged", "merged", MergedConfig, _create, parts=lambda config: config.names)
