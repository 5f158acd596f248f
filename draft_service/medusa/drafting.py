"""Candidates for every depth from one pass of the heads, and the trees grown from them.

Symbols: B sequences, K heads, M candidates of a row, H the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.grown import GrownTrees, Pending, computed, in_order
from draft_service.medusa.growth import grown
from draft_service.medusa.head import MedusaHead
from draft_service.neural.candidates import candidates_wanted, most_probable, temperature_of
from draft_service.neural.level_growth import DEPTH, grow_level, make_forest
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import grown_trees, rules_of
from outrider.tree import TokenTree


class MedusaDrafting:
    """Heads on their device, and the growth of their trees. A sequence's state is the vector to read, [1, H]. Called
    from one thread."""

    def __init__(self, heads: MedusaHead, shape: TreeShape) -> None:
        """The first `shape.num_steps` heads are used."""
        self._heads, self._shape = heads, shape
        ids = heads.token_ids
        self._token_ids = None if ids is None else ids.cpu().numpy().astype(np.int32)

    def trees(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """The best trees of sequences that have a vector, in any mode."""
        return in_order(sequences, self._grown, self._drawn)

    def start_trees(self, sequences: Sequence[DraftSequence]) -> Pending:
        """As `trees`, without REJECTION requests."""
        return computed(self._grown(sequences))

    @torch.inference_mode()
    def _candidates(self, sequences: Sequence[DraftSequence]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and probabilities [B, K, M] for every depth of every sequence."""
        shape, place = self._shape, self._heads.place
        states = torch.cat([one.state.float() for one in sequences])
        logits = self._heads(states.to(place.device, place.dtype))[: shape.num_steps]
        rows = logits.transpose(0, 1).flatten(0, 1)
        temperatures = torch.tensor([temperature_of(one) for one in sequences]).repeat_interleave(shape.num_steps)
        count = max(candidates_wanted(one.mode, shape.topk, shape.gumbel_candidates) for one in sequences)
        candidates = most_probable(rows, temperatures.to(place.device), count, self._token_ids)
        tokens, probs = (part.reshape(len(sequences), shape.num_steps, -1) for part in candidates)
        return tokens, probs

    def _grown(self, sequences: Sequence[DraftSequence]) -> GrownTrees:
        tokens, probs = self._candidates(sequences)
        roots = [one.root for one in sequences]
        return grown(rules_of(sequences, self._shape), tokens, probs, roots)

    def _drawn(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        """Trees of REJECTION requests: each node's children are drawn from the distribution of their depth."""
        shape, count = self._shape, len(sequences)
        tokens, probs = self._candidates(sequences)
        rules = rules_of(sequences, shape)
        forest = make_forest(count, shape.num_steps, shape.width, shape.topk, drawn=True)
        levels = min(int(rules.ints[:, DEPTH].max()), shape.num_steps)
        for level in range(1, levels + 1):
            own = np.repeat(np.arange(count), forest.widths)
            if not grow_level(forest, rules, level, level == levels, tokens[own, level - 1], probs[own, level - 1]):
                break
        return grown_trees(forest, rules, sequences)
