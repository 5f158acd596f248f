"""From a network's logits to the few tokens of each row that can matter, most probable first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from outrider.sampling import VerificationMode
from outrider.tree import MAX_DISTRIBUTION_SUPPORT

# Below this temperature the target's distribution is a point.
_COLDEST = 0.05


class Candidates(NamedTuple):
    """Per row, the most probable tokens after temperature and before filters, in falling order.

    A row whose logits are no numbers has probabilities of 0, and gets no children.
    """

    token_ids: npt.NDArray[np.int32]  # [R, M] the target's ids
    probs: npt.NDArray[np.float32]  # [R, M] of the whole distribution


def temperature_of(sequence: DraftSequence) -> float:
    """What the logits are divided by. GREEDY ranks by the head's own distribution."""
    if sequence.mode is VerificationMode.GREEDY:
        return 1.0
    return max(sequence.sampling.temperature or 1.0, _COLDEST)


def candidates_wanted(mode: VerificationMode, breadth: int, entrants: int) -> int:
    """How many tokens of a row a mode looks at; `entrants` take part in COUPLED's race."""
    if mode is VerificationMode.GREEDY:
        return breadth
    return entrants if mode is VerificationMode.COUPLED else MAX_DISTRIBUTION_SUPPORT


def most_probable(
    logits: Tensor, temperatures: Tensor, count: int, token_ids: npt.NDArray[np.int32] | None
) -> Candidates:
    """The `count` most probable tokens of each row.

    Args:
        logits: [R, V'].
        temperatures: [R] float32, positive.
        count: M; fewer when the vocabulary is smaller.
        token_ids: [V'] the target's ids of the draft's, None when they are the same.
    """
    scaled = logits.float() / temperatures[:, None]
    values, places = scaled.topk(min(count, logits.shape[1]), dim=-1)
    probs = (values - scaled.logsumexp(-1, keepdim=True)).exp().nan_to_num_(0.0)
    ids = places.to(torch.int32).cpu().numpy()
    return Candidates(ids if token_ids is None else token_ids[ids], probs.cpu().numpy())
