"""What a prediction says may come next: a value between those who align predictions and those who verify them."""

from __future__ import annotations

from typing import NamedTuple


class PredictedChain(NamedTuple):
    """Tokens that may follow the sequence's last, and how likely each is where the one before came."""

    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
