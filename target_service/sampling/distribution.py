"""From a row of logits to the distribution the next token is drawn from.

Order, as in vLLM (v1/sample/sampler.py): logit bias, repetition penalty over prompt and output, presence and frequency
penalties over the output, end tokens held back until min_tokens, temperature, min_p, top_k, top_p. transformers differs
in one place: it applies min_p last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.sampling import SamplingParams, TokenLogprobs
from target_service.sampling.adjustments import Adjustments, adjusted

# Candidates beyond those asked for: logits in bf16 are often equal, and of equals the device takes any. Chosen.
_SPARE = 32


class LogitShaper:
    """One request's parameters, applied to rows of logits. Symbols: V is the vocabulary size."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], end_token_ids: Sequence[int]) -> None:
        self._params = params
        held_back = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
        self._held_back = np.array(sorted(held_back), np.int64)
        self._prompt_ids = np.array(sorted(set(prompt_ids)), np.int64)

    def shaped(self, logits_row: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Logits [V] in fp32 after bias, min_tokens and penalties; `output_ids` includes the row's own path."""
        logits = logits_row.float()
        if not self._params.shapes_logits:
            return logits
        logits = logits.clone()
        wanted = self.adjustments(output_ids).of_row(0, ())
        adjusted(logits[None], torch.from_numpy(wanted.view(np.uint8)).to(logits.device))
        return logits

    def adjustments(self, output_ids: Sequence[int]) -> Adjustments:
        """What `shaped` does to rows after `output_ids` and a path, for many rows at once."""
        return Adjustments(self._params, self._prompt_ids, self._held_back, output_ids)


def logprobs_of(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of rows of raw logits [n, V]: of each row's own token, [n] int64, and the most probable ones,
    as many as its `top`."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    own = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    listed = _most_probable(logprobs, min(max(tops), logprobs.shape[1]))
    rows = zip(own, listed, tops, strict=True)
    return [TokenLogprobs(logprob, tuple(entries[:top])) for logprob, entries, top in rows]


def _most_probable(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Of each row of logprobs [rows, V] fp32 the ids and values of the `count` greatest, the lower ids first among
    equals. Those of no probability are left out."""
    if not count:
        return [[]] * len(logprobs)
    values, ids = torch.topk(logprobs, min(count + _SPARE, logprobs.shape[1]), dim=1)
    found = []
    for row, (own_values, own_ids) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        if own_values[-1] == own_values[count - 1] and len(own_ids) < logprobs.shape[1]:
            # More are as probable as the last one than were asked for: any of them may have come.
            ranked, order = torch.sort(logprobs[row], descending=True, stable=True)
            own_values, own_ids = ranked[:count].tolist(), order[:count].tolist()
        entries = sorted(zip(own_ids, own_values, strict=True), key=lambda entry: (-entry[1], entry[0]))
        found.append([(token, value) for token, value in entries[:count] if math.exp(value) > 0])
    return found
