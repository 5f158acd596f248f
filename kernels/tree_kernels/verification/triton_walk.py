"""Triton: the walk down each sequence's tree, one program a sequence.

Verdicts are those of `verification.dispatch.Verdicts`: accepted counts, next tokens, accepted rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_kernels.verification.triton_rows import (
    BEGINS,
    FIRST_ROW,
    MODE,
    NOT_FINITE,
    POSITION,
    REJECTION,
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
    weight_of,
)
from tree_kernels.verification.triton_scores import NEVER, SUPPORT, load_support, load_tree, put
from tree_kernels.verification.typical import SAME_PATH

_STEP = tl.constexpr(16)
_SAME_PATH = tl.constexpr(SAME_PATH)


@triton.jit
def _choices(  # type: ignore[no-untyped-def]
    scores, winners, peaks, first, rows, vocabulary, chunks, BLOCK_R: tl.constexpr, SAMPLED: tl.constexpr
):
    """[BLOCK_R] int32: of each row the winner of the chunk with the lowest score, the first of equals.

    Marked as NOT_FINITE where the row's greatest logit is no finite number. Unless SAMPLED, scores are the peaks.
    """
    index = tl.arange(0, BLOCK_R)[:, None]
    # Chunks a multiple of _STEP apart meet in one column; columns are compared at the end.
    best = tl.full([BLOCK_R, _STEP], float("inf"), tl.float64)
    winner = tl.full([BLOCK_R, _STEP], 2**31 - 1, tl.int32)
    lowest_peak = best
    for start in tl.range(0, chunks, _STEP):
        chunk = start + tl.arange(0, _STEP)[None, :]
        here = (index < rows) & (chunk < chunks)
        at = (first + index) * chunks + chunk
        score = tl.load(scores + at, mask=here, other=float("inf")).to(tl.float64)
        found = tl.load(winners + at, mask=here, other=2**31 - 1)
        better = (score < best) | ((score == best) & (found < winner))
        best = tl.where(better, score, best)
        winner = tl.where(better, found, winner)
        if SAMPLED:
            peak = tl.load(peaks + at, mask=here, other=float("inf")).to(tl.float64)
            lowest_peak = tl.minimum(lowest_peak, peak)
        else:
            lowest_peak = best
    lowest = tl.min(best, 1)
    choice = tl.minimum(tl.min(tl.where(best == lowest[:, None], winner, 2**31 - 1), 1), vocabulary - 1)
    # Negated: -inf where a logit is NaN or inf, inf where all are -inf.
    peak_of_row = tl.min(lowest_peak, 1)
    return tl.where(tl.abs(peak_of_row) < float("inf"), choice, choice | NOT_FINITE)


@triton.jit
def _match(parent, tokens, choices, accepted_rows, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Follow the rows' own choices. Returns the number of accepted rows and the token after them."""
    index = tl.arange(0, BLOCK_R)
    accepted = tl.full([], 0, tl.int32)
    token = tl.sum(tl.where(index == 0, choices, 0), 0)
    child = tl.min(tl.where((parent == 0) & (tokens == token), index, BLOCK_R), 0)
    while child < BLOCK_R:
        tl.store(accepted_rows + accepted, child)
        accepted += 1
        token = tl.sum(tl.where(index == child, choices, 0), 0)
        child = tl.min(tl.where((parent == child) & (tokens == token), index, BLOCK_R), 0)
    return accepted, token


@triton.jit
def _typical_path(  # type: ignore[no-untyped-def]
    record, parent, tokens, choices, gains, rows, accepted_rows, lossy_rows, BLOCK_R: tl.constexpr
):
    """The longest path of typical rows. Returns the number of accepted rows and the model's own token after them.

    `choices` [BLOCK_R] are the model's own draws after each row; `gains` are those of the sequence's rows.
    """
    index = tl.arange(0, BLOCK_R)
    gain = tl.load(gains + index, mask=(index > 0) & (index < rows), other=NEVER)
    begins = load_long(record + POSITION) == load_long(record + BEGINS)
    own = tl.sum(tl.where(index == 0, choices, 0), 0)
    gain = tl.where(begins & (parent == 0) & (tokens != own), NEVER, gain)
    # Log-probability and depth of each row that typical tokens lead to. Parents come before their children.
    reached = tl.where(index == 0, tl.full([BLOCK_R], 0.0, tl.float64), NEVER)
    depth = tl.zeros([BLOCK_R], tl.int32)
    for row in tl.range(1, rows):
        here = index == row
        above = index == tl.sum(tl.where(here, parent, 0), 0)
        to_here = tl.sum(tl.where(above, reached, 0.0), 0) + tl.sum(tl.where(here, gain, 0.0), 0)
        # Nothing is typical below a row whose logits are no finite numbers.
        to_here = tl.where(tl.sum(tl.where(above, choices, 0), 0) < NOT_FINITE, to_here, NEVER)
        reached = tl.where(here, to_here, reached)
        depth = tl.where(here & (reached > NEVER), tl.sum(tl.where(above, depth, 0), 0) + 1, depth)
    accepted = tl.max(depth, 0)
    likeliest = tl.max(tl.where(depth == accepted, reached, NEVER), 0)
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


