"""Triton: the likeliest token, the distribution and the noise of every row of a verify step.

Words: a *chunk* is CHUNK tokens of a row, one program's share; a *block* is BLOCK tokens of a chunk, which a filter
skips if its greatest logit is too small. Distributions are not normalised: the likeliest token weighs 1. The layout of
a record is that of `verification.records`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.verification import records

_RECORD = tl.constexpr(records.RECORD)
(
    FIRST_ROW, ROWS, MODE, IS_CHAIN, SEED, POSITION, TOP_K, FILTERED, TEMPERATURE, TOP_P, MIN_P, BEGINS, EPSILON, DELTA,
    SHAPING, LOGPROBS, FOLLOWING, ROOM, DRAFTS,
) = map(tl.constexpr, records.PLACES.values())  # fmt: skip
GREEDY, COUPLED, REJECTION, TYPICAL = (tl.constexpr(int(mode)) for mode in records.Mode)
NOT_FINITE = tl.constexpr(records.NOT_FINITE)
# Parts of equal ratio into which a row's weights are divided before the cut of top_p is searched in one of them.
RUNGS = tl.constexpr(16)


@triton.jit
def sequence_of(parameters, row, sequences):  # type: ignore[no-untyped-def]
    """Index of the sequence that a row is verified for, or -1."""
    return tl.load(parameters + sequences * _RECORD + row)


@triton.jit
def record_of(parameters, sequence):  # type: ignore[no-untyped-def]
    """Pointer to a sequence's record."""
    return parameters + sequence * _RECORD


@triton.jit
def load_long(pointer):  # type: ignore[no-untyped-def]
    """The int64 that two int32 hold, low word first. Their address need not be a multiple of 8."""
    low = tl.load(pointer).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(pointer + 1).to(tl.int64) << 32) | low


@triton.jit
def moved_long(low, high, moves):  # type: ignore[no-untyped-def]
    """The low and the high word of an int64 in two int32, moved on by a number of 0 or more."""
    moved = low + moves
    # In two's complement the sum wraps where it goes from a negative number to one that is not.
    return moved, high + tl.where((low < 0) & (moved >= 0), 1, 0)


@triton.jit
def load_double(pointer):  # type: ignore[no-untyped-def]
    """The float64 that two int32 hold."""
    return load_long(pointer).to(tl.float64, bitcast=True)


@triton.jit
def load_logits(logits, row, row_stride, ids, vocabulary):  # type: ignore[no-untyped-def]
    """fp32 logits of a row at token ids; -inf beyond the vocabulary."""
    here = logits + row.to(tl.int64) * row_stride + ids
    return tl.load(here, mask=(ids >= 0) & (ids < vocabulary), other=float("-inf")).to(tl.float32)


@triton.jit
def peak_of(peaks, row, chunks, BLOCK_CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's greatest logit, from those of its chunks, which are stored negated; inf where any logit is NaN."""
    chunk = tl.arange(0, BLOCK_CHUNKS)
    return -tl.min(tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("inf")), 0)


@triton.jit
def without_mark(token):  # type: ignore[no-untyped-def]
    """A token as the next pass reads it, without `NOT_FINITE`."""
    return tl.where(token >= NOT_FINITE, token - NOT_FINITE, token)


@triton.jit
def weight_of(x, ids, peak, temperature, cut, cut_id):  # type: ignore[no-untyped-def]
    """exp((x - peak) / temperature) in fp64, 0 for tokens below the cut or behind `cut_id` at it."""
    weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
    return tl.where((weight > cut) | ((weight == cut) & (ids <= cut_id)), weight, 0.0)


