"""Texts into batches of few shapes, and which of their rows teach what. All of it on the host, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.training.corpus import Texts

# Lengths that texts are padded to: few, so that what is compiled or tuned for a shape is met again.
_GRAIN = 128


class Batch(NamedTuple):
    """Texts and the rows of their unrolling (`unrolling.unroll`) that have a loss, step by step.

    `token_ids` [B, L] int64. `distribution_rows` [N] int64 are places in [B * L] whose distributions are wanted of the
    target. `rows` [R] int64 are places in [steps * B * L], `distributions` [R] int64 the places of their distributions
    in `distribution_rows`, and `next_tokens` [R] int64 what the text says there. `counts` are the rows of each step, R
    in all.
    """

    token_ids: Tensor
    distribution_rows: Tensor
    rows: Tensor
    distributions: Tensor
    next_tokens: Tensor
    counts: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        """The same on a device, without waiting for it."""
        if device.type != "cuda":
            return self
        moved = [tensor.pin_memory().to(device, non_blocking=True) for tensor in self[:5]]
        return Batch(moved[0], moved[1], moved[2], moved[3], moved[4], self.counts)


@dataclass(frozen=True)
class BatchPlan:
    """Which texts make up each batch of one pass over them: the same for the same texts, seed and pass."""

    texts: Texts
    batch_tokens: int
    max_length: int
    seed: int

    def padded_length(self, length: int) -> int:
        """The shape that a text of this length goes to."""
        longest = -(-self.max_length // _GRAIN) * _GRAIN
        edge = _GRAIN
        while edge < length:
            # 128, 256, 512, 768, 1024 .. : twice as long at first, then by steps that waste a fifth.
            edge = 2 * edge if edge < 4 * _GRAIN else edge + 2 * _GRAIN
        return min(edge, longest)

    def batches(self, epoch: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Padded length and texts of every batch of a pass, in an order that mixes lengths."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.texts))
        lengths, filling = self.texts.lengths, dict[int, list[int]]()
        done: list[tuple[int, NDArray[np.int64]]] = []
        for index in order.tolist():
            padded = self.padded_length(int(lengths[index]))
            waiting = filling.setdefault(padded, [])
            waiting.append(index)
            if len(waiting) == self.batch_tokens // padded:
                done.append((padded, np.asarray(filling.pop(padded), np.int64)))
        return done + [(padded, np.asarray(rest, np.int64)) for padded, rest in filling.items()]

    def per_epoch(self) -> int:
        """Batches of a pass."""
        counts: dict[int, int] = {}
        for length in self.texts.lengths.tolist():
            padded = self.padded_length(length)
            counts[padded] = counts.get(padded, 0) + 1
        return sum(-(-count // (self.batch_tokens // padded)) for padded, count in counts.items())

    def in_order(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Every text once, shortest first: for validation."""
        filling: list[int] = []
        padded = 0
        for index in np.argsort(self.texts.lengths, kind="stable").tolist():
            here = self.padded_length(int(self.texts.lengths[index]))
            if filling and (here != padded or len(filling) == self.batch_tokens // padded):
                yield padded, np.asarray(filling, np.int64)
                filling = []
            padded = here
            filling.append(index)
        if filling:
            yield padded, np.asarray(filling, np.int64)


def make_batch(
    texts: Texts, chosen: NDArray[np.int64], padded: int, steps: int, *, size: int = 0, whole: bool = False
) -> Batch:
    """Lay texts out.

    A row teaches when the token that it guesses stands in the answer. Prompts are read, and teach nothing.

    Args:
        chosen: [b] which texts.
        padded: length L of every row of `token_ids`.
        size: rows B of `token_ids`, the last ones empty; 0 for as many as are chosen.
        whole: only rows all of whose later steps have a loss too, in the same order in every step, and none whose root
            still belongs to the prompt: for telling how far a draft from there would have come.
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
            begin, end = max(0, first - 1), len(text) - 2 - step
            if whole:
                begin, end = first, len(text) - 1 - steps
            row = np.arange(begin, max(begin, end))
            rows[step].append((step * len(token_ids) + place) * padded + row)
            distributions[step].append(known + row + 1 + step - first)
        known += len(text) - 1 - first
    joined_distributions = np.concatenate([one for step in distributions for one in step])
    flat = np.concatenate(distribution_rows)
    # The next token of the last distribution of a row of texts never lies behind it.
    next_tokens = token_ids.reshape(-1)[flat + 1][joined_distributions]
    return Batch(
        torch.from_numpy(token_ids),
        torch.from_numpy(flat),
        torch.from_numpy(np.concatenate([one for step in rows for one in step])),
        torch.from_numpy(joined_distributions),
        torch.from_numpy(next_tokens),
        tuple(sum(map(len, step)) for step in rows),
    )
