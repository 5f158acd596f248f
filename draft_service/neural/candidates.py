"""The most probable tokens of each row of a network's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from outrider.sampling import VerificationMode
from outrider.tree import MAX_DISTRIBUTION_SUPPORT
from tree_kernels.growth import COLDEST, GREEDY_TEMPERATURE


def temperature_of(sequence: DraftSequence) -> float:
    """The temperature of drafting."""
    if sequence.mode is VerificationMode.GREEDY:
        return GREEDY_TEMPERATURE
    return max(sequence.sampling.temperature or 1.0, COLDEST)


def candidates_wanted(mode: VerificationMode, breadth: int, candidates: int) -> int:
    """Candidates of a row that a mode needs; `candidates` take part in COUPLED's Gumbel-max draw."""
    if mode is VerificationMode.GREEDY:
        return breadth
    return candidates if mode is VerificationMode.COUPLED else MAX_DISTRIBUTION_SUPPORT


def most_probable(
    logits: Tensor, temperatures: Tensor, count: int, token_ids: npt.NDArray[np.int32] | None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The `count` most probable tokens of each row, after temperature and before filters, in descending order: their
    target ids, and their probabilities over the whole vocabulary, [R, M] each. A row with NaN logits has probabilities
    of 0, and gets no children.

    Args:
        logits: [R, V'].
        temperatures: [R] float32, positive.
        count: M; at most V'.
        token_ids: [V'] target ids of the draft vocabulary; None if that is the target's.
    """
    scaled = logits.float() / temperatures[:, None]
    values, places = scaled.topk(min(count, logits.shape[1]), dim=-1)
    probs = (values - scaled.logsumexp(-1, keepdim=True)).exp().nan_to_num_(0.0)
    ids = places.to(torch.int32).cpu().numpy()
    return ids if token_ids is None else token_ids[ids], probs.cpu().numpy()
