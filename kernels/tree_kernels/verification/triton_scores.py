"""Triton: the Gumbel-max draw of COUPLED and TYPICAL rows, which of the latter are typical (see
`verification.typical`), and the weight of REJECTION rows without the draft's tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.verification.records import MAX_SUPPORT
from tree_kernels.verification.triton_rows import (
    BEGINS,
    COUPLED,
    DELTA,
    EPSILON,
    FIRST_ROW,
    GREEDY,
    IS_CHAIN,
    MODE,
    POSITION,
    ROWS,
    SEED,
    TEMPERATURE,
    TYPICAL,
    cut_of,
    load_double,
    load_logits,
    load_long,
    peak_of,
    philox_words,
    record_of,
    sequence_of,
    weight_of,
)

SUPPORT = tl.constexpr(MAX_SUPPORT)
# fp32 scores are accurate to 1e-4 where a token can win at all; what they cannot separate is decided in fp64.
_MARGIN = tl.constexpr(1e-3)
_NONE = tl.constexpr(2**31 - 1)
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def put(weights, ids, tokens, values, here, low, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replace the weights of tokens [n] by values [n], where `here`; `ids` are CHUNK consecutive ones from `low`."""
    left = here & (tokens >= low) & (tokens < low + CHUNK)
    token = tl.min(tl.where(left, tokens, _NONE), 0)
    while token < _NONE:
        value = tl.sum(tl.where(left & (tokens == token), values, 0.0), 0)
        weights = tl.where(ids == token, value, weights)
        left = left & (tokens != token)
        token = tl.min(tl.where(left, tokens, _NONE), 0)
    return weights


