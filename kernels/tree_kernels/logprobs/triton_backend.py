"""Triton: the most probable tokens of each chunk of a row, those of the row, and the launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.logprobs import layout
from tree_kernels.verification.dispatch import Verdicts
from tree_kernels.verification.triton_rows import (
    FIRST_ROW,
    LOGPROBS,
    load_logits,
    record_of,
    sequence_of,
    without_mark,
)

# Tokens of the vocabulary for a program. Not measured.
_CHUNK = 2048
# Tokens listed by each chunk, in a power of two.
_LISTED = tl.constexpr(triton.next_power_of_2(layout.MOST_LISTED))
_IDS, _VALUES, _WIDTH = tl.constexpr(layout.IDS), tl.constexpr(layout.VALUES), tl.constexpr(layout.WIDTH)
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _emitted(parameters, verdicts, sequences, row):  # type: ignore[no-untyped-def]
    """Of the token that is written at `row`: the row of its logits and how many tokens are listed with it; -1 for both
    where there is none. And its sequence, and its number there."""
    b = sequence_of(parameters, row, sequences)
    at, listed, number = row * 0 - 1, row * 0 - 1, row * 0
    if b >= 0:
        record = record_of(parameters, b)
        first = tl.load(record + FIRST_ROW)
        wanted = tl.load(record + LOGPROBS)
        number = row - first
        if (wanted > 0) & (number <= tl.load(verdicts + b)):
            below = tl.load(verdicts + 2 * sequences + row - 1, mask=number > 0, other=0)
            at = first + below
            listed = wanted - 1
    return at, listed, b, number


@triton.jit(do_not_specialize=["sequences", "chunks"])
def chunk_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, parameters, verdicts, sequences, sums, peaks, ids_of_chunks, vocabulary, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """sums [R, chunks] fp32: of exp(logit - the chunk's greatest); peaks [R, chunks, _LISTED] fp32: the chunk's
    greatest logits, falling, of equals the lowest id first; ids_of_chunks likewise, int32."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    at, listed, _, _ = _emitted(parameters, verdicts, sequences, row)
    if at >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits, at, row_stride, ids, vocabulary)
        greatest = tl.max(x, 0)
        out = row.to(tl.int64) * chunks + chunk
        tl.store(sums + out, tl.sum(tl.where(x > float("-inf"), tl.exp(x - greatest), 0.0), 0))
        left = ids < vocabulary
        # One at least: the greatest is needed.
        for place in range(tl.maximum(listed, 1)):
            best = tl.max(tl.where(left, x, float("-inf")), 0)
            token = tl.min(tl.where(left & (x == best), ids, _NONE), 0)
            tl.store(peaks + out * _LISTED + place, best)
            tl.store(ids_of_chunks + out * _LISTED + place, token)
            left = left & (ids != token)


@triton.jit(do_not_specialize=["sequences", "chunks"])
def row_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, token_ids, parameters, verdicts, sequences, sums, peaks, ids_of_chunks, found, vocabulary,
    chunks, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """found [R, WIDTH] int32, see `logprobs.layout`."""
    row = tl.program_id(0)
    at, listed, b, number = _emitted(parameters, verdicts, sequences, row)
    if at >= 0:
        chunk = tl.arange(0, BLOCK_CHUNKS)
        own = row.to(tl.int64) * chunks + chunk
        top = tl.load(peaks + own * _LISTED, mask=chunk < chunks, other=float("-inf"))
        greatest = tl.max(top, 0)
        mass = tl.load(sums + own, mask=chunk < chunks, other=0.0)
        total = greatest + tl.log(tl.sum(tl.where(mass > 0.0, mass * tl.exp(top - greatest), 0.0), 0))
        # The next token of the path, or the target's own behind it.
        last = number == tl.load(verdicts + b)
        first = row - number
        below = tl.load(verdicts + 2 * sequences + row, mask=last == 0, other=0)
        token = tl.load(token_ids + first + below, mask=last == 0, other=0)
        token = tl.where(last, without_mark(tl.load(verdicts + sequences + b)), token)
        out = found + row * _WIDTH
        x = load_logits(logits, at, row_stride, token, vocabulary)
        tl.store(out, (x - total).to(tl.int32, bitcast=True))
        # Each chunk's greatest that was not listed yet.
        place = tl.zeros([BLOCK_CHUNKS], tl.int32)
        for i in range(listed):
            here = (chunk < chunks) & (place < listed)
            best = tl.load(peaks + own * _LISTED + place, mask=here, other=float("-inf"))
            ids = tl.load(ids_of_chunks + own * _LISTED + place, mask=here, other=_NONE)
            value = tl.max(best, 0)
            token = tl.min(tl.where(best == value, ids, _NONE), 0)
            tl.store(out + _IDS + i, token)
            tl.store(out + _VALUES + i, (value - total).to(tl.int32, bitcast=True))
            place += (ids == token).to(tl.int32)


def gather(
    logits: Tensor,
    token_ids: Tensor,
    parameters: Tensor,
    verdicts: Verdicts,
    found: Tensor,
    vocabulary: int,
    max_sequences: int,
) -> None:
    """See `DeviceLogprobs.gather`. Two launches; scratch is allocated by every call, so that captured graphs share it
    through their pool."""
    rows, chunks, device = len(logits), triton.cdiv(vocabulary, _CHUNK), logits.device
    sums = torch.empty(rows, chunks, device=device)
    peaks = torch.empty(rows, chunks, _LISTED.value, device=device)
    ids = torch.empty(rows, chunks, _LISTED.value, dtype=torch.int32, device=device)
    chunk_kernel[(rows, chunks)](
        logits, logits.stride(0), parameters, verdicts.tensor, max_sequences, sums, peaks, ids, vocabulary, chunks,
        CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    row_kernel[(rows,)](
        logits, logits.stride(0), token_ids, parameters, verdicts.tensor, max_sequences, sums, peaks, ids, found,
        vocabulary, chunks, BLOCK_CHUNKS=max(64, triton.next_power_of_2(chunks)), num_warps=4,
    )  # fmt: skip
