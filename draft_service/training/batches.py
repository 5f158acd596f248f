"""Batches of texts in few shapes, and the rows of each that have a loss. Everything here runs on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.training.corpus import Texts

# Texts are padded to multiples of this: few lengths, so that what is compiled or tuned for a shape is used again.
_GRAIN = 128


class Batch(NamedTuple):
    """Texts and the rows of their unrolling (`unrolling.unroll`) that have a loss, step by step."""

    token_ids: Tensor  # [B, L] int64
    distribution_rows: Tensor  # [N] int64 places in [B * L] whose distributions are read from the target
    rows: Tensor  # [R] int64 places in [steps * B * L], step by step
    distributions: Tensor  # [R] int64 index in `distribution_rows` of each row's distribution
    next_tokens: Tensor  # [R] int64 the text's token there
    counts: tuple[int, ...]  # rows of each step, R in all

    def rows_of_heads(self, heads: int) -> list[int]:
        """Numbers of consecutive rows that `heads` lm_heads read: one head for each step, or one for all steps."""
        return list(self.counts) if heads > 1 else [len(self.rows)]

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, copied asynchronously."""
        if device.type != "cuda":
            return self
        moved = [tensor.pin_memory().to(device, non_blocking=True) for tensor in self[:5]]
        return Batch(moved[0], moved[1], moved[2], moved[3], moved[4], self.counts)


@dataclass(frozen=True)
class BatchPlan:
    """The texts of every batch, as pairs of their padded length and indices [b]. Equal arguments give equal batches."""

    texts: Texts
    batch_tokens: int
    max_length: int
    seed: int

    def padded_length(self, length: int) -> int:
        longest = -(-self.max_length // _GRAIN) * _GRAIN
        edge = _GRAIN
        while edge < length:
            # 128, 256, 512, 768, 1024 ..: doubled at first, then in steps that waste at most a third.
            edge = 2 * edge if edge < 4 * _GRAIN else edge + 2 * _GRAIN
        return min(edge, longest)

    def batches(self, epoch: int) -> list[tuple[int, NDArray[np.int64]]]:
        """The batches of one pass over the texts, in random order."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.texts))
        return self._batches_of(order.tolist())

    def per_epoch(self) -> int:
        """Batches of a pass, the same for every pass."""
        return len(self.batches(0))

    def in_order(self) -> list[tuple[int, NDArray[np.int64]]]:
        """One pass in a fixed order, for validation: within a batch shorter texts come first."""
        return self._batches_of(np.argsort(self.texts.lengths, kind="stable").tolist())

    def _batches_of(self, order: Iterable[int]) -> list[tuple[int, NDArray[np.int64]]]:
        """Full batches as they fill up in this order, then the others."""
        lengths, filling = self.texts.lengths, dict[int, list[int]]()
        batches: list[tuple[int, NDArray[np.int64]]] = []
        for index in order:
            padded = self.padded_length(int(lengths[index]))
            waiting = filling.setdefault(padded, [])
            waiting.append(index)
            if len(waiting) == self.batch_tokens // padded:
                batches.append((padded, np.asarray(filling.pop(padded), np.int64)))
        return batches + [(padded, np.asarray(rest, np.int64)) for padded, rest in filling.items()]


def make_batch(
    texts: Texts, chosen: NDArray[np.int64], padded: int, steps: int, *, size: int = 0, whole: bool = False
) -> Batch:
    """Lay texts out as a batch. A row has a loss when the token that it predicts is part of the answer.

    Args:
        chosen: [b] indices of the texts.
        padded: length L of every row of `token_ids`.
        size: rows B of `token_ids`, the last ones empty; 0 for one per text.
        whole: take only rows that have a loss in every step and whose root is part of the answer, in the same order in
            every step: for measuring how many tokens of a draft from there would be accepted.
    """
    token_ids = np.zeros((size or len(chosen), padded), np.int64)
    distribution_rows: list[NDArray[np.int64]] = []
    rows: list[list[NDArray[np.int64]]] = [[] for _ in range(steps)]
    distributions: list[list[NDArray[np.int64]]] = [[] for _ in range(steps)]
    known = 0
    for place, index in enumerate(chosen.tolist()):
        text = texts.text(index)
        token_ids[place, : len(text)] = text
        # The distribution at place p is that of token p + 1.
        first = int(texts.prompt_lengths[index]) - 1
        distribution_rows.append(place * padded + np.arange(first, len(text) - 1))
        for step in range(steps):
            begin, end = (first, len(text) - 1 - steps) if whole else (max(0, first - 1), len(text) - 2 - step)
            row = np.arange(begin, end)
            rows[step].append((step * len(token_ids) + place) * padded + row)
            distributions[step].append(known + row + 1 + step - first)
        known += len(text) - 1 - first
    joined_distributions = np.concatenate([one for step in distributions for one in step])
    flat = np.concatenate(distribution_rows)
    # In bounds: the last distribution of a text is that of its last token.
    next_tokens = token_ids.reshape(-1)[flat + 1][joined_distributions]
    return Batch(
        torch.from_numpy(token_ids),
        torch.from_numpy(flat),
        torch.from_numpy(np.concatenate([one for step in rows for one in step])),
        torch.from_numpy(joined_distributions),
        torch.from_numpy(next_tokens),
        tuple(sum(map(len, step)) for step in rows),
    )
