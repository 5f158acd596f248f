"""Greedy answers of a model by transformers' own `generate`, in padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.inference_mode()
def greedy_answers(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The answer to each prompt, all in one batch: token ids up to the end token, which is included.

    Args:
        model: a causal language model of transformers with a generation config.
        prompts: token ids; padded on the left to the longest one.
        max_tokens: of an answer.
    """
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    fill = min(ends)
    width = max(map(len, prompts))
    rows = [[fill] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    generated = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=fill,
    )
    answers = generated[:, width:].tolist()
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in answers]
    return [row[:length] for row, length in zip(answers, lengths, strict=True)]
