"""Ancestor masks of a token tree: a boolean matrix for PyTorch, and the sizes of the 64-bit words for kernels.

Bit order of the words: bit `j % 64` of word `j // 64` of row i is set if and only if row j is row i itself or one of
its ancestors, that is, if row i may attend to the key of row j.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tree_kernels.attention.batch import AttentionBatch

# Rows that a word of a mask has bits for, and rows of the largest tree: four words.
WORD_BITS = 64
MAX_TREE_ROWS = 256


def tree_rows(batch: AttentionBatch) -> int:
    """Rows of the largest tree; 0 where there is none. Raises `ValueError` where it has more than `MAX_TREE_ROWS`."""
    rows = max((len(parents) for parents in batch.parents if parents is not None), default=0)
    if rows > MAX_TREE_ROWS:
        raise ValueError(f"expected trees of at most {MAX_TREE_ROWS} rows, got {rows}")
    return rows


def mask_words(batch: AttentionBatch) -> int:
    """Words of every row's mask: one, or the four of the largest tree."""
    return 1 if tree_rows(batch) <= WORD_BITS else MAX_TREE_ROWS // WORD_BITS


def ancestor_mask(parents: Sequence[int] | None, rows: int) -> Tensor:
    """[rows, rows] bool, true where the row may attend to the column, by parents[i] < i for i > 0; parents[0] is
    ignored, row 0 being the root. None is a causal chain. Raises `ValueError` where a parent does not lie before its
    row, or there is not one per row."""
    if parents is None:
        return torch.ones(rows, rows, dtype=torch.bool).tril_()
    if len(parents) != rows:
        raise ValueError(f"expected {rows} parents, got {len(parents)}")
    mask = np.eye(rows, dtype=np.bool_)
    for row in range(1, rows):
        parent = parents[row]
        if not 0 <= parent < row:
            raise ValueError(f"parents[{row}] must lie in 0..{row - 1}, got {parent}")
        mask[row] |= mask[parent]
    return torch.from_numpy(mask)
