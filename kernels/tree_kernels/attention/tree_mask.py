"""Ancestor masks of a token tree: as 64-bit words for kernels, as a boolean matrix for PyTorch.

Bit order: bit `j % 64` of word `j // 64` of row i is set if and only if row j is row i itself or one of its ancestors,
that is, if row i may attend to the key of row j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch

WORD_BITS = 64
MAX_TREE_ROWS = 256
_WORD = (1 << WORD_BITS) - 1
_SIGN = 1 << (WORD_BITS - 1)


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """One unbounded integer per row, bit j as above.

    Args:
        parents: parents[i] < i for i > 0; parents[0] is ignored, row 0 being the root.

    Raises:
        ValueError: a parent does not lie before its row.
    """
    bits = [1] * len(parents)
    for i in range(1, len(parents)):
        parent = parents[i]
        if not 0 <= parent < i:
            raise ValueError(f"parents[{i}] must lie in 0..{i - 1}, got {parent}")
        bits[i] = bits[parent] | 1 << i
    return bits


def ancestor_words(parents: Sequence[int]) -> list[list[int]]:
    """The bits of each row cut into ceil(rows / 64) words, each as the signed int64 of the same bits.

    Returns:
        [rows][words]; what `torch.tensor(..., dtype=torch.int64)` takes.

    Raises:
        ValueError: a parent does not lie before its row.
    """
    shifts = range(0, len(parents), WORD_BITS)
    return [[_signed(row >> shift & _WORD) for shift in shifts] for row in ancestor_bits(parents)]


def tree_rows(batch: AttentionBatch) -> int:
    """Rows of the largest tree; 0 where there is none.

    Raises:
        ValueError: it has more than `MAX_TREE_ROWS`.
    """
    rows = max((len(parents) for parents in batch.parents if parents is not None), default=0)
    if rows > MAX_TREE_ROWS:
        raise ValueError(f"expected trees of at most {MAX_TREE_ROWS} rows, got {rows}")
    return rows


def mask_words(batch: AttentionBatch) -> int:
    """Words of every row's mask: one, or as many as the largest tree may need."""
    return 1 if tree_rows(batch) <= WORD_BITS else MAX_TREE_ROWS // WORD_BITS


def ancestor_mask(parents: Sequence[int] | None, rows: int) -> Tensor:
    """[rows, rows] bool, true where the row may attend to the column. `parents` of None is a causal chain.

    Raises:
        ValueError: a parent does not lie before its row, or there is not one per row.
    """
    if parents is None:
        return torch.ones(rows, rows, dtype=torch.bool).tril_()
    if len(parents) != rows:
        raise ValueError(f"expected {rows} parents, got {len(parents)}")
    words = torch.tensor(ancestor_words(parents), dtype=torch.int64).view(rows, -(-rows // WORD_BITS))
    columns = torch.arange(rows)
    return (words[:, columns // WORD_BITS] >> columns % WORD_BITS & 1).bool()


def _signed(word: int) -> int:
    return word - 2 * _SIGN if word & _SIGN else word
