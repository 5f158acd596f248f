"""Vectors of consecutive tokens of one sequence, as bytes, oldest first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.wire.frames import FeatureRequest, Vectors


class KeptVectors:
    """The newest vectors of a sequence, and how far the draft has heard of them.

    Positions are those of tokens. `begin` is the oldest vector's, `end` one past the newest's, and those below `sent`
    were sent, or will be no more.
    """

    def __init__(self) -> None:
        self.begin = self.end = self.sent = 0
        self.row_bytes = 1
        # Bytes are cut from its front in no time.
        self._bytes = bytearray()

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def append(self, position: int, rows: npt.NDArray[np.uint8]) -> None:
        """Add vectors [n, bytes of each], the first one's token at `position`, not below `end`.

        Where that lies past `end`, what was kept before is dropped, since nothing joins the two.
        """
        if position != self.end:
            self._bytes.clear()
            self.begin = self.end = position
        self.row_bytes = rows.shape[1]
        self._bytes += rows.tobytes()
        self.end += len(rows)

    def trim(self, keep: int) -> None:
        """Keep the newest so many."""
        drop = self.end - self.begin - keep
        if drop > 0:
            del self._bytes[: drop * self.row_bytes]
            self.begin += drop

    def vectors(self, start: int, stop: int, form: FeatureRequest) -> Vectors:
        """Those of tokens start .. stop, in the form that they were asked for in."""
        data = bytes(self._bytes[(start - self.begin) * self.row_bytes : (stop - self.begin) * self.row_bytes])
        if form.dtype != "float8_e4m3":
            return Vectors(form.dtype, form.width, data)
        rows = np.frombuffer(data, np.uint8).reshape(stop - start, self.row_bytes)
        scales = rows[:, form.width :].copy().view(np.float32)[:, 0]
        return Vectors(form.dtype, form.width, rows[:, : form.width].tobytes(), tuple(scales.tolist()))
