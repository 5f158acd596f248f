"""The Triton kernel of latent attention: a tile of latents is both keys and values.

The words are those of `attention.triton_schedule`; all query heads share the one key head, so a group is a block of
rows times heads. Masks, partials and their merging are those of tree attention.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.attention.triton_kernels import key_slots, softmax_step
from tree_kernels.attention.triton_mask import hide
from tree_kernels.attention.triton_merge import lse_of, write_partial, write_rows


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    q, q_rotary, peak, mass, acc, first, open_keys, cache, page_table, words, first_word, row, live, rows, prefix,
    is_causal, scale_log2, LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_LATENT: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the BLOCK_N keys from `first`. Latents are loaded once."""
    c = tl.arange(0, BLOCK_LATENT)
    r = tl.arange(0, BLOCK_ROTARY)
    # What lies behind the last key may be NaN, and 0 * NaN is NaN: the last key stands in for it.
    offsets = tl.minimum(first + tl.arange(0, BLOCK_N), prefix + rows - 1)
    at = cache + key_slots(page_table, offsets, first, PAGE_SIZE, BLOCK_N, FAR)[:, None] * (LATENT + ROTARY)
    # Without a mask where the block has no extra columns.
    to = at + c[None, :]
    latents = tl.load(to) if BLOCK_LATENT == LATENT else tl.load(to, mask=(c < LATENT)[None, :], other=0.0)
    to = at + LATENT + r[None, :]
    rotary_key = tl.load(to) if BLOCK_ROTARY == ROTARY else tl.load(to, mask=(r < ROTARY)[None, :], other=0.0)
    scores = tl.dot(q_rotary, tl.trans(rotary_key), input_precision="ieee")
    scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
    if first + BLOCK_N > open_keys:
        scores = hide(scores, words, first_word, first - prefix, row, live, is_causal, WORDS)
    return softmax_step(scores, latents, peak, mass, acc, scale_log2, False)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    record, chunk, per_chunk, query, cache, output, partials, partial_lse, page_table, words, scale_log2,
    query_row_stride, query_head_stride, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_LATENT: tl.constexpr, BLOCK_ROTARY: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """One chunk's share of one group."""
    row_start = tl.load(record)
    rows = tl.load(record + 1)
    prefix = tl.load(record + 2)
    pages = page_table + tl.load(record + 3)
    block = tl.load(record + 4)
    first_tile = tl.load(record + 5)
    tiles = tl.load(record + 6)
    is_causal = tl.load(record + 7) % 2
    low = tl.maximum(chunk * per_chunk - first_tile, 0)
    high = tl.minimum((chunk + 1) * per_chunk - first_tile, tiles)
    if low < high:
        m = tl.arange(0, BLOCK_M)
        c = tl.arange(0, BLOCK_LATENT)
        r = tl.arange(0, BLOCK_ROTARY)
        row = (block * BLOCK_M + m) // GROUP
        live = row < rows
        at = (row_start + row).to(tl.int64) * query_row_stride + (block * BLOCK_M + m) % GROUP * query_head_stride
        q_at = query + at[:, None]
        q = tl.load(q_at + c[None, :], mask=live[:, None] & (c < LATENT)[None, :], other=0.0)
        q_rotary = tl.load(q_at + LATENT + r[None, :], mask=live[:, None] & (r < ROTARY)[None, :], other=0.0)
        own_words = words + row_start.to(tl.int64) * WORDS
        first_word = tl.load(own_words + row * WORDS, mask=live, other=0)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_LATENT], tl.float32)
        # Keys that every row of the block sees need no mask: the prefix and, in a causal tail, the rows before.
        open_keys = prefix + tl.where(is_causal > 0, block * BLOCK_M // GROUP, 0)
        for tile in tl.range(low, high):
            peak, mass, acc = _tile(
                q, q_rotary, peak, mass, acc, tile * BLOCK_N, open_keys, cache, pages, own_words, first_word, row, live,
                rows, prefix, is_causal, scale_log2, LATENT, ROTARY, BLOCK_LATENT, BLOCK_ROTARY, PAGE_SIZE, BLOCK_N,
                WORDS, FAR,
            )  # fmt: skip
        acc = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        if (low == 0) & (high == tiles):
            write_rows(
                (output, partial_lse), acc, lse_of(peak, mass), row_start, rows, block, 0, m, GROUP, 1, LATENT,
                BLOCK_LATENT, BLOCK_M, False,
            )  # fmt: skip
        else:
            write_partial(
                partials, partial_lse, acc, peak, mass, chunk, per_chunk, first_tile, m, live, LATENT, BLOCK_LATENT,
                BLOCK_M,
            )  # fmt: skip


@triton.jit
def latent_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, partials, partial_lse, page_table, words, groups, chunk_table, scale_log2,
    query_row_stride, query_head_stride, GROUP: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_LATENT: tl.constexpr, BLOCK_ROTARY: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, FAR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Every program takes one chunk, and of it the groups that lie in it."""
    if DEPENDENT:
        # The results of the launch before may be read from here on; the launch after may start and wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    own = chunk_table + chunk * 16
    first = tl.load(own + 8)
    last = tl.load(own + 9)
    per_chunk = tl.load(own + 10)
    for group in tl.range(first, last + 1, num_stages=1):
        record = own
        if group > first:
            record = groups + group * 8
        _attend(
            record, chunk, per_chunk, query, cache, output, partials, partial_lse, page_table, words, scale_log2,
            query_row_stride, query_head_stride, GROUP, LATENT, ROTARY, BLOCK_LATENT, BLOCK_ROTARY, PAGE_SIZE,
            BLOCK_M, BLOCK_N, WORDS, FAR,
        )  # fmt: skip
