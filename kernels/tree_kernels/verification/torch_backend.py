"""Batched verification as a loop over sequences: the definition that the kernels are held to, and the CPU's backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tree_kernels.philox import uniforms
from tree_kernels.verification.records import Mode, RowsToVerify, unpack_distributions, unpack_parameters
from tree_kernels.verification.walks import Walk, coupled_token, match_walk, rejection_walk

Distributions = Mapping[int, tuple[Sequence[int], Sequence[int]]]


def distribution_of(logits_row: Tensor, asked: RowsToVerify) -> Tensor:
    """The distribution [V] in fp64 of a row of logits [V] after temperature, min_p, top_k and top_p, in this order.

    Of equally probable tokens the filters keep the lower ids. `top_p` is a share of what the filters before it left.

    Args:
        logits_row: [V] of any floating dtype, at least one finite.
        asked: temperature above 0 and the filters.
    """
    shifted = logits_row.double() - logits_row.max().double()
    distribution = torch.softmax(shifted / asked.temperature, dim=-1)
    if asked.min_p > 0:
        distribution = torch.where(distribution >= asked.min_p * distribution.max(), distribution, 0.0)
    ranked = torch.sort(distribution, descending=True, stable=True).indices
    if asked.top_k > 0:
        ranked = ranked[: asked.top_k]
    if asked.top_p < 1:
        values = distribution[ranked]
        before = values.cumsum(0) - values
        ranked = ranked[before < asked.top_p * values.sum()]
    kept = torch.zeros_like(distribution).index_copy_(0, ranked, distribution[ranked])
    return kept / kept.sum()


class TorchVerification:
    """See `tree_kernels.verification.DeviceVerifier`. Works on any device, but waits for it."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences

    def verify(
        self,
        logits: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        parameters: Tensor,
        distributions: Tensor | None,
        verdicts: Tensor,
    ) -> None:
        """Write verdicts [2 * max_sequences + max_rows] int32."""
        count = self._max_sequences
        max_rows = len(verdicts) - 2 * count
        by_row: Distributions = (
            {} if distributions is None else unpack_distributions(distributions.cpu().numpy(), max_rows)
        )
        found = torch.zeros(len(verdicts), dtype=torch.int32)
        found[count : 2 * count] = -1
        tokens, tree = token_ids.tolist(), parents.tolist()
        for b, asked in enumerate(unpack_parameters(parameters.cpu().numpy(), count)):
            if not asked.rows:
                continue
            first, end = asked.first_row, asked.first_row + asked.rows
            own = [max(row - 1, 0) for row in range(asked.rows)] if asked.is_chain else tree[first:end]
            walk = walk_of(asked, logits[first:end], tokens[first:end], own, by_row)
            accepted = len(walk.accepted_rows)
            found[b] = accepted
            found[count + b] = walk.next_token
            found[2 * count + first : 2 * count + first + accepted] = torch.tensor(walk.accepted_rows)
        verdicts.copy_(found)


def walk_of(
    asked: RowsToVerify, logits: Tensor, token_ids: list[int], parents: list[int], distributions: Distributions
) -> Walk:
    """One sequence's walk.

    Args:
        asked: how; its mode and parameters.
        logits: [rows, V] of the tree.
        token_ids: [rows].
        parents: [rows], parents[0] is not looked at.
        distributions: by row of the step, which the tree's row r is `asked.first_row + r` of.
    """
    if asked.mode is Mode.GREEDY:
        return match_walk(parents, token_ids, lambda row, _: int(torch.argmax(logits[row])))
    if asked.mode is Mode.COUPLED:
        return match_walk(
            parents,
            token_ids,
            lambda row, depth: coupled_token(distribution_of(logits[row], asked), asked.seed, asked.position + depth),
        )
    own = {
        row: distributions[asked.first_row + row] for row in range(asked.rows) if asked.first_row + row in distributions
    }
    # One for each row below the root, and one for the next token.
    coins = iter(uniforms(asked.seed, asked.position, asked.rows).tolist())
    return rejection_walk(
        parents, token_ids, own, lambda row, _: distribution_of(logits[row], asked), lambda: next(coins)
    )
