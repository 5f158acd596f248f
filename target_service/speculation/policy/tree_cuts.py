"""How many drafted rows pay: the rows that raise expected tokens per second, given what a step of n rows costs.

The value of a node is the probability that it is accepted: the product of calibrated scores along its path. Rows are
taken best first over all sequences of the batch, and their number n maximises
(sum of the n best) - rate * (cost(base rows + n) - cost(base rows)), where `rate` is the tokens per second that the
batch makes in the long run by the controller's estimates: a row must bring what its time would bring elsewhere.
Maximising each step's own ratio instead takes too many rows in poor steps and too few in rich ones. With n = 0 the step
is a plain one.
This is the goodput rule of SmartSpec (arXiv 2406.14066) in the form of renewal rewards, with measured costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from outrider.drafting.draft_tree import GrowingTree
from outrider.tree import TokenTree
from target_service.speculation.merged_tree import MergedTree, PredictedTree
from target_service.speculation.policy.step_cost import StepCost

# Chosen, not measured, each for the reason beside it.
# Buckets of scores between 0 and 1: a sixteenth is about twice the error of a rate from three hundred observations.
_BUCKETS = 16
# Observations of its bucket that a drafter's own score counts as: a bucket follows what it observes after some ten.
_PRIOR = 8.0
# Factor of an earlier observation of a bucket for each later one: its weight halves over 4,000 of them, so that another
# kind of text changes the rates and one odd answer does not.
_KEEP = 0.5 ** (1.0 / 4000.0)
# Expected acceptances that a sequence's own record starts with: those of its first two or three steps, on which alone
# its factor must not hang.
_SEQUENCE_PRIOR = 4.0
# Decay of that record in a step: it halves over some 23 steps, a paragraph of text.
_SEQUENCE_KEEP = 0.97
# Nodes of a sequence whose drafts are used in order of arrival: a number independent of what was sampled, of which
# REJECTION keeps its distribution. With the root they are the 16 rows of a captured size.
IN_ORDER_NODES = 15
# More than any probability, so that nodes used in order go first.
_CERTAIN = 2.0
# Upper bound of a calibrated probability. No drafted token is certain, and without it the value of a row would not fall
# with its depth.
_MAX_PROBABILITY = 0.995


class Calibration:
    """Acceptance rates by drafter score, as accepted / verified of each bucket, with slow decay."""

    def __init__(self) -> None:
        self._accepted = [(bucket + 0.5) / _BUCKETS * _PRIOR for bucket in range(_BUCKETS)]
        self._verified = [_PRIOR] * _BUCKETS
        # By bucket, and once more for a score of 1.
        self._probabilities: list[float] = [(bucket + 0.5) / _BUCKETS for bucket in (*range(_BUCKETS), _BUCKETS - 1)]

    def probability(self, score: float) -> float:
        """The calibrated probability that a node of this score is accepted when its parent was."""
        return self._probabilities[int(score * _BUCKETS)]

    def probabilities(self, scores: Iterable[float]) -> list[float]:
        """The calibrated probabilities of several scores, see `probability`."""
        known = self._probabilities
        return [known[int(score * _BUCKETS)] for score in scores]

    def observe_node(self, score: float, accepted: bool) -> None:
        """Record one verified node whose parent was accepted."""
        bucket = min(int(score * _BUCKETS), _BUCKETS - 1)
        self._accepted[bucket] = self._accepted[bucket] * _KEEP + accepted
        self._verified[bucket] = self._verified[bucket] * _KEEP + 1.0
        self._probabilities[bucket] = self._accepted[bucket] / self._verified[bucket]
        self._probabilities[_BUCKETS] = self._probabilities[_BUCKETS - 1]

    def observe_tree(
        self, tree: TokenTree, scores: SequenceOf[float], accepted_rows: SequenceOf[int], record: SequenceRecord
    ) -> None:
        """Calibrate the scores of one source, by the children of accepted rows. In a merged tree, rows that the source
        does not hold have a score of 0."""
        merged, expected, accepted = isinstance(tree, PredictedTree), 0.0, 0
        for row in (0, *accepted_rows):
            for child in tree.children[row]:
                if scores[child] or not merged:
                    was_accepted = child in accepted_rows
                    expected += self.probability(scores[child])
                    self.observe_node(scores[child], was_accepted)
                    accepted += was_accepted
        if expected:
            record.observe_tree(expected, accepted)


@dataclass(slots=True)
class SequenceRecord:
    """How many of one sequence's drafts are accepted, compared with their calibrated scores."""

    expected: float = _SEQUENCE_PRIOR
    accepted: float = _SEQUENCE_PRIOR

    @property
    def factor(self) -> float:
        """Above 1 where this sequence is easier to draft than most."""
        return min(1.5, self.accepted / self.expected)

    def observe_tree(self, expected: float, accepted: int) -> None:
        """Observe a verified tree: its expected and its actual accepted rows."""
        self.expected = self.expected * _SEQUENCE_KEEP + expected + (1 - _SEQUENCE_KEEP) * _SEQUENCE_PRIOR
        self.accepted = self.accepted * _SEQUENCE_KEEP + accepted + (1 - _SEQUENCE_KEEP) * _SEQUENCE_PRIOR


