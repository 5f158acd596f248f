"""Prompt lookup in a sequence's own text, as its pages hold it, for the kernels that rank what may follow."""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.node_table import layout

# Keys that are compared at once when a run is searched; a longer run counts for more than a later one.
_BLOCK = tl.constexpr(1024)
_RUN = tl.constexpr(1 << 26)
_LONGEST, _WINDOW = tl.constexpr(layout.LONGEST), tl.constexpr(layout.WINDOW)


@triton.jit
def _tokens_at(tokens, pages, keys, mask, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens fed as `keys` [n] of a sequence whose `pages` these are; -1 where masked."""
    page = tl.load(pages + keys // PAGE_SIZE, mask=mask, other=0)
    return tl.load(tokens + page * PAGE_SIZE + keys % PAGE_SIZE, mask=mask, other=-1)


@triton.jit
def last_longest_run(tokens, pages, prefix, root, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The length of the run that `node_table.longest_run` finds, and the key after it; 0 and `prefix` without one."""
    first = tl.maximum(prefix - _WINDOW, 0)
    last = _tokens_at(tokens, pages, prefix - 1, prefix >= 1, PAGE_SIZE)
    found = tl.full([_BLOCK], -1, tl.int32)
    for start in range(first, prefix, _BLOCK):
        j = start + tl.arange(0, _BLOCK)
        same = _tokens_at(tokens, pages, j, j < prefix, PAGE_SIZE) == root
        before = _tokens_at(tokens, pages, j - 1, (j >= 1) & (j < prefix), PAGE_SIZE)
        run = same.to(tl.int32)
        same = same & (before == last) & (before >= 0)
        run += same.to(tl.int32)
        # Runs of two are rare in most texts. Loads do not wait for each other: whether a run goes on is tested
        # afterwards.
        if tl.max(run, axis=0) > 1:
            for i in tl.static_range(2, _LONGEST):
                wanted = _tokens_at(tokens, pages, prefix - i, prefix >= i, PAGE_SIZE)
                before = _tokens_at(tokens, pages, j - i, (j >= i) & (j < prefix), PAGE_SIZE)
                same = same & (before == wanted) & (before >= 0)
                run += same.to(tl.int32)
        found = tl.maximum(found, tl.where(run > 0, run * _RUN + (j - first), -1))
    best = tl.max(found, axis=0)
    end = tl.where(best < 0, prefix, first + best % _RUN + 1)
    return tl.where(best < 0, 0, best // _RUN), end


@triton.jit
def text_at(tokens, pages, prefix, root, end, chain, position, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens at `position` [n] of the text up to its root at `prefix`, and behind that of the `chain` tokens that
    followed the key before `end`; -1 beyond."""
    further = position - prefix - 1
    key = tl.where(further < 0, position, end + tl.maximum(further, 0) % (prefix + 1 - end))
    there = (position >= 0) & (further < chain)
    fed = _tokens_at(tokens, pages, key, there & (key < prefix), PAGE_SIZE)
    return tl.where(there & (key == prefix), root, fed)
