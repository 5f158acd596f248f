"""The best children of every row in two launches, or of a Gumbel-max draw; symbols are those of `growth.types`.

A *chunk* is CHUNK logits of a row, one program's share. A *rank* is an int64 of a logit and its id: the greater logit
has the greater rank, and of equals the lower id, so that one maximum finds both. A *record* is what is found of a
chunk, BEST + 1 int64: its best ranks, then two fp32, the greatest logit / temperature and the sum of exponentials
relative to it. Where processes share a vocabulary, records of all their chunks are joined between the launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.conditional_launch import conditional_launch
from tree_kernels.dependent_launch import dependent_launch
from tree_kernels.growth.types import Children, GumbelMax, VocabularyRanks
from tree_kernels.triton_condition import is_wanted
from tree_kernels.verification.triton_rows import philox_words

_CHUNK = 1024
_LEAST = tl.constexpr(1e-30)
_LOW = tl.constexpr(2**32 - 1)
_LEAST_RANK = tl.constexpr(-(2**63))
# They differ from level to level and from batch to batch; specializing kernels on them would gain nothing.
_NUMBERS = ["rows_each", "level", "known", "chunks", "vocabulary", "first", "condition"]


@triton.jit
def _ranked(value, ids):  # type: ignore[no-untyped-def]
    """Ranks of fp32 values and their ids."""
    bits = value.to(tl.int32, bitcast=True)
    # As integers the bits of negative numbers rise while the numbers fall.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (ids.to(tl.int64) ^ _LOW)


@triton.jit
def _unranked(rank):  # type: ignore[no-untyped-def]
    """Values fp32 and ids of ranks."""
    ordered = (rank >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), ((rank & _LOW) ^ _LOW).to(tl.int32)


@triton.jit
def _best_ranks(ranks, BEST: tl.constexpr, BLOCK_BEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_BEST], of which the first BEST are the greatest of some ranks, falling."""
    place = tl.arange(0, BLOCK_BEST)
    found = tl.zeros([BLOCK_BEST], tl.int64) + _LEAST_RANK
    for best in tl.range(0, BEST):
        highest = tl.max(ranks, 0)
        found = tl.where(place == best, highest, found)
        ranks = tl.where(ranks == highest, _LEAST_RANK, ranks)
    return found


