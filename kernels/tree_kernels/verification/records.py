"""How a step is verified, in integers that are copied to the device with the rest of the step.

Layout of the parameters, int32: a record of `RECORD` for each of `max_sequences` sequences, then for each of `max_rows`
rows the index of the sequence that it is verified for, or -1.

Layout of the distributions, int32: `max_rows` + 1 starts, then pairs of token id and weight; the row's own pairs lie
between its start and the next row's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tree_kernels.attention.tree_mask import MAX_TREE_ROWS

# Marks, in the token after a row, that the row's logits are no finite numbers: the other bits are some token of the
# vocabulary, which the device may continue from and no output has. No vocabulary is so large.
NOT_FINITE = 1 << 30
TOKEN_BITS = NOT_FINITE - 1
# Pairs of one distribution: a kernel holds them all.
MAX_SUPPORT = 64
_MASK = 2**64 - 1
# The record: its fields, and their types as `struct` and numpy both name them. All else here and in the kernels is
# derived from it.
_FIELDS = {
    "first_row": "i", "rows": "i", "mode": "i", "is_chain": "i", "seed": "Q", "position": "Q", "top_k": "i",
    "filtered": "i", "temperature": "d", "top_p": "d", "min_p": "d", "begins": "Q", "epsilon": "d", "delta": "d",
    "shaping": "i", "logprobs": "i", "following": "i", "room": "i", "drafts": "i",
}  # fmt: skip
_RECORD_TYPE = np.dtype([(name, f"<{kind}") for name, kind in _FIELDS.items()])
# The same for one record. For a few sequences an array of records costs several times as much.
_RECORD_BYTES = struct.Struct("<" + "".join(_FIELDS.values()))
# Where each field begins in a record, and where the record ends, in integers.
*_STARTS, RECORD = accumulate((struct.calcsize(kind) // 4 for kind in _FIELDS.values()), initial=0)
PLACES = dict(zip(_FIELDS, _STARTS, strict=True))
FIRST_ROW, ROWS, MODE, IS_CHAIN, POSITION = map(
    PLACES.__getitem__, ("first_row", "rows", "mode", "is_chain", "position")
)


class Mode(IntEnum):
    """Rule of verification, see `tree_kernels.verification.walks`; TYPICAL: see `tree_kernels.verification.typical`."""

    GREEDY = 0
    COUPLED = 1
    REJECTION = 2
    TYPICAL = 3


# Modes whose own draw is by Gumbel-max, which has its noise by position.
DRAWN_BY_POSITION = (Mode.COUPLED, Mode.TYPICAL)


class StepToVerify(NamedTuple):
    """The tensors of a step, as `DeviceVerifier.sampled` takes them."""

    logits: Tensor
    token_ids: Tensor
    parents: Tensor
    parameters: Tensor
    distributions: Tensor | None


class RowsToVerify(NamedTuple):
    """One sequence of the step. A named tuple, since a step makes one for every sequence."""

    first_row: int  # index of the tree's root among the step's rows
    rows: int  # of the tree, the root included; 0 when there is nothing to verify
    mode: Mode = Mode.GREEDY  # GREEDY uses no attribute below but `is_chain`
    seed: int = 0  # 64 bit, of the Gumbel-max draw (COUPLED, TYPICAL), or the secret one of the coins (REJECTION)
    position: int = 0  # 64 bit, absolute, of the token after the root, or the coins' stream (REJECTION)
    temperature: float = 1.0  # 0 gives the likeliest token probability 1, which makes every mode GREEDY
    top_k: int = 0  # 0 for no limit
    top_p: float = 1.0  # 1 for no limit
    min_p: float = 0.0  # 0 for no limit
    is_chain: bool = False  # every row's parent is the row before it; the packed parents are not read then
    # TYPICAL: 64 bit, absolute position of the first token that the model generates, which is its own draw; other
    # drafted tokens are kept if their probability exceeds min(epsilon, delta * exp(-entropy)).
    begins: int = 0
    epsilon: float = 0.0
    delta: float = 0.0
    # Before its logits are verified they are shaped, by this place of `DeviceShaper.table` counted from 1; 0: they are
    # not.
    shaping: int = 0
    # How many log-probabilities are returned for each of its tokens beside the token's own, counted from 1; 0: none.
    logprobs: int = 0
    # Where a network drafts behind the pass (`tree_kernels.pass_trees`): the token after the sequence's rows, where
    # none is to be verified; the keys that its pages hold; and 1 where it gets a tree.
    following: int = 0
    room: int = 0
    drafts: int = 0

    @property
    def filtered(self) -> bool:
        """Whether any token is left out of the distribution."""
        drawn = self.mode is not Mode.GREEDY and self.temperature > 0
        return drawn and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def parameter_count(max_sequences: int, max_rows: int) -> int:
    """Elements of a step's packed parameters."""
    return RECORD * max_sequences + max_rows


