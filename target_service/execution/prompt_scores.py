"""Log-probabilities of prompts, made of the logits of the rows that read them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from target_service.core.sequence import PromptLogprobs
from target_service.execution.batch import StepItem
from target_service.sampling.distribution import most_probable

# Rows at once, whose log-probabilities are computed in fp32: 33 MB for 128,256 tokens, as in `batch_verifier`.
_MOST_ROWS = 64


class ScoredPrompt(NamedTuple):
    """The log-probabilities that one step adds to a prompt's; None where its logits are no finite numbers."""

    item: StepItem
    logprobs: PromptLogprobs | None


class ScoresUnderWay(NamedTuple):
    """The same on its way to the host: there once the device has done what is queued behind the copies."""

    item: StepItem
    own: Tensor  # [tokens] fp32, on the host
    top_ids: Tensor  # [tokens, alternatives] int32
    top: Tensor  # [tokens, alternatives] fp32

    def read(self) -> ScoredPrompt:
        """Read what has arrived."""
        if bool(self.own.isnan().any()):
            return ScoredPrompt(self.item, None)
        logprobs = PromptLogprobs(
            self.item.sequence.sequence_id,
            first=self.item.scores.start,
            count=len(self.item.scores),
            logprobs=self.own.numpy().tobytes(),
            top_ids=self.top_ids.numpy().tobytes(),
            top_logprobs=self.top.numpy().tobytes(),
            alternatives=self.top.shape[1],
        )
        return ScoredPrompt(self.item, logprobs)


def score_prompts(
    items: SequenceOf[StepItem], ends: SequenceOf[int], logits: Tensor, vocabulary_size: int
) -> list[ScoresUnderWay]:
    """The log-probabilities that the rows of a step have of prompts. Queues their computation and copies.

    Args:
        items: of the step.
        ends: of each item, the row of logits behind that of its last known token; those of its other known tokens
            stand before it.
        logits: [rows, at least vocabulary_size] of the step.
    """
    return [
        _score(item, logits[end - item.known : end, :vocabulary_size])
        for item, end in zip(items, ends, strict=True)
        if item.scores
    ]


def _score(item: StepItem, logits: Tensor) -> ScoresUnderWay:
    """Those of an item that scores; `logits` [item.known, V]."""
    sequence, places = item.sequence, item.scores
    scored = range(max(places.start, 1), places.stop)
    top = min(sequence.request.sampling.prompt_logprobs or 0, logits.shape[1])
    # Pinned, or copies would wait for the device.
    pins = logits.is_cuda
    tokens = torch.tensor(sequence.token_ids[scored.start : scored.stop], dtype=torch.int64)
    tokens = (tokens.pin_memory() if pins else tokens).to(logits.device, non_blocking=True)
    own = torch.empty(len(scored), dtype=torch.float32, pin_memory=pins)
    top_ids = torch.empty(len(scored), top, dtype=torch.int32, pin_memory=pins)
    values = torch.empty(len(scored), top, dtype=torch.float32, pin_memory=pins)
    first_row = scored.start - 1 - item.start
    for first in range(0, len(scored), _MOST_ROWS):
        part = slice(first, min(first + _MOST_ROWS, len(scored)))
        rows = logits[first_row + part.start : first_row + part.stop]
        logprobs = torch.log_softmax(rows, dim=-1, dtype=torch.float32)
        own[part].copy_(logprobs.gather(1, tokens[part, None])[:, 0], non_blocking=True)
        found, ids = most_probable(logprobs, top)
        top_ids[part].copy_(ids, non_blocking=True)
        values[part].copy_(found, non_blocking=True)
    return ScoresUnderWay(item, own, top_ids, values)
