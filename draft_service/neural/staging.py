"""Staging memory for rows that are copied from the host to a drafter's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.neural.devices import DeviceEvent


class Staging:
    """Concatenates rows in a reused buffer, pinned for asynchronous copies to a GPU."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._on_gpu = dtype, device.type == "cuda"
        self._buffer = torch.empty(0, 0, dtype=dtype)
        self._copied = DeviceEvent(on_gpu=self._on_gpu)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """[rows of all pieces, width] on the host, in the buffer's type. Valid until the next call."""
        rows, width = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
        self._copied.wait()
        if rows > self._buffer.shape[0] or width != self._buffer.shape[1]:
            capacity = 1 << (rows - 1).bit_length()
            self._buffer = torch.empty(capacity, width, dtype=self._dtype, pin_memory=self._on_gpu)
        return torch.cat(list(pieces), out=self._buffer[:rows])

    def sent(self) -> None:
        """Mark that every copy of the last joined rows has been launched."""
        self._copied.record()
