"""Triton: which drafted rows are typical, and the walk over them; see `verification.typical`."""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.verification.triton_rows import (
    BEGINS,
    DELTA,
    EPSILON,
    FIRST_ROW,
    IS_CHAIN,
    MODE,
    POSITION,
    TEMPERATURE,
    TYPICAL,
    cut_of,
    load_double,
    load_logits,
    load_long,
    peak_of,
    record_of,
    sequence_of,
    weight_of,
)
from tree_kernels.verification.typical import SAME_PATH

_SAME_PATH = tl.constexpr(SAME_PATH)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["sequences", "chunks"])
def moment_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    parameters,
    sequences,
    peaks,
    cuts,
    cut_ids,
    moments,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CUT: tl.constexpr,
):
    """moments [R, chunks, 2] fp64: of a chunk's weights w the sums of w and of w * log w. Only for TYPICAL rows."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    sequence = sequence_of(parameters, row, sequences)
    if sequence >= 0:
        record = record_of(parameters, sequence)
        if tl.load(record + MODE) == TYPICAL:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(logits, row, row_stride, ids, vocabulary)
            peak = peak_of(peaks, row, chunks, BLOCK_CHUNKS)
            temperature = load_double(record + TEMPERATURE)
            cut, cut_id = cut_of(cuts, cut_ids, row, CUT)
            weight = weight_of(x, ids, peak, temperature, cut, cut_id)
            shifted = (x.to(tl.float64) - peak.to(tl.float64)) / temperature
            at = moments + 2 * (row * chunks + chunk)
            tl.store(at, tl.sum(weight, 0))
            tl.store(at + 1, tl.sum(tl.where(weight > 0.0, weight * shifted, 0.0), 0))


@triton.jit(do_not_specialize=["sequences", "chunks"])
def gain_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    token_ids,
    parents,
    parameters,
    sequences,
    peaks,
    cuts,
    cut_ids,
    moments,
    gains,
    vocabulary,
    chunks,
    BLOCK_CHUNKS: tl.constexpr,
    CUT: tl.constexpr,
):
    """gains [R] fp64: the log-probability of a drafted row's token after its parent; -inf where it is not typical.

    Below a root whose next token is the first that the model generates, none is left out: the walk takes the row of
    the model's own draw. Only for TYPICAL rows.
    """
    row = tl.program_id(0)
    sequence = sequence_of(parameters, row, sequences)
    if sequence >= 0:
        record = record_of(parameters, sequence)
        first = tl.load(record + FIRST_ROW)
        if (tl.load(record + MODE) == TYPICAL) & (row > first):
            above = row - 1
            if tl.load(record + IS_CHAIN) == 0:
                above = first + tl.load(parents + row)
            chunk = tl.arange(0, BLOCK_CHUNKS)
            at = moments + 2 * (above * chunks + chunk)
            mass = tl.sum(tl.load(at, mask=chunk < chunks, other=0.0), 0)
            weighted = tl.sum(tl.load(at + 1, mask=chunk < chunks, other=0.0), 0)
            # -sum p log p, where p = w / mass.
            entropy = tl.log(mass) - weighted / mass
            least = tl.minimum(load_double(record + EPSILON), load_double(record + DELTA) * tl.exp(-entropy))
            peak = peak_of(peaks, above, chunks, BLOCK_CHUNKS)
            cut, cut_id = cut_of(cuts, cut_ids, above, CUT)
            token = tl.load(token_ids + row)
            x = load_logits(logits, above, row_stride, token, vocabulary)
            probability = weight_of(x, token, peak, load_double(record + TEMPERATURE), cut, cut_id) / mass
            begins = (above == first) & (load_long(record + POSITION) == load_long(record + BEGINS))
            kept = (probability > least) | (begins & (probability > 0.0))
            tl.store(gains + row, tl.where(kept, tl.log(probability), _NEVER))


@triton.jit
def typical_path(  # type: ignore[no-untyped-def]
    record, parent, tokens, choices, gains, rows, accepted_rows, lossy_rows, BLOCK_R: tl.constexpr
):
    """The longest path of typical rows. Returns the number of accepted rows and the model's own token after them.

    `choices` [BLOCK_R] are the model's own draws after each row; `gains` are those of the sequence's rows.
    """
    index = tl.arange(0, BLOCK_R)
    gain = tl.load(gains + index, mask=(index > 0) & (index < rows), other=_NEVER)
    begins = load_long(record + POSITION) == load_long(record + BEGINS)
    own = tl.sum(tl.where(index == 0, choices, 0), 0)
    gain = tl.where(begins & (parent == 0) & (tokens != own), _NEVER, gain)
    # Log-probability and depth of each row that typical tokens lead to. Parents come before their children.
    reached = tl.where(index == 0, tl.full([BLOCK_R], 0.0, tl.float64), _NEVER)
    depth = tl.zeros([BLOCK_R], tl.int32)
    for row in tl.range(1, rows):
        here = index == row
        above = index == tl.sum(tl.where(here, parent, 0), 0)
        to_here = tl.sum(tl.where(above, reached, 0.0), 0) + tl.sum(tl.where(here, gain, 0.0), 0)
        reached = tl.where(here, to_here, reached)
        depth = tl.where(here & (reached > _NEVER), tl.sum(tl.where(above, depth, 0), 0) + 1, depth)
    accepted = tl.max(depth, 0)
    likeliest = tl.max(tl.where(depth == accepted, reached, _NEVER), 0)
    at = tl.min(tl.where((depth == accepted) & (reached > likeliest - _SAME_PATH), index, BLOCK_R), 0)
    token = tl.sum(tl.where(index == at, choices, 0), 0)
    place = accepted
    while place > 0:
        place -= 1
        above = tl.sum(tl.where(index == at, parent, 0), 0)
        drafted = tl.sum(tl.where(index == at, tokens, 0), 0)
        own = tl.sum(tl.where(index == above, choices, 0), 0)
        tl.store(accepted_rows + place, at)
        tl.store(lossy_rows + place, (drafted != own).to(tl.int32))
        at = above
    return accepted, token
