"""The chain that is taken of a token tree, where only chains can be verified."""

from __future__ import annotations

from collections.abc import Sequence


def best_chain(token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float], max_tokens: int) -> list[int]:
    """The path of at most `max_tokens` nodes below the root of which most tokens are expected to be accepted.

    Args:
        token_ids: [nodes] token of each node; node 0 is the root, which is not part of the chain.
        parents: [nodes] the parent of each node, an earlier one; of the root, itself.
        scores: [nodes] in [0, 1], the probability that a node is accepted given that its parent is.

    Returns:
        Token ids from the root's child down. The expected tokens of a path are the sum, over its nodes, of the
        probability that all nodes down to that one are accepted; of two equal paths the first to be named counts.
    """
    probabilities, expected, depths = [1.0], [0.0], [0]
    best = 0
    for node in range(1, len(token_ids)):
        parent = parents[node]
        probabilities.append(probabilities[parent] * scores[node])
        expected.append(expected[parent] + probabilities[node])
        depths.append(depths[parent] + 1)
        if depths[node] <= max_tokens and expected[node] > expected[best]:
            best = node
    chain: list[int] = []
    while best:
        chain.append(token_ids[best])
        best = parents[best]
    return chain[::-1]