def pack_parameters(
    sequences: Sequence[RowsToVerify], max_sequences: int, max_rows: int, vocabulary_size: int
) -> NDArray[np.int32]:
    """The step as int32 [parameter_count]. Raises `ValueError` for too many sequences, or rows out of range."""
    if len(sequences) > max_sequences:
        raise ValueError(f"expected at most {max_sequences} sequences, got {len(sequences)}")
    packed = np.zeros(parameter_count(max_sequences, max_rows), dtype=np.int32)
    rows = packed[RECORD * max_sequences :]
    rows.fill(-1)
    data, size = packed.data, _RECORD_BYTES.size
    for b, sequence in enumerate(sequences):
        first_row, count, mode, seed, position, temperature, top_k, top_p, min_p, is_chain, *others = sequence
        end = first_row + count
        if not (0 <= count <= MAX_TREE_ROWS and first_row >= 0 and end <= max_rows):
            raise ValueError(f"sequence {b} has rows {first_row}..{end} of {max_rows}")
        rows[first_row:end] = b
        # With temperature 0 each mode accepts the likeliest token alone.
        drawn = mode if temperature > 0 else Mode.GREEDY
        top_k = top_k if top_k < vocabulary_size else 0
        filtered = drawn > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
        _RECORD_BYTES.pack_into(
            data, size * b, first_row, count, drawn, is_chain, seed & _MASK, position & _MASK,
            top_k, filtered, temperature, top_p, min_p, *others,
        )  # fmt: skip
    return packed


def records_of(packed: NDArray[np.int32], sequences: int) -> NDArray[np.void]:
    """[sequences] views of the records in packed parameters."""
    return packed[: RECORD * sequences].view(_RECORD_TYPE)


def unpack_parameters(packed: NDArray[np.int32], max_sequences: int) -> list[RowsToVerify]:
    """The `max_sequences` records of packed parameters."""
    found = records_of(packed, max_sequences)[list(RowsToVerify._fields)].tolist()
    sequences = (RowsToVerify(*fields) for fields in found)
    return [one._replace(mode=Mode(one.mode), is_chain=bool(one.is_chain)) for one in sequences]


def pack_distributions(by_row: Mapping[int, tuple[Sequence[int], Sequence[int]]], max_rows: int) -> NDArray[np.int32]:
    """Draft distributions of a step as int32 [max_rows + 1 + 2 * pairs]. A prefix of a longer tensor may hold them.

    `by_row` has token ids and integer weights >= 1 by the step's row of the parent. Raises `ValueError` for a row out
    of range, lengths that differ, or a support above `MAX_SUPPORT`."""
    counts = np.zeros(max_rows + 1, dtype=np.int32)
    for row, (token_ids, weights) in by_row.items():
        if not 0 <= row < max_rows:
            raise ValueError(f"expected a row below {max_rows}, got {row}")
        if len(token_ids) != len(weights) or len(token_ids) > MAX_SUPPORT:
            raise ValueError(
                f"expected at most {MAX_SUPPORT} token ids and as many weights, got {len(token_ids)} and {len(weights)}"
            )
        counts[row + 1] = len(token_ids)
    pairs = [pair for row in sorted(by_row) for pair in zip(*by_row[row], strict=True)]
    flat = np.array(pairs, dtype=np.int32).reshape(-1)
    return np.concatenate([np.cumsum(counts, dtype=np.int32), flat])


def unpack_distributions(packed: NDArray[np.int32], max_rows: int) -> dict[int, tuple[list[int], list[int]]]:
    """The argument of `pack_distributions`; rows without a distribution are left out."""
    starts = packed[: max_rows + 1]
    pairs = packed[max_rows + 1 :]
    found = {}
    for row in range(max_rows):
        own = pairs[2 * starts[row] : 2 * starts[row + 1]].reshape(-1, 2)
        if len(own):
            found[row] = (own[:, 0].tolist(), own[:, 1].tolist())
    return found
