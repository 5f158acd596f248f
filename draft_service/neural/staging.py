"""Rows on their way from the host to a drafter's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.neural.devices import Milestone


class Staging:
    """Joins rows in memory that stays, and that a GPU copies from while the host goes on."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._on_gpu = dtype, device.type == "cuda"
        self._room = torch.empty(0, 0, dtype=dtype)
        self._copied = Milestone(on_gpu=self._on_gpu)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """[rows of all pieces, width] on the host, of this type. Good until the next ones are joined."""
        rows, width = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
        self._copied.wait()
        if rows > self._room.shape[0] or width != self._room.shape[1]:
            room = 1 << (rows - 1).bit_length()
            self._room = torch.empty(room, width, dtype=self._dtype, pin_memory=self._on_gpu)
        return torch.cat(list(pieces), out=self._room[:rows])

    def sent(self) -> None:
        """Every copy of what was joined last was asked for."""
        self._copied.record()
