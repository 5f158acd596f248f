"""From a row of logits to the distribution the next token is drawn from.

Order, as in vLLM (v1/sample/sampler.py): logit bias, repetition penalty over prompt and output, presence and frequency
penalties over the output, end tokens held back until min_tokens, temperature, min_p, top_k, top_p. transformers differs
in one place: it applies min_p last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling import SamplingParams, TokenLogprobs
from target_service.sampling.adjustments import LARGEST, Adjustments

# Without top_k, top_p sorts this many of the most probable tokens first, and the whole vocabulary only if it has to.
_TOP_P_FIRST = 1024


class LogitShaper:
    """One request's parameters, applied to rows of logits. Symbols: V is the vocabulary size."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        end_token_ids: Sequence[int],
        vocabulary_size: int,
    ) -> None:
        self._params = params
        self._vocabulary_size = vocabulary_size
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        held_back = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
        self._held_back = torch.tensor(sorted(held_back), dtype=torch.int64)
        self._prompt_ids = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)

    def shaped(self, logits_row: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Logits [V] in fp32 after bias, min_tokens and penalties; `output_ids` includes the row's own path."""
        params, logits = self._params, logits_row.float()
        if not params.shapes_logits:
            return logits
        logits = logits.clone()
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias.to(logits.device)
        if params.has_penalties:
            self._penalise(logits, output_ids)
        if len(output_ids) < params.min_tokens:
            logits[self._held_back] = -torch.inf
        return logits

    def adjustments(self, output_ids: Sequence[int]) -> Adjustments:
        """What `shaped` does to rows after `output_ids` and a path, for many rows at once."""
        return Adjustments(self._params, self._prompt_ids.numpy(), self._held_back.numpy(), output_ids)

    def _penalise(self, logits: Tensor, output_ids: Sequence[int]) -> None:
        params = self._params
        counts, device = Counter(output_ids), logits.device
        generated = torch.tensor(list(counts), dtype=torch.int64, device=device)
        if params.repetition_penalty != 1.0:
            seen = torch.unique(torch.cat([self._prompt_ids.to(device), generated]))
            values, factor = logits[seen].double(), params.repetition_penalty
            scaled = torch.where(values > 0, values / factor, values * factor)
            # Any finite penalty is legal; an infinite logit would make the distribution undefined.
            logits[seen] = scaled.clamp(-LARGEST, LARGEST).float()
        if len(generated):
            times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
            logits[generated] -= params.presence_penalty + params.frequency_penalty * times

    def probs(self, shaped: Tensor) -> Tensor:
        """The distribution [V] in fp64 after temperature, min_p, top_k and top_p. At temperature 0, all on the argmax.

        Of equally probable tokens a filter keeps the lower ids.
        """
        params = self._params
        if params.greedy:
            distribution = torch.zeros_like(shaped, dtype=torch.float64)
            distribution[torch.argmax(shaped)] = 1.0
            return distribution
        # The largest logit becomes 0 first, so that no temperature, however small, makes it infinite.
        distribution = torch.softmax((shaped.double() - shaped.max()) / params.temperature, dim=-1)
        if params.min_p > 0:
            distribution = torch.where(distribution >= params.min_p * distribution.max(), distribution, 0.0)
        kept = _most_probable(distribution, params.top_k) if 0 < params.top_k < len(distribution) else None
        if params.top_p < 1:
            kept = _nucleus(distribution, kept, params.top_p)
        if kept is not None:
            values = distribution[kept]
            distribution = torch.zeros_like(distribution).index_copy_(0, kept, values)
        return distribution / distribution.sum()


def _most_probable(distribution: Tensor, count: int) -> Tensor:
    """Ids of the `count` most probable tokens, most probable first, lower ids first among equals.

    [at most count]: tokens of probability 0 are left out, since sorting all of them would take most of the time.
    """
    threshold = torch.topk(distribution, count).values[-1]
    # Every token at the threshold takes part, so that which of them stay is decided by id alone.
    candidates = distribution >= threshold if threshold > 0 else distribution > 0
    ids = candidates.nonzero()[:, 0]
    order = torch.sort(distribution[ids], descending=True, stable=True).indices
    return ids[order[:count]]


def _nucleus(distribution: Tensor, ranked: Tensor | None, top_p: float) -> Tensor:
    """Ids of the smallest set of most probable tokens that reaches `top_p`; at least one.

    `ranked` are the remaining tokens, most probable first; None for the whole vocabulary [V]. `top_p` is a share of
    their total probability.
    """
    if ranked is None:
        share = top_p * distribution.sum()
        ranked = _most_probable(distribution, min(_TOP_P_FIRST, len(distribution)))
        if distribution[ranked].sum() < share:
            ranked = _most_probable(distribution, len(distribution))
    else:
        share = top_p * distribution[ranked].sum()
    values = distribution[ranked]
    before = values.cumsum(0) - values
    return ranked[before < share]


def logprobs_of(logits_row: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of the raw logits [V]: the token's own, and the `top` most probable."""
    logprobs = torch.log_softmax(logits_row.float(), dim=-1)
    if top == 0:
        return TokenLogprobs(float(logprobs[token_id]))
    # In fp64, where 20 probabilities do not underflow to zero, which would drop them.
    ids = _most_probable(logprobs.double().exp(), min(top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token_id]), tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True)))
