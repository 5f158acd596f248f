"""Vectors of consecutive tokens of one sequence, as bytes, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

import numpy as np

from outrider.wire.frames import MAX_FEATURE_BYTES, FeatureRequest, Vectors


class KeptVectors:
    """The newest vectors of a sequence, and how many of them were sent.

    Positions are those of tokens. `begin` is the oldest vector's, `end` one past the newest's; vectors below `sent`
    were sent or skipped.

    They are copied once, unless they are `bytes` of their own, into pieces that are sent as they are: one array, moved
    each time it was full, took 0.5 to 0.9 ms for each pass of 32 sequences, and 15 to 86 ms for some (512 vectors of
    4,096 numbers, two CPU cores).
    """

    def __init__(self) -> None:
        self.begin = self.end = self.sent = 0
        self.row_bytes = 1
        # The first piece begins with the vector of token `_first`, which may no longer be kept.
        self._pieces: deque[bytes] = deque()
        self._first = 0

    @property
    def nbytes(self) -> int:
        return (self.end - self._first) * self.row_bytes

    def append(self, position: int, vectors: memoryview, row_bytes: int, rows: SequenceOf[range]) -> None:
        """Copy and add these `rows` of `vectors`, which are bytes of `row_bytes` a row; the first row's token is at
        `position`, not below `end`. A position past `end` leaves a gap, so all earlier vectors are dropped."""
        if position != self.end:
            self._pieces.clear()
            self.begin = self.end = self._first = position
        self.row_bytes = row_bytes
        count = sum(map(len, rows))
        if count * row_bytes <= MAX_FEATURE_BYTES:
            self._pieces.append(_copied(vectors, row_bytes, rows))
        else:
            pieces = _pieces_of(rows, count, max(1, MAX_FEATURE_BYTES // row_bytes))
            self._pieces.extend([_copied(vectors, row_bytes, piece) for piece in pieces])
        self.end += count

    def copied(self, start: int, stop: int) -> bytes | None:
        """The bytes of the vectors of tokens `start` .. `stop`, `row_bytes` each; None where not all are kept."""
        if start < self.begin or stop > self.end:
            return None
        return bytes(self._bytes_of(start, stop))

    def trim(self, keep: int) -> None:
        begin = self.end - keep
        if begin <= self.begin:
            return
        self.begin = begin
        pieces, row_bytes = self._pieces, self.row_bytes
        while pieces and (behind := self._first + len(pieces[0]) // row_bytes) <= begin:
            pieces.popleft()
            self._first = behind
        if pieces and 2 * (begin - self._first) > keep:
            # Seldom: the kept end of a long prompt's piece is copied.
            pieces[0] = pieces[0][(begin - self._first) * row_bytes :]
            self._first = begin

    def piece_end(self, start: int, stop: int) -> int:
        """The last token up to `stop` behind which a piece ends, if it lies past `start`; else `stop`."""
        end = self.end
        for piece in reversed(self._pieces):
            if end <= stop:
                break
            end -= len(piece) // self.row_bytes
        return end if end > start else stop

    @property
    def unsent(self) -> int:
        """The first vector that is kept and was not sent."""
        return max(self.sent, self.begin)

    def pop_unsent(self, stop: int, form: FeatureRequest) -> Vectors:
        """The unsent vectors up to `stop`, which count as sent from now on. See `vectors`."""
        start, self.sent = max(self.sent, self.begin), stop
        return self.vectors(start, stop, form)

    def vectors(self, start: int, stop: int, form: FeatureRequest) -> Vectors:
        """The vectors of tokens `start` .. `stop`, in the requested form."""
        data = self._bytes_of(start, stop)
        if form.dtype != "float8_e4m3":
            return Vectors(form.dtype, form.width, data)
        rows = np.frombuffer(data, np.uint8).reshape(stop - start, self.row_bytes)
        scales = rows[:, form.width :].copy().view(np.float32)[:, 0]
        return Vectors(form.dtype, form.width, rows[:, : form.width].tobytes(), tuple(scales.tolist()))

    def _bytes_of(self, start: int, stop: int) -> bytes:
        """Their bytes; copied unless they are exactly one piece, as those of a step are."""
        newest = self._pieces[-1]
        if stop == self.end and len(newest) == (stop - start) * self.row_bytes:
            return newest
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


def _copied(vectors: memoryview, row_bytes: int, rows: SequenceOf[range]) -> bytes:
    whole = vectors.obj
    if len(rows) == 1 and isinstance(whole, bytes) and len(rows[0]) * row_bytes == len(whole):
        # Of a page that others share: nothing writes there.
        return whole
    if len(rows) == 1:
        return bytes(vectors[rows[0].start * row_bytes : rows[0].stop * row_bytes])
    return b"".join([vectors[part.start * row_bytes : part.stop * row_bytes] for part in rows])


def _pieces_of(rows: SequenceOf[range], count: int, most: int) -> list[list[range]]:
    """The `count` rows in pieces of `most`. Only the first may be smaller: a commit takes along the last one."""
    pieces: list[list[range]] = [[]]
    room = count % most or most
    for part in rows:
        while part:
            if not room:
                pieces.append([])
                room = most
            taken, part = part[:room], part[room:]
            pieces[-1].append(taken)
            room -= len(taken)
    return pieces
