"""Changes to single logits: the sparse form of `LogitShaper.shaped`, for many rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.sampling import SamplingParams

# Beyond any logit, and small enough in float32 that penalties and biases can be added to it.
LARGEST = 1e30
# What happens to a token's logit in a row: `bias` is added, then the logit is divided by `factor` if it is positive,
# else multiplied by it (0: neither), then `penalty` is subtracted; a token that is `held` back gets -inf.
ADJUSTMENT = np.dtype(
    [("row", "<i4"), ("token", "<i4"), ("bias", "<f4"), ("penalty", "<f4"), ("factor", "<f8"), ("held", "<i8")]
)
_INTEGERS = ADJUSTMENT.itemsize // 4


class Adjustments:
    """Those of one request after the tokens generated so far, for rows whose paths hold a few more."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: NDArray[np.int64],
        held_back: NDArray[np.int64],
        output_ids: Sequence[int],
    ) -> None:
        """`prompt_ids` are the prompt's tokens, each once, and `held_back` those that may not come before `min_tokens`
        are generated."""
        self._params = params
        self._length = len(output_ids)
        counted = output_ids if params.has_penalties else ()
        generated, times = np.unique(np.asarray(counted, np.int64), return_counts=True)
        biased = np.fromiter(params.logit_bias, np.int64)
        seen = np.concatenate([prompt_ids, generated] if params.repetition_penalty != 1.0 else [generated])
        held = held_back if self._length < params.min_tokens else held_back[:0]
        self._token_ids = np.unique(np.concatenate([biased, seen, held]))
        self._table = np.zeros(len(self._token_ids), ADJUSTMENT)
        self._table["token"] = self._token_ids
        self._table["bias"][self._at(biased)] = np.fromiter(params.logit_bias.values(), np.float32)
        self._counts = np.zeros(len(self._token_ids), np.int64)
        self._counts[self._at(generated)] = times
        if params.repetition_penalty != 1.0:
            self._table["factor"][self._at(seen)] = params.repetition_penalty
        self._held = np.isin(self._token_ids, held_back)

    def _at(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._token_ids, token_ids)

    def of_row(self, row: int, path: Sequence[int]) -> NDArray[np.void]:
        """[tokens] of type `ADJUSTMENT`: what happens to the logits of `row`, which comes after the tokens `path`."""
        params, table, counts = self._params, self._table.copy(), self._counts
        if params.has_penalties and path:
            tokens, times = np.unique(np.asarray(path, np.int64), return_counts=True)
            at = self._at(tokens)
            known = np.zeros(len(tokens), bool)
            inside = at < len(self._token_ids)
            known[inside] = self._token_ids[at[inside]] == tokens[inside]
            others = np.zeros(int((~known).sum()), ADJUSTMENT)
            others["token"] = tokens[~known]
            table = np.concatenate([table, others])
            counts = np.concatenate([counts, times[~known]])
            counts[at[known]] += times[known]
            if params.repetition_penalty != 1.0:
                table["factor"][at[known]] = table["factor"][len(self._table) :] = params.repetition_penalty
        table["row"] = row
        presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        table["penalty"] = np.where(counts > 0, presence + frequency * counts.astype(np.float32), np.float32(0.0))
        if self._length + len(path) < params.min_tokens:
            table["held"][: len(self._held)] = self._held
        return table


def adjusted(logits: Tensor, adjustments: Tensor) -> None:
    """Apply adjustments [n * 32] uint8, an array of `ADJUSTMENT` with no token twice in a row, to logits [rows, V] fp32
    on the same device."""
    integers = adjustments.view(torch.int32).view(-1, _INTEGERS)
    at = integers[:, 0].long(), integers[:, 1].long()
    bias, penalty = integers[:, 2:4].contiguous().view(torch.float32).unbind(1)
    factor = integers[:, 4:6].contiguous().view(torch.float64)[:, 0]
    values = logits[at] + bias
    wide = values.double()
    # Any finite penalty is legal; an infinite logit would make the distribution undefined.
    scaled = torch.where(wide > 0, wide / factor, wide * factor).clamp(-LARGEST, LARGEST).float()
    values = torch.where(factor > 0, scaled, values) - penalty
    logits[at] = torch.where(integers[:, 6] > 0, -torch.inf, values)
