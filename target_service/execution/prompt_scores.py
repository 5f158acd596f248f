"""Log-probabilities of prompts, made of the logits of the rows that read them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
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


def score_prompts(
    items: SequenceOf[StepItem], ends: SequenceOf[int], logits: Tensor, vocabulary_size: int
) -> list[ScoredPrompt]:
    """The log-probabilities that the rows of a step have of prompts. Waits for the device, if there are any.

    Args:
        items: of the step.
        ends: of each item, the row of logits behind that of its last known token; those of its other known tokens
            stand before it.
        logits: [rows, at least vocabulary_size] of the step.
    """
    return [
        ScoredPrompt(item, _score(item, logits[end - item.known : end, :vocabulary_size]))
        for item, end in zip(items, ends, strict=True)
        if item.scores
    ]


def _score(item: StepItem, logits: Tensor) -> PromptLogprobs | None:
    """The event for an item that scores; `logits` [item.known, V]."""
    sequence, places = item.sequence, item.scores
    scored = range(max(places.start, 1), places.stop)
    tokens, top = sequence.token_ids[scored.start : scored.stop], sequence.request.sampling.prompt_logprobs or 0
    first_row = scored.start - 1 - item.start
    own, ids, values = [np.empty(0, np.float32)], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for first in range(0, len(tokens), _MOST_ROWS):
        part = torch.tensor(tokens[first : first + _MOST_ROWS], dtype=torch.int64).to(logits.device)
        rows = logits[first_row + first : first_row + first + len(part)]
        logprobs = torch.log_softmax(rows, dim=-1, dtype=torch.float32)
        own.append(logprobs.gather(1, part[:, None])[:, 0].cpu().numpy())
        top_values, top_ids = most_probable(logprobs, top)
        ids.append(top_ids.to(torch.int32).cpu().numpy().reshape(-1))
        values.append(top_values.cpu().numpy().reshape(-1))
    all_own = np.concatenate(own)
    if np.isnan(all_own).any():
        return None
    return PromptLogprobs(
        sequence.sequence_id,
        first=places.start,
        count=len(places),
        logprobs=all_own.tobytes(),
        top_ids=np.concatenate(ids).tobytes(),
        top_logprobs=np.concatenate(values).tobytes(),
        alternatives=min(top, logits.shape[1]),
    )
