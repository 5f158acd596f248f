"""What shapes a sequence's logits, and how the device reads it.

Order, as in vLLM (v1/sample/sampler.py): biases, repetition penalty over prompt and output, presence and frequency
penalties over the output, tokens held back until enough are generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Beyond any logit, and small enough in float32 that penalties and biases can be added to it.
LARGEST = 1e30
# Tokens of a sequence that have a bias or are held back: the contract allows 1,024 biases and 64 stop tokens, which
# leaves room for 64 end tokens.
MOST_ENTRIES = 1152


class Shaping(NamedTuple):
    """What shapes one request's logits."""

    prompt_length: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    biases: Mapping[int, float] = {}
    min_tokens: int = 0  # output tokens before which the `held` ones may not come
    held: Sequence[int] = ()

    @property
    def penalises(self) -> bool:
        """Whether it depends on the text."""
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


class ShapingField(IntEnum):
    """Where in a place of the table its integers stand. Entries follow: their tokens, rising, then their biases, then
    whether each is held back, `MOST_ENTRIES` of each."""

    PROMPT_LENGTH = 0
    MIN_TOKENS = 1
    PENALISES = 2
    PRESENCE = 3  # float32
    FREQUENCY = 4  # float32
    ENTRIES = 5  # how many there are
    REPETITION = 6  # float64, two integers


TOKENS, BIASES, HELD = (8 + MOST_ENTRIES * array for array in range(3))
# Integers of a place.
PLACE = 8 + 3 * MOST_ENTRIES


def pack_shaping(shaping: Shaping) -> NDArray[np.int32]:
    """A place of the table [PLACE] int32. Raises `ValueError` for too many entries."""
    entries = sorted({*shaping.biases, *shaping.held})
    if len(entries) > MOST_ENTRIES:
        raise ValueError(f"expected at most {MOST_ENTRIES} tokens with a bias or held back, got {len(entries)}")
    packed, count, held = np.zeros(PLACE, np.int32), len(entries), set(shaping.held)
    floats = packed.view(np.float32)
    packed[ShapingField.PROMPT_LENGTH], packed[ShapingField.MIN_TOKENS] = shaping.prompt_length, shaping.min_tokens
    packed[ShapingField.PENALISES], packed[ShapingField.ENTRIES] = shaping.penalises, count
    floats[ShapingField.PRESENCE], floats[ShapingField.FREQUENCY] = shaping.presence, shaping.frequency
    packed[ShapingField.REPETITION : ShapingField.REPETITION + 2].view(np.float64)[0] = shaping.repetition
    packed[TOKENS : TOKENS + count] = entries
    floats[BIASES : BIASES + count] = [shaping.biases.get(token, 0.0) for token in entries]
    packed[HELD : HELD + count] = [token in held for token in entries]
    return packed


def unpack_shaping(packed: NDArray[np.int32]) -> Shaping:
    """The argument of `pack_shaping`."""
    floats, count = packed.view(np.float32), int(packed[ShapingField.ENTRIES])
    tokens = packed[TOKENS : TOKENS + count].tolist()
    biases, held = floats[BIASES : BIASES + count].tolist(), packed[HELD : HELD + count].tolist()
    return Shaping(
        int(packed[ShapingField.PROMPT_LENGTH]),
        float(floats[ShapingField.PRESENCE]),
        float(floats[ShapingField.FREQUENCY]),
        float(packed[ShapingField.REPETITION : ShapingField.REPETITION + 2].view(np.float64)[0]),
        {token: bias for token, bias in zip(tokens, biases, strict=True) if bias},
        int(packed[ShapingField.MIN_TOKENS]),
        tuple(token for token, is_held in zip(tokens, held, strict=True) if is_held),
    )
