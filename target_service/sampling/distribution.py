"""From a row of logits to the distribution the next token is drawn from.

Logits are shaped first (`tree_kernels.logit_shaping`), then come temperature, min_p, top_k, top_p. transformers differs
in one place: it applies min_p last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.sampling import SamplingParams, TokenLogprobs
from tree_kernels.logit_shaping import Shaping, mask_row, pack_shaping, shape_row


class LogitShaper:
    """One request's parameters, applied to rows of logits. Symbols: V is the vocabulary size."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], end_token_ids: Sequence[int]) -> None:
        self._shapes = params.shapes_logits
        # Only until enough is generated.
        held = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)} if params.min_tokens else set()
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        minimum = params.min_tokens, tuple(sorted(held))
        self._shaping = Shaping(len(prompt_ids), *penalties, params.logit_bias, *minimum)
        self._prompt_ids = tuple(prompt_ids)

    def packed(self) -> NDArray[np.int32]:
        """The same for the device; see `pack_shaping`."""
        return pack_shaping(self._shaping)

    def shaped(self, logits_row: Tensor, output_ids: Sequence[int], mask: NDArray[np.int32] | None = None) -> Tensor:
        """Logits [V] in fp32 after bias, min_tokens and penalties, and a grammar's `mask` [words] if there is one;
        `output_ids` includes the row's own path."""
        if not self._shapes:
            return logits_row.float()
        text = torch.tensor([*self._prompt_ids, *output_ids], dtype=torch.int64, device=logits_row.device)
        holds = mask is None or not self.allows_held_alone(mask, len(output_ids))
        shaped = shape_row(logits_row, self._shaping, text, holds=holds)
        return shaped if mask is None else mask_row(shaped, torch.from_numpy(mask).to(shaped.device))

    def holds_back(self, generated: int) -> bool:
        """Whether any token is held back after so many."""
        return bool(self._shaping.held) and generated < self._shaping.min_tokens

    def allows_held_alone(self, mask: NDArray[np.int32], generated: int) -> bool:
        """Whether a mask [words] allows only tokens that min_tokens would hold back after so many: the form comes
        first then."""
        if not self.holds_back(generated):
            return False
        rest = mask.copy()
        for token in self._shaping.held:
            rest[token // 32] &= np.int32(~np.array(1 << token % 32, np.int64).astype(np.int32))
        return not rest.any()


def logprobs_of(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of rows of raw logits [n, V]: of each row's own token, [n] int64, and the most probable ones,
    as many as its `top`."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    own = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    listed = _listed(logprobs, max(tops))
    rows = zip(own, listed, tops, strict=True)
    return [TokenLogprobs(logprob, tuple(entries[:top])) for logprob, entries, top in rows]


def most_probable(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row of logprobs [rows, V] fp32 the `count` greatest: values and ids (int64) [rows, at most count], the
    lower ids first among equals. Waits for no device."""
    rows, vocabulary = logprobs.shape
    count = min(count, vocabulary)
    if not rows or not count:
        return logprobs[:, :0], torch.zeros(rows, 0, dtype=torch.int64, device=logprobs.device)
    # Of equals a device takes any. Those above the last value are the right ones; of those equal to it the lowest ids
    # are looked for.
    values, ids = torch.topk(logprobs, count, dim=1)
    last = values[:, -1:]
    places = torch.arange(vocabulary, 0, -1, dtype=torch.float32, device=logprobs.device)
    found, equals = torch.topk(torch.where(logprobs == last, places, 0), count, dim=1)
    ids = torch.cat((ids, equals), dim=1)
    kept = torch.cat((values > last, found > 0), dim=1)
    order = ids.argsort(dim=1)
    order = order.gather(1, logprobs.gather(1, ids.gather(1, order)).argsort(dim=1, descending=True, stable=True))
    order = order.gather(1, (~kept.gather(1, order)).int().argsort(dim=1, stable=True))[:, :count]
    ids = ids.gather(1, order)
    return logprobs.gather(1, ids), ids


def _listed(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """`most_probable` as (id, value) of each row, without those of no probability."""
    rows = zip(*(each.tolist() for each in most_probable(logprobs, count)), strict=True)
    return [[(token, value) for value, token in zip(*row, strict=True) if math.exp(value) > 0] for row in rows]
