"""From a row of logits to the distribution the next token is drawn from.

Order, as in vLLM (v1/sample/sampler.py): logit bias, repetition penalty over prompt and output, presence and frequency
penalties over the output, end tokens held back until min_tokens, temperature, min_p, top_k, top_p. transformers differs
in one place: it applies min_p last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.sampling import SamplingParams, TokenLogprobs
from target_service.sampling.adjustments import Adjustments, adjusted
from tree_kernels.verification.distribution import most_probable


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


def logprobs_of(logits_row: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of the raw logits [V]: the token's own, and the `top` most probable."""
    logprobs = torch.log_softmax(logits_row.float(), dim=-1)
    if top == 0:
        return TokenLogprobs(float(logprobs[token_id]))
    # In fp64, where 20 probabilities do not underflow to zero, which would drop them.
    ids = most_probable(logprobs.double().exp(), min(top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token_id]), tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True)))
