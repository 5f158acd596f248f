"""Several drafters for the same sequence, their trees merged: which one is best changes from text to text.

GREEDY and COUPLED take any tree, so the trees are joined: a child that several drafters propose is one node with the
highest of their scores, and of all nodes the likeliest are kept. REJECTION does not: a node must have been drawn from
the one distribution that its parent carries, so there the tree is that of the first drafter that has one. That choice
depends on which drafters have no tree for a sequence, never on drawn tokens, so the trees stay exact.

While one drafter computes on another device, the others compute here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from draft_service.compiling import LOOPS
from draft_service.drafters.base import (
    CorpusDrafter,
    Drafter,
    DrafterSpec,
    DraftSequence,
    FeatureDrafter,
    device_of,
    features_of,
    fingerprint_of,
    loops_of,
    most_sequences_of,
    tree_limits,
)
from draft_service.drafters.grown import ArrayDrafter, GrownTrees, Pending, computed, in_order
from draft_service.drafters.merging import merge_grown
from outrider.errors import NotSupported
from outrider.settings import Settings, SettingsError, setting
from outrider.tree import TokenTree
from outrider.wire.frames import MAX_NODES, FeatureRequest, TreeLimits


@dataclass(frozen=True)
class MergedConfig(Settings):
    """Settings of the merged drafter: flags, environment (`OUTRIDER_MERGED_*`) or the `[merged]` table. The drafters
    that are merged have theirs from the same sources; a flag that several have is for each of them."""

    merged_drafters: str = setting("eagle,trie", "drafters to merge, comma-separated; the first goes first where one")
    merged_nodes: int = setting(
        0, "nodes of a merged tree; 0 takes as many as the largest of the trees has", ge=0, le=MAX_NODES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.names) < 2 or len(set(self.names)) != len(self.names) or "merged" in self.names:
            raise SettingsError("merged_drafters needs two or more different drafters")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.merged_drafters.split(","))


class MergedDrafter(Drafter):
    """See `MergedConfig`. At most one of the drafters may read features. The first that learns documents makes this a
    `CorpusDrafter`."""

    name = "merged"

    def __init__(self, config: MergedConfig, parts: Sequence[Drafter]) -> None:
        """Raises `NotSupported` for drafters that cannot serve the same sequence."""
        self._parts = tuple(parts)
        # As many as are set, whatever the parts have.
        self._all_nodes = config.merged_nodes > 0
        nodes = config.merged_nodes or max(part.limits.max_nodes for part in parts)
        self.limits = TreeLimits(nodes, max(part.limits.max_depth for part in parts))
        self.device = next((device for part in parts if (device := device_of(part)) != "cpu"), "cpu")
        self.max_context = min(part.max_context for part in parts)
        self.most_sequences = min(map(most_sequences_of, parts))
        self.loops = (*(loop for part in parts for loop in loops_of(part)), f"{__name__}:compile_loops")
        vocabularies = {part.vocabulary_size for part in parts} - {0}
        if len(vocabularies) > 1:
            raise NotSupported(f"the merged drafters have vocabularies of {sorted(vocabularies)}")
        self.vocabulary_size = max(vocabularies, default=0)
        tokenizers = {fingerprint_of(part) for part in parts} - {""}
        if len(tokenizers) > 1:
            raise NotSupported("the merged drafters were made for different tokenizers")
        self.tokenizer_fingerprint = max(tokenizers, default="")
        wanted = [request for part in parts if (request := features_of(part)) is not None]
        if len(wanted) > 1:
            raise NotSupported("more than one of the merged drafters reads features")
        # The others draft without features.
        self.features: FeatureRequest | None = replace(wanted[0], required=False) if wanted else None
        learner = next((part for part in parts if isinstance(part, CorpusDrafter)), None)
        if learner is not None:
            self.add_corpus, self.corpora = learner.add_corpus, learner.corpora
            self.delete_corpus = learner.delete_corpus

    def start(self) -> None:
        """Start every drafter, and compile what merges and packs their trees."""
        for part in self._parts:
            part.start()
        LOOPS.wait()
        compile_loops()

    def stop(self) -> None:
        for part in self._parts:
            part.stop()

    def open(self, sequence: DraftSequence) -> None:
        # Parts share the list of tokens; each has its own state.
        views = [replace(sequence, state=None, features=None) for _ in self._parts]
        with ExitStack() as undone:
            for part, view in zip(self._parts, views, strict=True):
                part.open(view)
                undone.callback(part.close, view)
            undone.pop_all()
        sequence.state = views
        sequence.features = next((view.features for view in views if view.features is not None), None)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        for part, view in zip(self._parts, sequence.state, strict=True):
            part.advance(view, committed)

    def close(self, sequence: DraftSequence) -> None:
        views, sequence.state, sequence.features = sequence.state, None, None
        # A part that fails keeps no other from forgetting the sequence.
        with ExitStack() as ending:
            for part, view in zip(self._parts, views, strict=True) if views else ():
                ending.callback(part.close, view)

    def absorb(self, sequences: Sequence[DraftSequence]) -> None:
        """See `FeatureDrafter.absorb`."""
        for number, part in enumerate(self._parts):
            if isinstance(part, FeatureDrafter):
                part.absorb([sequence.state[number] for sequence in sequences])

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        return in_order(sequences, lambda own: self.start_trees(own).fetch(), self._drawn)

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """See `ArrayDrafter.start_trees`."""
        views = [[sequence.state[number] for sequence in sequences] for number in range(len(self._parts))]
        begun = [_begin(part, own) for part, own in zip(self._parts, views, strict=True)]
        nodes = [tree_limits(self.limits, sequence.limits).max_nodes for sequence in sequences]

        def wait(early: bool) -> GrownTrees:
            # First those computed here, while the other devices compute.
            found = {number: part.fetch() for number, part in enumerate(begun) if not part.elsewhere}
            found |= {number: part.wait(early and part.early) for number, part in enumerate(begun) if part.elsewhere}
            trees = [found[number] for number in range(len(begun))]
            if self._all_nodes:
                return merge_grown(trees, nodes)
            # All nodes cost the target's host time, and the likeliest of the parts' are what matters.
            largest = np.max([one.sizes[:, 0] for one in trees], axis=0) - 1
            return merge_grown(trees, np.minimum(largest, nodes).tolist())

        elsewhere, early = any(part.elsewhere for part in begun), any(part.early for part in begun)
        return Pending(wait, elsewhere, early, lambda: all(part.fresh() for part in begun))

    def stats(self) -> Mapping[str, float]:
        return {name: value for part in self._parts for name, value in part.stats().items()}

    def _drawn(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """For each sequence the tree of the first drafter that has one."""
        found = [TokenTree.root_only(sequence.root) for sequence in sequences]
        for number, part in enumerate(self._parts):
            asked = [place for place, tree in enumerate(found) if not tree.drafted]
            trees = part.propose([sequences[place].state[number] for place in asked]) if asked else []
            for place, tree in zip(asked, trees, strict=True):
                found[place] = tree
        return found


def compile_loops() -> None:
    """Compile what merges and packs trees, of two drafters and of more."""
    alone = GrownTrees.roots([0], 1)
    merge_grown([alone] * 2, [1]).packed([(0, 0, 1, 1)])


def _begin(part: Drafter, sequences: Sequence[DraftSequence]) -> Pending:
    if isinstance(part, ArrayDrafter):
        return part.start_trees(sequences)
    return computed(GrownTrees.of(part.propose(sequences)))


SPEC = DrafterSpec("merged", MergedConfig, MergedDrafter, parts=lambda config: config.names)
