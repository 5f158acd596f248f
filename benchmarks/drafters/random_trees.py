"""An adversarial drafter: trees of random tokens, shapes and scores that no target should be hurt by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import Drafter, DraftSequence, tree_limits
from outrider.sampling import VerificationMode
from outrider.settings import Settings, setting
from outrider.tree import MAX_DISTRIBUTION_WEIGHT, DraftDistribution, TokenTree
from outrider.wire.frames import TreeLimits

# As the services name it, from the root of the repository.
RANDOM = "benchmarks.drafters.random_trees:RandomDrafter"


@dataclass(frozen=True)
class RandomConfig(Settings):
    """Settings of the random drafter, section `[drafter]`."""

    random_nodes: int = setting(15, "most nodes of a tree, the root not counted; 0 proposes nothing", ge=0)
    random_depth: int = setting(8, "longest path below the root", ge=1)
    random_seed: int = setting(0, "seed of the trees; the same calls give the same trees")


class RandomDrafter(Drafter):
    """Proposes nonsense, reproducibly. In REJECTION mode every draw comes with the distribution it was drawn from."""

    name = "random"
    config = RandomConfig
    max_context = 1 << 20
    vocabulary_size = 0

    def __init__(self, config: RandomConfig) -> None:
        self.limits = TreeLimits(config.random_nodes, config.random_depth)
        self._coins = random.Random(config.random_seed)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        return [self._tree(sequence) for sequence in sequences]

    def _tree(self, sequence: DraftSequence) -> TokenTree:
        coins, limits = self._coins, tree_limits(self.limits, sequence.limits)
        tokens, parents, scores, depths = [sequence.root], [0], [1.0], [0]
        distributions: dict[int, DraftDistribution] = {}
        wanted = coins.randint(0, limits.max_nodes)
        row = 0
        # Rows are visited in order, so the children of a row stand together and in draw order.
        while row < len(tokens) and len(tokens) <= wanted:
            if depths[row] < limits.max_depth:
                distribution = self._distribution(sequence.vocabulary_size)
                drawn = self._draw(distribution, coins.randint(1, 3))[: wanted + 1 - len(tokens)]
                if sequence.mode is VerificationMode.REJECTION:
                    distributions[row] = distribution
                for token in drawn:
                    tokens.append(token)
                    parents.append(row)
                    scores.append(coins.random())
                    depths.append(depths[row] + 1)
            row += 1
        return TokenTree(tuple(tokens), tuple(parents), tuple(scores), distributions)

    def _distribution(self, vocabulary_size: int) -> DraftDistribution:
        support = self._coins.sample(range(vocabulary_size), min(8, vocabulary_size))
        weights = [self._coins.randint(1, MAX_DISTRIBUTION_WEIGHT) for _ in support]
        return DraftDistribution(tuple(support), tuple(weights))

    def _draw(self, distribution: DraftDistribution, count: int) -> list[int]:
        """Up to `count` different tokens, drawn one after the other without replacement."""
        tokens, weights = list(distribution.token_ids), list(distribution.weights)
        drawn: list[int] = []
        while tokens and len(drawn) < count:
            place = self._coins.choices(range(len(tokens)), weights)[0]
            drawn.append(tokens.pop(place))
            weights.pop(place)
        return drawn
