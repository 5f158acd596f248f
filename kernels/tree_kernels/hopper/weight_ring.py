"""Products of few rows whose first weights are on their way before the rows are there.

One warp loads blocks of a weight and of the rows into a *ring* of STAGES blocks, by tensor maps; a warpgroup multiplies
them. What lies in shared memory is there at once, unlike what was brought into the L2 cache, so a launch fills its ring
with weights while the launch before ends, and only rows are left to load when that has ended. In a step of Llama 8B's
shape it takes 1 to 4 us less of a launch: benchmarks/results/2026-12-01-h200-weight-rings.md.

A tile is 64 rows of the weight, or two times 64 that need not lie side by side: gate's and up's, or the halves of a
head. The weight is the left factor. Barriers say which blocks are full, and which are empty again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

# Rows of the weight in one product of a warpgroup.
PART = gl.constexpr(64)
# Triton 3.9 has other names for these than 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def make_ring(  # type: ignore[no-untyped-def]
    rows_map, weight_map, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):
    """An empty ring: blocks of weights [STAGES * PARTS, 64, BLOCK_K] and of rows [STAGES, BLOCK_M, BLOCK_K], and the
    barriers of both. The launch behind may begin from here on."""
    weights = gl.allocate_shared_memory(weight_map.dtype, [STAGES * PARTS, PART, BLOCK_K], weight_map.layout)
    rows = gl.allocate_shared_memory(rows_map.dtype, [STAGES, BLOCK_M, BLOCK_K], rows_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    _barrier()
    cuda.gdc_launch_dependents()
    return weights, rows, full, empty


@gluon.jit
def _load_weights(weight_map, ring, stage, first, second, at, PARTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load numbers `at` on of a tile's rows of the weight."""
    weights, _, full, _ = ring
    _load(weight_map, [first, at], full.index(stage), weights.index(stage * PARTS))
    if PARTS == 2:
        _load(weight_map, [second, at], full.index(stage), weights.index(stage * PARTS + 1))


@gluon.jit
def fill_ring(  # type: ignore[no-untyped-def]
    rows_map, weight_map, ring, row, first, second, begin, BLOCKS: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp's part: load all BLOCKS of numbers from `begin` on of the rows from `row` on, and of the weight's from
    `first` and from `second` on. BLOCKS are no fewer than STAGES."""
    _, rows, full, empty = ring
    SIZE: gl.constexpr = (PARTS * PART + BLOCK_M) * BLOCK_K * 2
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), SIZE)
        _load_weights(weight_map, ring, stage, first, second, begin + stage * BLOCK_K, PARTS)
    cuda.gdc_wait()
    for stage in gl.static_range(STAGES):
        _load(rows_map, [row, begin + stage * BLOCK_K], full.index(stage), rows.index(stage))
    for block in range(STAGES, BLOCKS):
        turn = block % STAGES
        mbarrier.wait(empty.index(turn), (block // STAGES + 1) % 2)
        mbarrier.expect(full.index(turn), SIZE)
        _load_weights(weight_map, ring, turn, first, second, begin + block * BLOCK_K, PARTS)
        _load(rows_map, [row, begin + block * BLOCK_K], full.index(turn), rows.index(turn))


@gluon.jit
def multiply_ring(  # type: ignore[no-untyped-def]
    ring, BLOCKS: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):
    """The warpgroup's part: [64, BLOCK_M] fp32 of a tile's first and second part; the second is zeros where there is
    none. What the launch before has written may be read behind it."""
    weights, rows, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    cuda.gdc_wait()
    one = warpgroup_mma_init(gl.full([PART, BLOCK_M], 0.0, gl.float32, layout))
    two = warpgroup_mma_init(gl.full([PART, BLOCK_M], 0.0, gl.float32, layout))
    for block in range(BLOCKS):
        stage = block % STAGES
        mbarrier.wait(full.index(stage), block // STAGES % 2)
        right = rows.index(stage).permute((1, 0))
        one = warpgroup_mma(weights.index(stage * PARTS), right, one, is_async=True)
        if PARTS == 2:
            two = warpgroup_mma(weights.index(stage * PARTS + 1), right, two, is_async=True)
        # The block before has been multiplied.
        warpgroup_mma_wait(PARTS, deps=[one, two])
        mbarrier.arrive(empty.index((block + STAGES - 1) % STAGES), count=1, pred=block > 0)
    first, second = warpgroup_mma_wait(0, deps=[one, two])
    return first, second


@gluon.jit
def sum_of_splits(  # type: ignore[no-untyped-def]
    one, two, partials, counters, SPLITS: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Both parts, summed over the `SPLITS` programs that share a tile, and whether this program has the sums: the last
    to arrive adds up those of all, always in the same order. Counters are zero before and behind."""
    has_sums = True
    if SPLITS > 1:
        layout: gl.constexpr = one.type.layout
        SIZE: gl.constexpr = PARTS * PART * BLOCK_M
        n = gl.arange(0, PART, gl.SliceLayout(1, layout))
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        at = partials + tile.to(gl.int64) * (SPLITS * SIZE) + n[:, None] * BLOCK_M + m[None, :]
        own = at + gl.program_id(2) * SIZE
        gl.store(own, one)
        if PARTS == 2:
            gl.store(own + PART * BLOCK_M, two)
        _barrier()
        arrived = gl.atomic_add(counters + tile, 1, sem="acq_rel")
        has_sums = arrived == SPLITS - 1
        if has_sums:
            gl.store(counters + tile, 0)
            one = gl.load(at, cache_modifier=".cg")
            if PARTS == 2:
                two = gl.load(at + PART * BLOCK_M, cache_modifier=".cg")
            for split in gl.static_range(1, SPLITS):
                one += gl.load(at + split * SIZE, cache_modifier=".cg")
                if PARTS == 2:
                    two += gl.load(at + split * SIZE + PART * BLOCK_M, cache_modifier=".cg")
    return one, two, has_sums


@gluon.jit
def finish_ring_norm(  # type: ignore[no-untyped-def]
    one, two, squares, row, count, epsilon, INNER: gl.constexpr, SUMS: gl.constexpr, BLOCK_SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Both parts of a product of rows whose norm is half done, by `SUMS` sums of squares a row, divided by their root
    mean square; as they are where rows are normed whole, which have no sums."""
    if SUMS > 0:
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
        m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        at = gl.arange(0, BLOCK_SUMS, gl.SliceLayout(0, layout))
        inside = (m < count)[:, None] & (at < SUMS)[None, :]
        found = gl.load(squares + m[:, None] * SUMS + at[None, :], mask=inside, other=0.0)
        root = gl.rsqrt(gl.sum(found, 1) / INNER + epsilon)
        own: gl.constexpr = gl.SliceLayout(0, one.type.layout)
        root = gl.convert_layout(root, own)[None, :]
        one, two = one * root, two * root
    return one, two
