"""Vectors of consecutive tokens of one sequence, as bytes, oldest first."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from outrider.wire.frames import FeatureRequest, Vectors


class KeptVectors:
    """The newest vectors of a sequence, and how many of them were sent.

    Positions are those of tokens. `begin` is the oldest vector's, `end` one past the newest's; vectors below `sent`
    were sent or skipped.

    They stay in the pieces that they came in. One array, of 4 MB for 512 vectors of 4,096 numbers, was moved each time
    it was full: 0.5 to 0.9 ms for each pass of 32 sequences, and 15 to 86 ms for some (two CPU cores).
    """

    def __init__(self) -> None:
        self.begin = self.end = self.sent = 0
        self.row_bytes = 1
        # The first piece may begin with vectors that are no longer kept.
        self._pieces: deque[bytes] = deque()
        # Bytes that are held.
        self.nbytes = 0

    def append(self, position: int, rows: npt.NDArray[np.uint8]) -> None:
        """Add vectors [n, bytes of each], the first one's token at `position`, not below `end`.

        A position past `end` leaves a gap, so all earlier vectors are dropped.
        """
        if position != self.end:
            self._pieces.clear()
            self.begin = self.end = position
            self.nbytes = 0
        self.row_bytes = rows.shape[1]
        self._pieces.append(rows.tobytes())
        self.end += len(rows)
        self.nbytes += rows.nbytes

    def trim(self, keep: int) -> None:
        """Keep the newest `keep` vectors."""
        if self.end - self.begin <= keep:
            return
        self.begin = self.end - keep
        oldest = self.end - self.nbytes // self.row_bytes
        while self._pieces:
            size = len(self._pieces[0])
            behind = oldest + size // self.row_bytes
            if behind > self.begin:
                break
            self._pieces.popleft()
            self.nbytes -= size
            oldest = behind
        unused = (self.begin - oldest) * self.row_bytes
        if self._pieces and 2 * unused > len(self._pieces[0]):
            # Not with every step: the kept end of a long prompt's piece is copied.
            self._pieces[0] = self._pieces[0][unused:]
            self.nbytes -= unused

    def vectors(self, start: int, stop: int, form: FeatureRequest) -> Vectors:
        """The vectors of tokens `start` .. `stop`, in the requested form."""
        data = self._bytes_of(start, stop)
        if form.dtype != "float8_e4m3":
            return Vectors(form.dtype, form.width, data)
        rows = np.frombuffer(data, np.uint8).reshape(stop - start, self.row_bytes)
        scales = rows[:, form.width :].copy().view(np.float32)[:, 0]
        return Vectors(form.dtype, form.width, rows[:, : form.width].tobytes(), tuple(scales.tolist()))

    def _bytes_of(self, start: int, stop: int) -> bytes:
        """Their bytes; copied unless they are exactly one piece."""
        found: list[bytes] = []
        end = self.end
        for piece in reversed(self._pieces):
            first = end - len(piece) // self.row_bytes
            low, high = max(start, first) - first, min(stop, end) - first
            if low < high:
                whole = high - low == end - first
                found.append(piece if whole else piece[low * self.row_bytes : high * self.row_bytes])
            if first <= start:
                break
            end = first
        return found[0] if len(found) == 1 else b"".join(reversed(found))