@triton.jit
def load_tree(token_ids, parents, record, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Parents and tokens [BLOCK_R] of a sequence's rows; -1 is the parent of the root and of absent rows."""
    first = tl.load(record + FIRST_ROW)
    index = tl.arange(0, BLOCK_R)
    below = (index > 0) & (index < tl.load(record + ROWS))
    parent = tl.load(parents + first + index, mask=below, other=-1)
    parent = tl.where(below & (tl.load(record + IS_CHAIN) > 0), index - 1, parent)
    return parent, tl.load(token_ids + first + index, mask=below, other=-1)


@triton.jit
def load_support(distributions, row, rows):  # type: ignore[no-untyped-def]
    """Token ids and weights [SUPPORT] of a row's distribution; -1 and 0 behind its end."""
    start = tl.load(distributions + row)
    slot = tl.arange(0, SUPPORT)
    here = slot < tl.load(distributions + row + 1) - start
    pair = distributions + rows + 1 + 2 * (start + slot)
    return tl.load(pair, mask=here, other=-1), tl.load(pair + 1, mask=here, other=0)


@triton.jit
def _words(seed, low, position, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[CHUNK] uint32: the draw's word of CHUNK consecutive tokens from `low`."""
    blocks = low // 4 + tl.arange(0, CHUNK // 4)
    a, b, c, d = philox_words(seed, blocks, position, 0)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [CHUNK])


@triton.jit
def _rough_exponential(words):  # type: ignore[no-untyped-def]
    """E in fp32, with a relative error of 2e-5: a series for small u, and elsewhere the logarithm of 1 - u."""
    u = (words.to(tl.float32) + 0.5) * 2.0**-32
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    small = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return tl.where(u < 0.015625, small, -tl.log(rest))


@triton.jit
def _gumbel_max(x, ids, words, peak, temperature, cut, cut_id, vocabulary):  # type: ignore[no-untyped-def]
    """Lowest score E / weight of a chunk, in fp64, and the lowest token that has it."""
    shifted = tl.where(x == peak, 0.0, (x - peak) / tl.maximum(temperature, 1e-30).to(tl.float32))
    # Where every logit is -inf, so is the peak: those logits, and ids beyond the vocabulary, equal it.
    kept = (shifted > float("-inf")) & (x > float("-inf"))
    if cut > 0.0:
        highest = tl.max(shifted, 0)
        if highest + _MARGIN - highest * 1e-6 < tl.log(cut).to(tl.float32):
            # Most chunks have nothing near the cut, and need no fp64.
            kept = kept & (ids < 0)
        else:
            kept = weight_of(x, ids, peak, temperature, cut, cut_id) > 0.0
    rough = tl.where(kept, shifted - tl.log(_rough_exponential(words)), float("-inf"))
    best = tl.full([], float("inf"), tl.float64)
    winner = vocabulary - 1
    floor = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.max(rough, 0)
    # Nearly always one turn: that of the winner.
    while (likeliest > float("-inf")) & (likeliest >= floor):
        token = tl.min(tl.where(rough == likeliest, ids, vocabulary - 1), 0)
        own = ids == token
        word = tl.sum(tl.where(own, words.to(tl.int64), 0), 0)
        logit = tl.sum(tl.where(own, x, 0.0), 0)
        weight = weight_of(logit, token, peak, temperature, cut, cut_id)
        # 1 - u is exact in fp64, so that its logarithm is log1p(-u).
        noise = -tl.log(1.0 - (word.to(tl.float64) + 0.5) * 2.0**-32)
        score = tl.where(weight > 0.0, noise / weight, float("inf"))
        better = (score < best) | ((score == best) & (token < winner))
        winner = tl.where(better & (weight > 0.0), token, winner)
        floor = tl.where((weight > 0.0) & (best == float("inf")), likeliest - _MARGIN, floor)
        best = tl.minimum(best, score)
        rough = tl.where(own, float("-inf"), rough)
        likeliest = tl.max(rough, 0)
    return best, winner


@triton.jit(do_not_specialize=["sequences", "distribution_rows", "chunks"])
def score_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, token_ids, parents, parameters, sequences, distributions, distribution_rows, peaks, peak_ids,
    depths, cuts, cut_ids, scores, winners, vocabulary, chunks,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_R: tl.constexpr, CUT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """scores [R, chunks] fp64 and winners [R, chunks] int32; of REJECTION rows the scores are weights.

    The lowest score of a row is its choice: of GREEDY the negated logit, else the time of the exponential race. A
    REJECTION chunk's weight leaves out the row's children and its distribution, which the walk keeps itself: what
    remains of the distribution after subtraction can be as small as rounding, so it must not be found by subtracting
    from a sum.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    sequence = sequence_of(parameters, row, sequences)
    if sequence >= 0:
        record = record_of(parameters, sequence)
        mode = tl.load(record + MODE)
        at = row * chunks + chunk
        if mode == GREEDY:
            tl.store(scores + at, tl.load(peaks + at).to(tl.float64))
            tl.store(winners + at, tl.load(peak_ids + at))
        else:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(logits, row, row_stride, ids, vocabulary)
            peak = peak_of(peaks, row, chunks, BLOCK_CHUNKS)
            temperature = load_double(record + TEMPERATURE)
            cut, cut_id = cut_of(cuts, cut_ids, row, CUT)
            if (mode == COUPLED) | (mode == TYPICAL):
                position = load_long(record + POSITION) + tl.load(depths + row)
                words = _words(load_long(record + SEED), chunk * CHUNK, position, CHUNK)
                best, winner = _gumbel_max(x, ids, words, peak, temperature, cut, cut_id, vocabulary)
                tl.store(scores + at, best)
                tl.store(winners + at, winner)
            else:
                weights = weight_of(x, ids, peak, temperature, cut, cut_id)
                parent, tokens = load_tree(token_ids, parents, record, BLOCK_R)
                children = parent == row - tl.load(record + FIRST_ROW)
                nothing = tl.zeros([BLOCK_R], tl.float64)
                weights = put(weights, ids, tokens, nothing, children, chunk * CHUNK, CHUNK)
                if DRAWN:
                    support, drafted = load_support(distributions, row, distribution_rows)
                    nothing = tl.zeros([SUPPORT], tl.float64)
                    weights = put(weights, ids, support, nothing, drafted > 0, chunk * CHUNK, CHUNK)
                tl.store(scores + at, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["sequences", "chunks"])
def moment_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, parameters, sequences, peaks, cuts, cut_ids, moments, vocabulary, chunks,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
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
    logits, row_stride, token_ids, parents, parameters, sequences, peaks, cuts, cut_ids, moments, gains,
    vocabulary, chunks, BLOCK_CHUNKS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
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
            tl.store(gains + row, tl.where(kept, tl.log(probability), NEVER))
