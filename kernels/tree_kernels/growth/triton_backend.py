"""A level of growing trees, and the best of their items, in one launch each; symbols are those of `growth.types`.

Places are found by counting better items, ties going to the lower index, so that no program waits for another and none
sorts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tree_kernels.dependent_launch import dependent_launch
from tree_kernels.growth.types import MASS_UNITS, Children, Growth

# Items of a program, and those that it compares them with at a time. One sequence has few programs, each of which waits
# for its loads once a round: with 64 and 64 a level took up to 8.9 us on an H200, and keeping the best of a tree 15.
_ITEMS, _RIVALS = 16, 256
_MASS_UNITS = tl.constexpr(MASS_UNITS)
# They differ from level to level and from batch to batch; specializing kernels on them would gain nothing.
_NUMBERS = ["sequences", "items", "begin", "level", "levels", "row", "rows", "tail", "floor", "least_mass"]


@triton.jit
def _offered(  # type: ignore[no-untyped-def]
    frontier_path_probs, scores, b, item, floor, wanted, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    BREADTH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Path probability and score of new items, fp64. The former is 0 where there is no child, or where none is
    `wanted`, and -1 behind the last item."""
    here = item < PLACES * BREADTH
    score = tl.load(scores + b * PLACES * BREADTH + item, mask=here & (wanted + 0 * item > 0), other=0.0)
    above = tl.full(item.shape, 1.0, tl.float64)
    if DEEP:
        above = tl.load(frontier_path_probs + b * WIDTH + item // BREADTH, mask=here, other=0.0)
    there = (score > 0.0) & (above * score >= floor) & (above > 0.0)
    score = tl.minimum(score, 1.0)
    return tl.where(here, tl.where(there, above * score, 0.0), -1.0), score


@triton.jit
def _weigh(worth, limits, path_prob, b, sequences, level, least_mass):  # type: ignore[no-untyped-def]
    """Add a program's part of what the next level is worth: the fp64 path probabilities of what that expands, less the
    least mass, once for a tree that grows."""
    own = tl.sum((path_prob * _MASS_UNITS + 0.5).to(tl.int32), 0)
    if tl.program_id(1) == 0:
        grows = (tl.load(limits + b) > 0) & (tl.load(limits + sequences + b) > level)
        own -= tl.where(grows, least_mass, 0)
    tl.atomic_add(worth + level + 1, own, sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def _grow_kernel(  # type: ignore[no-untyped-def]
    item_tokens, item_parents, item_path_probs, item_scores, frontier, frontier_path_probs, next_frontier,
    next_path_probs, next_tokens, sources, tokens, scores, limits, tail_parents, worth, sequences, items, begin, level,
    levels, row, tail, floor, least_mass, PLACES: tl.constexpr, WIDTH: tl.constexpr, BREADTH: tl.constexpr,
    LAST: tl.constexpr, DEEP: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_W: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block): BLOCK new items of a tree, and the places in the next frontier that they take.
    DEEP is any level but the first; WEIGHED, it may be left out. `least_mass` is in parts of MASS_UNITS."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = item < PLACES * BREADTH
    # One for each item: in the interpreter a mask is no scalar.
    wanted = 1
    if WEIGHED and DEEP:
        wanted = tl.load(worth + level, cache_modifier=".cg")
    path_prob, score = _offered(frontier_path_probs, scores, b, item, floor, wanted, PLACES, WIDTH, BREADTH, DEEP)
    token = tl.load(tokens + b * PLACES * BREADTH + item, mask=here & (wanted + 0 * item > 0), other=0)
    at = b * items + begin + item
    tl.store(item_tokens + at, token, mask=here)
    tl.store(item_path_probs + at, path_prob, mask=here)
    tl.store(item_scores + at, score.to(tl.float32), mask=here)
    if DEEP:
        tl.store(item_parents + at, tl.load(frontier + b * WIDTH + item // BREADTH, mask=here, other=0), mask=here)
    if WEIGHED:  # noqa: SIM102  one is known to the compiler, the other is not
        # Sums begin at zero: the first level prepares the last one's, and each that of the level before it, which
        # nothing reads any more.
        if (b == 0) & (tl.program_id(1) == 0):
            tl.store(worth + tl.where(level > 1, level - 1, levels), 0)
    if not LAST:
        place = tl.zeros([BLOCK], tl.int32)
        better = tl.full([BLOCK], -1, tl.int32)
        for first in tl.range(0, PLACES * BREADTH, BLOCK_J):
            other = first + tl.arange(0, BLOCK_J)
            rival, _ = _offered(frontier_path_probs, scores, b, other, floor, wanted, PLACES, WIDTH, BREADTH, DEEP)
            above = rival[None, :] > path_prob[:, None]
            equal = (rival[None, :] == path_prob[:, None]) & (other < PLACES * BREADTH)[None, :]
            place += tl.sum((above | (equal & (other[None, :] < item[:, None]))).to(tl.int32), 1)
            better += tl.sum((above | equal).to(tl.int32), 1)
        for first in tl.range(1, begin, BLOCK_J):
            other = first + tl.arange(0, BLOCK_J)
            rival = tl.load(item_path_probs + b * items + other, mask=other < begin, other=-1.0)
            better += tl.sum((rival[None, :] >= path_prob[:, None]).to(tl.int32), 1)
        taken = here & (place < WIDTH)
        expanded = (path_prob > 0.0) & (better < tl.load(limits + b)) & (tl.load(limits + sequences + b) > level)
        to = b * WIDTH + place
        tl.store(next_frontier + to, begin + item, mask=taken)
        tl.store(next_path_probs + to, tl.where(expanded, path_prob, 0.0), mask=taken)
        tl.store(next_tokens + to, token, mask=taken)
        tl.store(sources + to, (b * PLACES + item // BREADTH).to(tl.int64), mask=taken)
        if WEIGHED:
            _weigh(worth, limits, tl.where(taken & expanded, path_prob, 0.0), b, sequences, level, least_mass)
        parent = tl.zeros([BLOCK], tl.int32)
        if DEEP:
            parent = row - WIDTH + item // BREADTH
        tl.store(tail_parents + b * tail + row + place, parent, mask=taken)
        if PLACES * BREADTH < WIDTH:  # noqa: SIM102  one is known to the compiler, the other is not
            # The root has fewer children than a level expands: the first one is repeated, with a path probability of 0.
            if tl.program_id(1) == 0:
                spare = tl.arange(0, BLOCK_W)
                free = (spare >= PLACES * BREADTH) & (spare < WIDTH)
                spare_at = b * WIDTH + spare
                none = tl.zeros([BLOCK_W], tl.int32)
                tl.store(next_frontier + spare_at, begin + none, mask=free)
                tl.store(next_path_probs + spare_at, none.to(tl.float64), mask=free)
                tl.store(next_tokens + spare_at, tl.load(tokens + b * PLACES * BREADTH) + none, mask=free)
                tl.store(sources + spare_at, (b * PLACES + none).to(tl.int64), mask=free)
                tl.store(tail_parents + b * tail + row + spare, none, mask=free)


@triton.jit(do_not_specialize=_NUMBERS)
def _keep_kernel(  # type: ignore[no-untyped-def]
    tokens, parents, path_probs, scores, kept, items, rows, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block): the rows that BLOCK items of a tree have among the best; see `growth.keep`."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = item < items
    path_prob = tl.load(path_probs + b * items + item, mask=here, other=-1.0)
    parent = tl.load(parents + b * items + item, mask=here, other=0)
    above = tl.load(path_probs + b * items + parent, mask=here, other=-1.0)
    place = tl.zeros([BLOCK], tl.int32)
    parent_place = tl.zeros([BLOCK], tl.int32)
    there = tl.zeros([BLOCK_J], tl.int32)
    for first in tl.range(0, items, BLOCK_J):
        other = first + tl.arange(0, BLOCK_J)
        rival = tl.load(path_probs + b * items + other, mask=other < items, other=-2.0)
        equal = (rival[None, :] == path_prob[:, None]) & (other[None, :] < item[:, None])
        place += tl.sum(((rival[None, :] > path_prob[:, None]) | equal).to(tl.int32), 1)
        equal = (rival[None, :] == above[:, None]) & (other[None, :] < parent[:, None])
        parent_place += tl.sum(((rival[None, :] > above[:, None]) | equal).to(tl.int32), 1)
        there += (rival > 0.0).to(tl.int32)
    own = kept + b * (1 + 3 * rows)
    taken = here & (place < rows)
    tl.store(own + 1 + place, tl.load(tokens + b * items + item, mask=here, other=0), mask=taken)
    tl.store(own + 1 + rows + place, parent_place, mask=taken)
    score = tl.load(scores + b * items + item, mask=here, other=0.0).to(tl.int32, bitcast=True)
    tl.store(own + 1 + 2 * rows + place, score, mask=taken)
    if tl.program_id(1) == 0:
        tl.store(own, tl.minimum(tl.sum(there, 0), rows))


def grow(growth: Growth, children: Children, limits: Tensor, level: int, floor: float, tail_parents: Tensor) -> None:
    """See `growth.grow`."""
    (_, sequences, width), breadth = growth.frontier.shape, growth.breadth
    places = 1 if level == 1 else width
    row = 1 + (level - 1) * width
    now, following = level % 2, (level + 1) % 2
    items = growth.tokens.shape[1]
    rivals = _rivals(items)
    _grow_kernel[(sequences, triton.cdiv(places * breadth, _ITEMS))](
        growth.tokens, growth.parents, growth.path_probs, growth.scores, growth.frontier[now],
        growth.frontier_path_probs[now], growth.frontier[following], growth.frontier_path_probs[following],
        growth.next_tokens, growth.sources, children.tokens, children.scores, limits, tail_parents, growth.worth,
        sequences, items, growth.first_item(level), level, len(growth.worth) - 1, row,
        tail_parents.shape[1], floor, int(growth.least_mass * MASS_UNITS), PLACES=places, WIDTH=width, BREADTH=breadth,
        LAST=row >= tail_parents.shape[1], DEEP=level > 1, WEIGHED=growth.least_mass > 0, BLOCK=_ITEMS,
        BLOCK_J=rivals, BLOCK_W=triton.next_power_of_2(width), num_warps=4 if rivals > 16 else 1,
        **dependent_launch(growth.tokens.device),
    )  # fmt: skip


def keep(growth: Growth, kept: Tensor) -> None:
    """See `growth.keep`."""
    sequences, items = growth.path_probs.shape
    rivals = _rivals(items)
    _keep_kernel[(sequences, triton.cdiv(items, _ITEMS))](
        growth.tokens, growth.parents, growth.path_probs, growth.scores, kept, items, (kept.shape[1] - 1) // 3,
        BLOCK=_ITEMS, BLOCK_J=rivals, num_warps=4 if rivals > 16 else 1, **dependent_launch(kept.device),
    )  # fmt: skip


def _rivals(items: int) -> int:
    """Of a tree of so many items, those that an item is compared with at a time."""
    return int(max(16, min(_RIVALS, triton.next_power_of_2(items))))