@triton.jit(do_not_specialize=_NUMBERS)
def _scan_kernel(  # type: ignore[no-untyped-def]
    logits, temperatures, records, numbers, condition, vocabulary, first, rows_each, row_stride, BEST: tl.constexpr,
    BLOCK_BEST: tl.constexpr, CHUNK: tl.constexpr, CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): its record, in `records` and, of fp32, `numbers`, which are the same memory. Ids begin at
    `first`."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < vocabulary, other=float("-inf"))
    x = x.to(tl.float32) / tl.load(temperatures + row // rows_each)
    peak = tl.max(x, 0)
    # -inf - -inf is NaN, and all of a chunk may be -inf.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    own = (row * tl.num_programs(1) + chunk) * (BEST + 1)
    tl.store(numbers + 2 * (own + BEST), peak)
    tl.store(numbers + 2 * (own + BEST) + 1, tl.sum(tl.exp(x - base), 0))
    if BEST > 0:
        place = tl.arange(0, BLOCK_BEST)
        tl.store(records + own + place, _best_ranks(_ranked(x, first + ids), BEST, BLOCK_BEST), mask=place < BEST)


@triton.jit
def _log_mass(numbers, row, chunks, BEST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logarithm of the sum of a row's exponentials."""
    chunk = tl.arange(0, BLOCK)
    at = numbers + 2 * ((row * chunks + chunk) * (BEST + 1) + BEST)
    peak = tl.load(at, mask=chunk < chunks, other=float("-inf"))
    mass = tl.load(at + 1, mask=chunk < chunks, other=0.0)
    highest = tl.max(peak, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    return base + tl.log(tl.sum(mass * tl.exp(peak - base), 0))


@triton.jit(do_not_specialize=_NUMBERS)
def _likeliest_kernel(  # type: ignore[no-untyped-def]
    records, numbers, token_ids, tokens, scores, condition, vocabulary, chunks, WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, MAPPED: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    CONDITIONAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program row: the WIDTH best of what its chunks found."""
    row = tl.program_id(0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    index = tl.arange(0, BLOCK)
    here = index < chunks * WIDTH
    at = (row * chunks + index // WIDTH) * (WIDTH + 1) + index % WIDTH
    rank = tl.where(here, tl.load(records + at, mask=here, other=0), _LEAST_RANK)
    log_mass = _log_mass(numbers, row, chunks, WIDTH, BLOCK_CHUNKS)
    value, token = _unranked(_best_ranks(rank, WIDTH, BLOCK_WIDTH))
    place = tl.arange(0, BLOCK_WIDTH)
    # Behind the vocabulary's end stand the ids of -inf.
    token = tl.minimum(token, vocabulary - 1)
    if MAPPED:
        token = tl.load(token_ids + token, mask=place < WIDTH, other=0)
    prob = tl.exp(value - log_mass)
    to = row * WIDTH + place
    tl.store(tokens + to, token, mask=place < WIDTH)
    # Written so that NaN is no child.
    tl.store(scores + to, tl.where(prob > 0.0, prob, 0.0).to(tl.float64), mask=place < WIDTH)


@triton.jit
def _filter(prob, place, known, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """Falling probabilities fp64 after a request's filters, which of them stay, and the probability of the rest."""
    first = tl.max(prob, 0)
    stays = (place < tl.where(top_k > 0, tl.minimum(top_k, known), known)) & (prob + first > 0.0)
    stays = stays & ((prob >= min_p * first) | (place == 0))
    count = tl.sum(stays.to(tl.int32), 0)
    total = tl.where(count < known, tl.sum(tl.where(stays, prob, 0.0), 0), 1.0)
    before = tl.cumsum(prob, 0) - prob
    # No sum of probabilities comes near 2.
    stays = stays & ((before < tl.where(top_p >= 1.0, 2.0, top_p * total)) | (place == 0))
    count = tl.sum(stays.to(tl.int32), 0)
    mass = tl.sum(tl.where(stays, prob, 0.0), 0)
    rest = tl.where(count < known, 0.0, tl.maximum(1.0 - mass, 0.0))
    rest = tl.where(count == 0, 1.0, rest)
    scale = tl.where((count < known) & (count > 0), mass, 1.0)
    return prob / scale, stays, rest


@triton.jit(do_not_specialize=_NUMBERS)
def _gumbel_max_kernel(  # type: ignore[no-untyped-def]
    numbers, values, places, token_ids, temperatures, coupled, top_k, top_p, min_p, seeds, positions, tokens,
    scores, condition, chunks, known, level, rows_each, sharpness, WIDTH: tl.constexpr, SHARP: tl.constexpr,
    MAPPED: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, CONDITIONAL: tl.constexpr,
):  # fmt: skip
    """Program row: the WIDTH best chances among its `known` likeliest, whose logits fall. SHARP is a sharpness of 1."""
    if CONDITIONAL:  # noqa: SIM102  one is known to the compiler, the other is not
        if not is_wanted(condition):
            return
    row = tl.program_id(0)
    b = row // rows_each
    log_mass = _log_mass(numbers, row, chunks, 0, BLOCK_CHUNKS)
    index = tl.arange(0, BLOCK)
    here = index < known
    value = tl.load(values + row * known + index, mask=here, other=float("-inf")).to(tl.float32)
    token = tl.load(places + row * known + index, mask=here, other=0).to(tl.int32)
    if MAPPED:
        token = tl.load(token_ids + token, mask=here, other=0)
    own = tl.exp(value / tl.load(temperatures + b) - log_mass)
    # Written so that NaN counts as impossible, too.
    own = tl.where(here & (own > 0.0), own, 0.0).to(tl.float64)
    prob, stays, rest = _filter(own, index, known, tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b))
    w0, w1, w2, w3 = philox_words(tl.load(seeds + b), token // 4, tl.load(positions + b) + level - 1, 0)
    lane = token % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    noise = -tl.log(1.0 - (word.to(tl.float64) + 0.5) * 2.0**-32)
    weight = tl.maximum(prob, _LEAST) / noise
    rest = tl.maximum(rest, _LEAST)
    if not SHARP:
        weight = tl.exp(tl.log(weight) * sharpness)
        rest = tl.exp(tl.log(rest) * sharpness)
    weight = tl.where(stays, weight, 0.0)
    chance = tl.where(tl.load(coupled + b) > 0, weight / (rest + tl.sum(weight, 0)), own)
    for best in tl.range(0, WIDTH):
        highest = tl.max(chance, 0)
        at = tl.min(tl.where(chance == highest, index, BLOCK - 1), 0)
        tl.store(tokens + row * WIDTH + best, tl.sum(tl.where(index == at, token, 0), 0))
        tl.store(scores + row * WIDTH + best, tl.maximum(highest, 0.0))
        chance = tl.where(index == at, -1.0, chance)


def _scan(logits: Tensor, temperatures: Tensor, best: int, ranks: VocabularyRanks | None) -> Tensor:
    """[R, chunks, best + 1] int64, the records of every chunk."""
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    records = torch.empty(rows, chunks, best + 1, dtype=torch.int64, device=logits.device)
    _scan_kernel[(rows, chunks)](
        logits, temperatures, records, records.view(torch.float32), vocabulary=vocabulary,
        first=0 if ranks is None else ranks.rank * vocabulary, rows_each=rows // len(temperatures),
        row_stride=logits.stride(0), BEST=best, BLOCK_BEST=triton.next_power_of_2(max(1, best)), CHUNK=_CHUNK,
        num_warps=4, **conditional_launch(logits), **dependent_launch(logits.device),
    )  # fmt: skip
    return records


def _empty(rows: int, width: int, device: torch.device) -> Children:
    return Children(
        torch.empty(rows, width, dtype=torch.int32, device=device),
        torch.empty(rows, width, dtype=torch.float64, device=device),
    )


def likeliest(
    logits: Tensor,
    temperatures: Tensor,
    width: int,
    token_ids: Tensor | None,
    ranks: VocabularyRanks | None = None,
) -> Children:
    """See `growth.likeliest`."""
    records, vocabulary = _scan(logits, temperatures, width, ranks), logits.shape[1]
    if ranks is not None:
        records = ranks.joined(records.flatten(1)).view(len(logits), -1, width + 1)
        vocabulary *= ranks.size
    (rows, chunks, _), found = records.shape, _empty(len(logits), width, logits.device)
    _likeliest_kernel[(rows,)](
        records, records.view(torch.float32), token_ids, found.tokens, found.scores, vocabulary=vocabulary,
        chunks=chunks, WIDTH=width, BLOCK_WIDTH=triton.next_power_of_2(width), MAPPED=token_ids is not None,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks), BLOCK=triton.next_power_of_2(chunks * width), num_warps=4,
        **conditional_launch(logits), **dependent_launch(logits.device),
    )  # fmt: skip
    return found


def gumbel_max_winners(
    logits: Tensor,
    temperatures: Tensor,
    width: int,
    token_ids: Tensor | None,
    gumbel_max: GumbelMax,
    level: int,
    entrants: int,
    sharpness: float,
    ranks: VocabularyRanks | None = None,
) -> Children:
    """See `growth.gumbel_max_winners`."""
    records = _scan(logits, temperatures, 0, ranks)
    # Temperature does not change the order.
    values, places = logits.topk(min(entrants, logits.shape[1]), dim=-1)
    if ranks is not None:
        records, values, places = _joined(records, values, places + ranks.rank * logits.shape[1], entrants, ranks)
    (rows, chunks, _), found = records.shape, _empty(len(logits), width, logits.device)
    _gumbel_max_kernel[(rows,)](
        records.view(torch.float32), values, places, token_ids, temperatures, *gumbel_max, found.tokens, found.scores,
        chunks=chunks, known=values.shape[1], level=level, rows_each=rows // len(temperatures), sharpness=sharpness,
        WIDTH=width, SHARP=sharpness == 1.0, MAPPED=token_ids is not None,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks), BLOCK=triton.next_power_of_2(values.shape[1]), num_warps=4,
        **conditional_launch(logits),
    )  # fmt: skip
    return found


def _joined(
    records: Tensor, values: Tensor, places: Tensor, entrants: int, ranks: VocabularyRanks
) -> tuple[Tensor, Tensor, Tensor]:
    """Records [R, chunks, 1] of all ranks, and of the likeliest [R, M] of each, values and int64 places, those of
    all."""
    (rows, known), bits = values.shape, values.float().view(torch.int32).long()
    parts = ranks.joined(torch.cat([records.flatten(1), bits, places], dim=1)).view(rows, ranks.size, -1)
    values = parts[..., -2 * known : -known].flatten(1).int().view(torch.float32)
    values, best = values.topk(min(entrants, ranks.size * known), dim=-1)
    records = parts[..., : -2 * known].flatten(1)[..., None].contiguous()
    return records, values, parts[..., -known:].flatten(1).gather(1, best)