@dataclass(frozen=True, slots=True)
class Offer:
    """One sequence's tree, and how much of it may be used."""

    tree: GrowingTree | MergedTree
    record: SequenceRecord
    max_nodes: int
    # Nodes are used in order of arrival: choosing by token would bias rejection sampling.
    in_order: bool = False
    # Only one path is used, the likeliest child of each node.
    chain: bool = False
    # That of the sequence's prediction, where the tree holds some of it.
    predicted_record: SequenceRecord | None = None


class TreeCutter:
    """Cuts every sequence's tree to the rows that pay."""

    def __init__(self, cost: StepCost | None) -> None:
        """`cost` of None takes every node that is allowed."""
        self._cost = cost
        # Of the scores of drafts and of predictions.
        self.calibration, self.of_predictions = Calibration(), Calibration()

    def cut(self, offers: SequenceOf[Offer], base_rows: int, max_nodes: int, rate: float) -> list[TokenTree]:
        """One tree per offer, at least the root; of all together at most `max_nodes` are drafted. The step has
        `base_rows` rows without drafts, and the batch makes `rate` tokens a second."""
        streams = [
            [(_CERTAIN if offer.in_order else path_prob, index, node) for path_prob, node in self._ranked(offer)]
            for index, offer in enumerate(offers)
        ]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_falling)
        best = list(islice(merged, max_nodes))
        count = self._count([path_prob for path_prob, _, _ in best], base_rows, rate)
        chosen: list[set[int]] = [set() for _ in offers]
        for _, index, node in best[:count]:
            chosen[index].add(node)
        return [offer.tree.cut(taken) for offer, taken in zip(offers, chosen, strict=True)]

    def _ranked(self, offer: Offer) -> list[tuple[float, int]]:
        """(path probability, node) of the nodes that may be used, likeliest first or in order, parents first."""
        tree = offer.tree
        scores, parents, factor = tree.scores, tree.parents, offer.record.factor
        likelihoods = self.calibration.probabilities(scores)
        chances = [min(_MAX_PROBABILITY, likelihood * factor) for likelihood in likelihoods]
        if isinstance(tree, MergedTree) and offer.predicted_record is not None:
            chances = self._merged_chances(tree, chances, offer.predicted_record.factor)
        path_prob = [1.0]
        ranked: list[tuple[float, int]] = []
        for node in range(1, len(scores)):
            path_prob.append(path_prob[parents[node]] * chances[node])
            ranked.append((path_prob[node], node))
        if offer.in_order:
            return ranked[: min(offer.max_nodes, IN_ORDER_NODES)]
        if offer.chain:
            ranked = _likeliest_path(tree, ranked)
        # Stable, and a child is less likely than its parent, so parents stay first.
        ranked.sort(key=_falling)
        return ranked[: offer.max_nodes]

    def _merged_chances(self, tree: MergedTree, drafted: SequenceOf[float], factor: float) -> list[float]:
        """By node, the higher of its probabilities by draft and by prediction."""
        predicted = self.of_predictions.probabilities(tree.predicted)
        return [
            max(chance if score else 0.0, min(_MAX_PROBABILITY, likelihood * factor) if predicted_score else 0.0)
            for chance, score, likelihood, predicted_score in zip(
                drafted, tree.scores, predicted, tree.predicted, strict=True
            )
        ]

    def _count(self, path_probs: SequenceOf[float], base_rows: int, rate: float) -> int:
        """How many of the ranked nodes to take: all that are used in order, and the others that pay."""
        if self._cost is None:
            return len(path_probs)
        count = sum(path_prob >= _CERTAIN for path_prob in path_probs)
        best_count, best_profit, profit = count, 0.0, 0.0
        prices = self._cost.marginal(base_rows + count, len(path_probs) - count)
        for n, price in enumerate(prices, count + 1):
            profit += path_probs[n - 1] - rate * price
            if profit > best_profit:
                best_count, best_profit = n, profit
        return best_count

    def observe_step(self, rows: int, seconds: float) -> None:
        """Observe the time of a step that only decoded."""
        if self._cost is not None:
            self._cost.observe_step(rows, seconds)


def _falling(node: tuple[float, int] | tuple[float, int, int]) -> float:
    return -node[0]


def _likeliest_path(tree: GrowingTree | MergedTree, ranked: SequenceOf[tuple[float, int]]) -> list[tuple[float, int]]:
    """Of (path probability, node) for every node in order: those on the path of likeliest children."""
    best: dict[int, tuple[float, int]] = {}
    for entry in ranked:
        parent = tree.parents[entry[1]]
        if parent not in best or entry[0] > best[parent][0]:
            best[parent] = entry
    path: list[tuple[float, int]] = []
    node = 0
    while node in best:
        path.append(best[node])
        node = best[node][1]
    return path
