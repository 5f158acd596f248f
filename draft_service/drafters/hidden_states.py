"""The target's hidden states of one sequence for a drafter: a bounded window over positions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draft_service.drafters.base import DraftSequence
from outrider.errors import InvalidField
from outrider.wire.frames import Vectors

# For each type: PyTorch's, integers of its width, the mask of all bits but the sign, and the least masked value that is
# not finite.
_TYPES: dict[str, tuple[torch.dtype, type[np.unsignedinteger], int, int]] = {
    "float32": (torch.float32, np.uint32, 0x7FFFFFFF, 0x7F800000),
    "bfloat16": (torch.bfloat16, np.uint16, 0x7FFF, 0x7F80),
    "float8_e4m3": (torch.float8_e4m3fn, np.uint8, 0x7F, 0x7F),
}


def read_vectors(vectors: Vectors) -> Tensor:
    """The vectors as [count, width]: in their own type, or in fp32 with scales. Shares no memory with them. Raises
    `InvalidField` if an element is not a finite number."""
    # Without PyTorch, which would wake a thread on every core.
    dtype, integers, number, least = _TYPES[vectors.dtype]
    bits = np.frombuffer(vectors.data, integers)
    finite = not len(bits) or int((bits & integers(number)).max()) < least
    elements = torch.frombuffer(bytearray(vectors.data), dtype=dtype)
    rows = elements.view(vectors.rows, vectors.width)
    if vectors.scales or vectors.dtype == "float8_e4m3":
        rows = rows.float()
    if vectors.scales:
        rows = rows * torch.tensor(vectors.scales)[:, None]
        finite = finite and bool(np.isfinite(rows.numpy()).all())
    if not finite:
        raise InvalidField("features.data", "holds elements that are not finite")
    return rows


class FeatureWindow:
    """A queue of vectors of consecutive tokens: a session appends the next, a drafter takes the oldest. Positions are
    indices into `DraftSequence.token_ids`, also if a window begins late. Taken vectors are removed."""

    def __init__(self, width: int, capacity: int) -> None:
        """`width`: elements of a vector; `capacity`: most waiting vectors, past which the oldest are dropped."""
        self.width = width
        self.capacity = capacity
        # Positions of the oldest waiting vector, and after the newest, which is that of the next one.
        self.begin = 0
        self.end = 0
        # Rows of each piece, and the piece, [rows, width]; oldest first. A tensor's own length takes longer than
        # everything else here.
        self._pieces: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        return self.end - self.begin

    def append(self, vectors: Tensor, position: int) -> None:
        """Add the vectors, [n, width] of any floating type, of consecutive tokens from `position` on. Kept as they are,
        not copied.

        Vectors that arrived before are skipped, so a target may send some twice. If they begin late, the vectors
        between will never arrive: the waiting ones are dropped, since a drafter could not use them. Raises
        `InvalidField` for another shape, another type, or a negative position.
        """
        shape = vectors.shape
        if len(shape) != 2 or shape[1] != self.width:
            raise InvalidField("features", f"needs shape [tokens, {self.width}], has {list(shape)}")
        if not vectors.is_floating_point():
            raise InvalidField("features", f"needs a floating type, has {vectors.dtype}")
        if position < 0:
            raise InvalidField("features", f"begins at position {position}")
        if position > self.end:
            self._pieces.clear()
            self.begin = self.end = position
        known = self.end - position
        new = shape[0] - known
        if new <= 0:
            return
        self._pieces.append((new, vectors[known:] if known else vectors))
        self.end += new
        while (excess := len(self) - self.capacity) > 0:
            self._drop(excess)

    def skip_to(self, position: int) -> None:
        """Drop the vectors before `position`, those that are still to come among them: a drafter needs none of them."""
        if position >= self.end:
            self._pieces.clear()
            self.begin = self.end = position
            return
        while self.begin < position:
            self._drop(position - self.begin)

    def _drop(self, most: int) -> None:
        """Drop up to `most` of the oldest piece."""
        rows, piece = self._pieces.pop(0)
        dropped = min(rows, most)
        self.begin += dropped
        if dropped < rows:
            self._pieces.insert(0, (rows - dropped, piece[dropped:]))

    def pop_vectors(self) -> tuple[int, list[Tensor]]:
        """Take all waiting vectors: the position of the first, and pieces of [n, width], oldest first, each in the type
        it came in. A prompt's are some megabytes, so they are not joined here."""
        begin, taken = self.begin, [piece for _, piece in self._pieces]
        self._pieces.clear()
        self.begin = self.end
        return begin, taken


def window_of(sequence: DraftSequence) -> FeatureWindow:
    """The window of a sequence whose drafter reads features."""
    assert sequence.features is not None, "the sequence was not opened"
    return sequence.features