@triton.jit
def _coin(seed, stream, number):  # type: ignore[no-untyped-def]
    """The coin of this number: `tree_kernels.philox.uniforms`."""
    a, b, c, d = philox_words(seed, number // 2, stream, 1)
    high = tl.where(number % 2 == 0, a, c).to(tl.int64)
    low = tl.where(number % 2 == 0, b, d).to(tl.int64)
    return (((high >> 5) << 26) + (low >> 6)).to(tl.float64) * 2.0**-53


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits, row, row_stride, peak, temperature, cut, cut_id, sums, coin, support, kept, tokens, alone, kept_alone,
    vocabulary, chunks, BLOCK_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A token of a row's residual: the first at which the sum of weights exceeds the coin's share of them.

    sums [chunks] weigh what is not among support and tokens (`alone`), and come to weigh everything.
    """
    for start in tl.range(0, chunks, _STEP):
        chunk = start + tl.arange(0, _STEP)
        own = (support // CHUNK)[None, :] == chunk[:, None]
        weight = tl.load(sums + chunk, mask=chunk < chunks, other=0.0)
        weight += tl.sum(tl.where(own & (support >= 0)[None, :], kept[None, :], 0.0), 1)
        own = ((tokens // CHUNK)[None, :] == chunk[:, None]) & alone[None, :]
        weight += tl.sum(tl.where(own, kept_alone[None, :], 0.0), 1)
        tl.store(sums + chunk, weight, mask=chunk < chunks)
    tl.debug_barrier()
    chunk = tl.arange(0, BLOCK_CHUNKS)
    weight = tl.load(sums + chunk, mask=chunk < chunks, other=0.0)
    upto = tl.cumsum(weight, 0)
    goal = coin * tl.sum(weight, 0)
    over = tl.min(tl.where((upto > goal) & (weight > 0.0), chunk, BLOCK_CHUNKS), 0)
    # Rounding may carry the coin past the end.
    over = tl.where(over < BLOCK_CHUNKS, over, tl.max(tl.where(weight > 0.0, chunk, 0), 0))
    before = tl.sum(tl.where(chunk == over, upto - weight, 0.0), 0)
    ids = over * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits, row, row_stride, ids, vocabulary)
    weights = weight_of(x, ids, peak, temperature, cut, cut_id)
    weights = put(weights, ids, support, kept, support >= 0, over * CHUNK, CHUNK)
    weights = put(weights, ids, tokens, kept_alone, alone, over * CHUNK, CHUNK)
    found = tl.min(tl.where((before + tl.cumsum(weights, 0) > goal) & (weights > 0.0), ids, vocabulary), 0)
    return tl.where(found < vocabulary, found, tl.max(tl.where(weights > 0.0, ids, 0), 0))


@triton.jit
def _try_children(  # type: ignore[no-untyped-def]
    here, tokens, alone, kept_alone, support, drafted, kept, untouched, seed, stream, coins, BLOCK_R: tl.constexpr
):
    """Accept or reject a row's children in turn.

    Returns the accepted child or BLOCK_R, the residual of the distribution, and the number of coins used. See
    `verification.walks._Residual`, whose arithmetic this repeats.
    """
    index = tl.arange(0, BLOCK_R)
    mass = untouched + tl.sum(kept, 0) + tl.sum(kept_alone, 0)
    match = tl.full([], BLOCK_R, tl.int32)
    child = tl.min(tl.where(here, index, BLOCK_R), 0)
    while child < BLOCK_R:
        token = tl.sum(tl.where(index == child, tokens, 0), 0)
        own = support == token
        point = alone & (index == child)
        share = tl.sum(tl.where(own, drafted, 0), 0)
        in_draft = share > 0
        share = tl.where(in_draft, share, 1).to(tl.float64)
        total = tl.where(in_draft, tl.sum(drafted, 0), 1).to(tl.float64)
        weight = tl.sum(tl.where(own, kept, 0.0), 0) + tl.sum(tl.where(point, kept_alone, 0.0), 0)
        coin = _coin(seed, stream, coins)
        coins += 1
        if coin < weight / (mass * share / total):
            match = child
            child = tl.full([], BLOCK_R, tl.int32)
        else:
            draft_probs = tl.where(in_draft, drafted, 0).to(tl.float64) / total
            left = tl.maximum(kept - mass * draft_probs, 0.0)
            left_alone = tl.maximum(kept_alone - mass * tl.where(point, 1.0, 0.0), 0.0)
            left_mass = untouched + tl.sum(left, 0) + tl.sum(left_alone, 0)
            # Equal distributions reject no draft except by rounding: then the distribution is kept.
            some = left_mass > 0.0
            kept = tl.where(some, left, kept)
            kept_alone = tl.where(some, left_alone, kept_alone)
            mass = tl.where(some, left_mass, mass)
            # Without replacement: the next sibling was drawn from the rest.
            drafted = tl.where(own, 0, drafted)
            child = tl.min(tl.where(here & (index > child), index, BLOCK_R), 0)
    return match, kept, kept_alone, coins


@triton.jit
def _reject(  # type: ignore[no-untyped-def]
    logits, row_stride, record, parent, tokens, distributions, distribution_rows, peaks, cuts, cut_ids, scores,
    accepted_rows, vocabulary, chunks, BLOCK_CHUNKS: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr,
    CUT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Recursive rejection. Returns the number of accepted rows and the token after them."""
    first = tl.load(record + FIRST_ROW)
    seed = load_long(record + SEED)
    stream = load_long(record + POSITION)
    temperature = load_double(record + TEMPERATURE)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    accepted = tl.full([], 0, tl.int32)
    coins = tl.full([], 0, tl.int32)
    at = tl.full([], 0, tl.int32)
    token = tl.full([], -1, tl.int32)
    while at < BLOCK_R:
        row = first + at
        peak = peak_of(peaks, row, chunks, BLOCK_CHUNKS)
        if tl.abs(peak) == float("inf"):
            token = tl.full([], NOT_FINITE, tl.int32)
            at = tl.full([], BLOCK_R, tl.int32)
        else:
            cut, cut_id = cut_of(cuts, cut_ids, row, CUT)
            here = parent == at
            alone = here
            support = tl.full([SUPPORT], -1, tl.int32)
            drafted = tl.full([SUPPORT], 0, tl.int32)
            if DRAWN:
                support, drafted = load_support(distributions, row, distribution_rows)
                twice = (tokens[:, None] == support[None, :]).to(tl.int32)
                alone = here & (tl.sum(twice, 1) == 0)
            x = load_logits(logits, row, row_stride, support, vocabulary)
            kept = tl.where(support >= 0, weight_of(x, support, peak, temperature, cut, cut_id), 0.0)
            x = load_logits(logits, row, row_stride, tl.where(alone, tokens, -1), vocabulary)
            kept_alone = tl.where(alone, weight_of(x, tokens, peak, temperature, cut, cut_id), 0.0)
            sums = scores + row * chunks
            untouched = tl.sum(tl.load(sums + chunk, mask=chunk < chunks, other=0.0), 0)
            at, kept, kept_alone, coins = _try_children(
                here, tokens, alone, kept_alone, support, drafted, kept, untouched, seed, stream, coins, BLOCK_R
            )
            if at < BLOCK_R:
                tl.store(accepted_rows + accepted, at)
                accepted += 1
            else:
                token = _draw(
                    logits, row, row_stride, peak, temperature, cut, cut_id, sums, _coin(seed, stream, coins), support,
                    kept, tokens, alone, kept_alone, vocabulary, chunks, BLOCK_CHUNKS, CHUNK,
                )  # fmt: skip
    return accepted, token


@triton.jit(do_not_specialize=["sequences", "distribution_rows", "chunks"])
def walk_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, token_ids, parents, parameters, sequences, distributions, distribution_rows, peaks, cuts,
    cut_ids, scores, winners, gains, verdicts, lossy_rows, vocabulary, chunks, BLOCK_CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr, CHUNK: tl.constexpr, SAMPLED: tl.constexpr, CUT: tl.constexpr, DRAWN: tl.constexpr,
    TYPICAL_ROWS: tl.constexpr,
):  # fmt: skip
    """verdicts [2 * sequences + rows] int32, from the rows' scores and winners; of TYPICAL rows also lossy_rows [rows]
    int32, from their gains."""
    sequence = tl.program_id(0)
    record = record_of(parameters, sequence)
    first = tl.load(record + FIRST_ROW)
    rows = tl.load(record + ROWS)
    accepted = tl.full([], 0, tl.int32)
    token = tl.full([], -1, tl.int32)
    if rows > 0:
        parent, tokens = load_tree(token_ids, parents, record, BLOCK_R)
        accepted_rows = verdicts + 2 * sequences + first
        drawn = False
        if SAMPLED:
            drawn = tl.load(record + MODE) == REJECTION
        if drawn:
            accepted, token = _reject(
                logits, row_stride, record, parent, tokens, distributions, distribution_rows, peaks, cuts, cut_ids,
                scores, accepted_rows, vocabulary, chunks, BLOCK_CHUNKS, BLOCK_R, CHUNK, CUT, DRAWN,
            )  # fmt: skip
        else:
            choices = _choices(scores, winners, peaks, first, rows, vocabulary, chunks, BLOCK_R, SAMPLED)
            if TYPICAL_ROWS:
                if tl.load(record + MODE) == TYPICAL:
                    accepted, token = _typical_path(
                        record, parent, tokens, choices, gains + first, rows, accepted_rows, lossy_rows + first, BLOCK_R
                    )
                else:
                    accepted, token = _match(parent, tokens, choices, accepted_rows, BLOCK_R)
            else:
                accepted, token = _match(parent, tokens, choices, accepted_rows, BLOCK_R)
    tl.store(verdicts + sequence, accepted)
    tl.store(verdicts + sequences + sequence, token)
