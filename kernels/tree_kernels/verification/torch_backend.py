"""Batched verification as a loop over sequences: the definition that the kernels are held to, and the CPU's backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tree_kernels.philox import uniforms
from tree_kernels.verification.distribution import distribution_of
from tree_kernels.verification.records import (
    NOT_FINITE,
    Mode,
    RowsToVerify,
    StepToVerify,
    unpack_distributions,
    unpack_parameters,
)
from tree_kernels.verification.typical import typical_walk
from tree_kernels.verification.walks import Chance, Walk, coupled_token, match_walk, rejection_walk

Distributions = Mapping[int, tuple[Sequence[int], Sequence[int]]]


class TorchVerification:
    """See `tree_kernels.verification.DeviceVerifier`. Works on any device, but waits for it."""

    def __init__(self, vocabulary_size: int, max_sequences: int, verdicts: Tensor, lossy_rows: Tensor) -> None:
        self._vocabulary_size = vocabulary_size
        self._max_sequences = max_sequences
        self._verdicts = verdicts
        self._lossy_rows = lossy_rows

    def verify(self, step: StepToVerify, **_which_kernels: bool) -> None:
        """Write the verdicts and, of TYPICAL sequences, the lossy rows."""
        logits = step.logits[:, : self._vocabulary_size]
        count = self._max_sequences
        by_row: Distributions = {}
        if step.distributions is not None:
            by_row = unpack_distributions(step.distributions.cpu().numpy(), len(self._lossy_rows))
        found = torch.zeros(len(self._verdicts), dtype=torch.int32)
        found[count : 2 * count] = -1
        tokens, tree = step.token_ids.tolist(), step.parents.tolist()
        for b, sequence in enumerate(unpack_parameters(step.parameters.cpu().numpy(), count)):
            if not sequence.rows:
                continue
            first, end = sequence.first_row, sequence.first_row + sequence.rows
            own = [max(row - 1, 0) for row in range(sequence.rows)] if sequence.is_chain else tree[first:end]
            drafts = {row - first: by_row[row] for row in range(first, end) if row in by_row}
            walk, lossy = walk_of(sequence, own, tokens[first:end], drafts, logits[first:end].__getitem__)
            self._lossy_rows[first : first + len(lossy)] = torch.tensor(lossy, dtype=torch.int32)
            accepted = len(walk.accepted_rows)
            found[b] = accepted
            found[count + b] = walk.next_token
            found[2 * count + first : 2 * count + first + accepted] = torch.tensor(walk.accepted_rows)
        self._verdicts.copy_(found)


def walk_of(
    sequence: RowsToVerify,
    parents: Sequence[int],
    token_ids: Sequence[int],
    distributions: Distributions,
    logits_of: Callable[[int], Tensor],
) -> tuple[Walk, tuple[bool, ...]]:
    """One sequence's walk by its mode, and of TYPICAL ones which accepted rows are lossy.

    Distributions are by row of the tree; `logits_of` gives the logits [V] after a row, when the walk comes to it.
    """
    if sequence.mode is Mode.GREEDY:
        return match_walk(parents, token_ids, lambda row, _: _likeliest(logits_of(row))), ()

    def probs_of(row: int, _: int = 0) -> Tensor | None:
        logits = logits_of(row)
        # The greatest is NaN where any is.
        return row_distribution(sequence, logits) if math.isfinite(logits.max()) else None

    def draw(probs: Tensor, depth: int) -> int:
        return coupled_token(probs, sequence.seed, sequence.position + depth)

    def threshold(entropy: float) -> float:
        return min(sequence.epsilon, sequence.delta * math.exp(-entropy))

    def drawn_after(row: int, depth: int) -> int:
        probs = probs_of(row)
        return NOT_FINITE if probs is None else draw(probs, depth)

    if sequence.mode is Mode.COUPLED:
        return match_walk(parents, token_ids, drawn_after), ()
    if sequence.mode is Mode.REJECTION:
        # One for each row below the root, and one for the next token.
        coins = iter(uniforms(sequence.seed, sequence.position, sequence.rows).tolist())
        return rejection_walk(parents, token_ids, distributions, probs_of, Chance(coins.__next__)), ()
    begins = sequence.position == sequence.begins
    return typical_walk(parents, token_ids, probs_of, draw, threshold, begins=begins)


def _likeliest(logits: Tensor) -> int:
    """The likeliest token by logits [V], marked where any of them is NaN or infinite, or all are -inf."""
    token = int(torch.argmax(logits))
    # NaN counts as the greatest.
    return token if math.isfinite(logits[token]) else token | NOT_FINITE


def row_distribution(sequence: RowsToVerify, logits: Tensor) -> Tensor:
    """The distribution [V] of logits [V] by a sequence's temperature and filters."""
    return distribution_of(logits, sequence.temperature, sequence.top_k, sequence.top_p, sequence.min_p)
