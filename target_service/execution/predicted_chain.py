"""Predicted tokens, as passed from the alignment of predictions to their verification."""

from typing import NamedTuple


class PredictedChain(NamedTuple):
    """Tokens that may follow the sequence's last one, and the probability of each given the one before."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