@triton.jit
def cut_of(cuts, cut_ids, row, CUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cut of a row's distribution; without one, that every token passes."""
    cut = tl.full([], 0.0, tl.float64)
    cut_id = tl.full([], -1, tl.int32)
    if CUT:
        cut = tl.load(cuts + row)
        cut_id = tl.load(cut_ids + row)
    return cut, cut_id


@triton.jit
def rungs_of(rung, top_p, vocabulary):  # type: ignore[no-untyped-def]
    """Weights of equal ratios down from the greatest token's 1, the last 0. top_p cuts above the last but one.

    What lies below a weight t sums to less than t times the vocabulary, and all weigh at least 1.
    """
    spread = tl.log(2.0 * vocabulary / (1.0 - top_p)) / (RUNGS - 1)
    return tl.where(rung < RUNGS - 1, tl.exp(-spread * (rung + 1)), 0.0)


@triton.jit
def philox_words(seed, block, middle, domain):  # type: ignore[no-untyped-def]
    """Four uint32 for each block, see `tree_kernels.philox.philox`. block: int32; middle: int64."""
    low = (middle & 0xFFFFFFFF).to(tl.uint32)
    high = ((middle >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, block, low, high, domain)


@triton.jit(do_not_specialize=["sequences", "chunks"])
def peak_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, parents, parameters, sequences, peaks, peak_ids, block_peaks, depths, vocabulary, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BY_BLOCK: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """Likeliest token of each chunk of each row, the lowest id of equals, and the depth of COUPLED and TYPICAL rows.

    peaks [R, chunks] fp32 negated, -inf where any of the chunk's logits is NaN or inf,
    peak_ids [R, chunks] int32, block_peaks [R, chunks * CHUNK / BLOCK] fp32 where
    BY_BLOCK, depths [R] int32 where DEPTHS.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    sequence = sequence_of(parameters, row, sequences)
    if sequence >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits, row, row_stride, ids, vocabulary)
        if BY_BLOCK:
            block = tl.arange(0, CHUNK // BLOCK)
            peak_in_block = tl.max(tl.reshape(x, [CHUNK // BLOCK, BLOCK]), 1)
            tl.store(block_peaks + (row * chunks + chunk) * (CHUNK // BLOCK) + block, peak_in_block)
        # Whether a maximum is NaN where a number is, depends on the device.
        wrong = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        peak = tl.where(wrong > 0, float("inf"), tl.max(x, 0))
        found = tl.min(tl.where((x == peak) & (ids < vocabulary), ids, vocabulary - 1), 0)
        tl.store(peaks + row * chunks + chunk, -peak)
        tl.store(peak_ids + row * chunks + chunk, found)
        if DEPTHS and chunk == 0:
            record = record_of(parameters, sequence)
            first = tl.load(record + FIRST_ROW)
            depth = row - first
            mode = tl.load(record + MODE)
            if ((mode == COUPLED) | (mode == TYPICAL)) & (tl.load(record + IS_CHAIN) == 0):
                at = depth
                depth = at * 0
                # Bounded by the number of rows, so that a malformed tree cannot hang the device.
                while (at > 0) & (depth < row - first):
                    at = tl.load(parents + first + at)
                    depth += 1
            tl.store(depths + row, depth)


@triton.jit(do_not_specialize=["sequences", "chunks"])
def mass_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, parameters, sequences, peaks, masses, vocabulary, chunks,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """masses [R, chunks, RUNGS] fp64: weight of a chunk's tokens at or above each rung, after min_p.

    Only for rows whose top_p is a share of all tokens.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    sequence = sequence_of(parameters, row, sequences)
    if sequence >= 0:
        record = record_of(parameters, sequence)
        filtered = (tl.load(record + FILTERED) > 0) & (tl.load(record + TOP_K) == 0)
        top_p = load_double(record + TOP_P)
        if filtered & (top_p < 1.0):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(logits, row, row_stride, ids, vocabulary)
            peak = peak_of(peaks, row, chunks, BLOCK_CHUNKS)
            weight = weight_of(x, ids, peak, load_double(record + TEMPERATURE), load_double(record + MIN_P), vocabulary)
            rung = tl.arange(0, RUNGS)
            rungs = rungs_of(rung, top_p, vocabulary)
            mass = tl.zeros([RUNGS], tl.float64)
            for i in tl.range(0, RUNGS):
                own = rung == i
                least = tl.sum(tl.where(own, rungs, 0.0), 0)
                mass = tl.where(own, tl.sum(tl.where(weight >= least, weight, 0.0), 0), mass)
            tl.store(masses + (row * chunks + chunk) * RUNGS + rung, mass)
