"""Which keys a row of a tree sees, in Triton: in the tail its ancestors, and everywhere those within its window.

Words are those of `tree_mask`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _word(words, first_word, at, row, live, is_causal, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M] int64: which of tail keys 64 * at onwards each row sees. Before the tail it sees all."""
    if WORDS == 1:
        tree = tl.where(at == 0, first_word, 0)
    else:
        near = tl.minimum(tl.maximum(at, 0), WORDS - 1)
        tree = tl.where(at < WORDS, tl.load(words + row * WORDS + near, mask=live, other=0), 0)
    ones = row + 1 - 64 * at
    chain = tl.where(ones >= 64, -1, (tl.full(row.shape, 1, tl.int64) << (ones & 63).to(tl.int64)) - 1)
    seen = tl.where(is_causal > 0, tl.where(ones <= 0, 0, chain), tree)
    return tl.where(at < 0, -1, seen)


@triton.jit
def hide(scores, words, first_word, tail, row, live, is_causal, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores [M, N], -inf where the row does not see the key; `tail` is the first key's place in the tail.

    Shifts words as wide as the tile into place first, so that each score costs one 32-bit shift and one comparison.
    """
    n = tl.arange(0, scores.shape[1])
    # Tiles before the tail are not masked here: with 2 words added, the dividend is not negative.
    at = (tail + 128) // 64 - 2
    by = (tail - at * 64).to(tl.int64)
    low = _word(words, first_word, at, row, live, is_causal, WORDS)
    high = _word(words, first_word, at + 1, row, live, is_causal, WORDS)
    here = (low.to(tl.uint64, bitcast=True) >> by.to(tl.uint64)).to(tl.int64, bitcast=True) | high << 1 << (63 - by)
    chosen = tl.where(((n & 32) > 0)[None, :], (here >> 32).to(tl.int32)[:, None], here.to(tl.int32)[:, None])
    if scores.shape[1] > 64:
        tl.static_assert(scores.shape[1] == 128)
        low = high
        high = _word(words, first_word, at + 2, row, live, is_causal, WORDS)
        here = (low.to(tl.uint64, bitcast=True) >> by.to(tl.uint64)).to(tl.int64, bitcast=True) | high << 1 << (63 - by)
        far = tl.where(((n & 32) > 0)[None, :], (here >> 32).to(tl.int32)[:, None], here.to(tl.int32)[:, None])
        chosen = tl.where((n >= 64)[None, :], far, chosen)
    return tl.where((chosen << (31 - (n & 31))[None, :]) < 0, scores, float("-inf"))


@triton.jit
def row_positions(prefix, row, depths, live, is_causal, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M] int32: positions of a sequence's rows, by their depths in its tree. depths: of its first row onwards. Without
    a TAIL all stand behind the prefix."""
    depth = tl.load(depths + row, mask=live, other=0) if TAIL else 0 * row
    return prefix + tl.where(is_causal > 0, row, depth)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The position of the first key that a row sees: of its last WINDOW ones, or of its chunk of -WINDOW ones."""
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    else:
        first = position // (-WINDOW) * (-WINDOW)
    return first


@triton.jit
def key_positions(offsets, prefix, rows, depths, is_causal):  # type: ignore[no-untyped-def]
    """[N] int32: positions of the keys at `offsets`, their places, the prefix's first."""
    tail = offsets - prefix
    in_tail = (tail >= 0) & (tail < rows)
    depth = tl.load(depths + tail, mask=in_tail, other=0)
    # Those of chains were not written.
    return tl.where(in_tail, prefix + tl.where(is_causal > 0, tail, depth), offsets)


@triton.jit
def hide_before_window(scores, first, prefix, rows, depths, position, is_causal, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores [M, N], -inf where a key's position is below the first that its row sees. `first` is the place of the
    first key; `position` [M] is the rows'."""
    own = first + tl.arange(0, scores.shape[1])
    # Before the tail a key stands at its place.
    if first + scores.shape[1] > prefix:
        own = key_positions(own, prefix, rows, depths, is_causal)
    return tl.where(own[None, :] >= first_seen(position, WINDOW)[:, None], scores, float("-inf"))
