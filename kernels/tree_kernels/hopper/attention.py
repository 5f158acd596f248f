"""Tree attention for blocks of many rows: what `attention.triton_kernels` computes, without windows, caps, sinks and
slopes.

One warpgroup loads tiles of keys and values, two multiply, each for half of a block's rows. While one of these takes
the softmax of its scores, the tensor cores have the other's products, and none that multiplies computes an address.

A *ring* has room for STAGES tiles of keys and of values. Barriers say which are full, once the last thread that loads
has arrived, and which are empty again, once both who multiply have. One thread arrives for a warpgroup: Triton has its
warps wait for each other first. The words are those of `attention.triton_schedule`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from tree_kernels.hopper.specialising import warp_specialize

# Packed rows of a block, and of a warpgroup: a warpgroup's products are of 64 rows.
_BLOCK_M = gl.constexpr(128)
_HALF = gl.constexpr(64)
# Threads of the warpgroup that loads.
_LOADERS = gl.constexpr(128)
# Triton 3.9 has other names for these than 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _span(record, chunk, per_chunk):  # type: ignore[no-untyped-def]
    """First and end of a group's tiles that lie in a chunk."""
    first_tile = gl.load(record + 5)
    low = gl.maximum(chunk * per_chunk - first_tile, 0)
    return low, gl.minimum((chunk + 1) * per_chunk - first_tile, gl.load(record + 6))


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    cached, work, ring, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the tiles of this program's chunk, group by group."""
    key_cache, value_cache, page_table = cached
    groups, chunk_table = work
    keys, values, keys_full, keys_empty, values_full, values_empty = ring
    # A thread copies 16 bytes of a row at a time.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    chunk = gl.program_id(0)
    own = chunk_table + chunk * 16
    count = 0
    for group in range(gl.load(own + 8), gl.load(own + 9) + 1):
        record = groups + group * 8
        low, high = _span(record, chunk, gl.load(own + 10))
        # What lies behind the last key may be NaN, and 0 * NaN is NaN: the last key stands in for it.
        last = gl.load(record + 1) + gl.load(record + 2) - 1
        pages = page_table + gl.load(record + 3)
        head = gl.load(record + 7) // 2
        # Page ids come a tile before what they point at.
        ahead = gl.load(pages + gl.minimum(low * BLOCK_N + n, last) // PAGE_SIZE)
        for tile in range(low, high):
            stage = count % STAGES
            # A barrier that nobody has passed is in phase 0; waiting for phase 1 then does not wait.
            phase = count // STAGES % 2 ^ 1
            offsets = gl.minimum(tile * BLOCK_N + n, last)
            page = ahead
            ahead = gl.load(pages + gl.minimum((tile + 1) * BLOCK_N + n, last) // PAGE_SIZE)
            if FAR:
                page = page.to(gl.int64)
            at = (page * PAGE_SIZE + offsets % PAGE_SIZE)[:, None] * (KV_HEADS * D) + d[None, :]
            mbarrier.wait(keys_empty.index(stage), phase)
            _copy(keys.index(stage), key_cache + head * D + at)
            async_copy.mbarrier_arrive(keys_full.index(stage), increment_count=False)
            mbarrier.wait(values_empty.index(stage), phase)
            _copy(values.index(stage), value_cache + head * D + at)
            async_copy.mbarrier_arrive(values_full.index(stage), increment_count=False)
            count += 1
    async_copy.wait_group(0)


@gluon.jit
def _word(words, at, row, live, is_causal, WORDS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[M] int32: which of tail keys 32 * at onwards each row sees. Before the tail it sees all."""
    if is_causal > 0:
        ones = row + 1 - 32 * at
        some = (gl.full(row.shape, 1, gl.int32, row.type.layout) << (ones & 31)) - 1
        word = gl.where(ones >= 32, -1, gl.where(ones <= 0, 0, some))
    else:
        word = gl.load(words + row * (2 * WORDS) + at, mask=live & (at >= 0) & (at < 2 * WORDS), other=0)
    return gl.where(at < 0, -1, word)


@gluon.jit
def _word_from(words, bit, row, live, is_causal, WORDS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[M] int32: which of tail keys `bit` onwards each row sees."""
    # Tiles before the tail are not masked: with 8 words added, the dividend is not negative.
    at = (bit + 256) // 32 - 8
    by = bit - 32 * at
    low = _word(words, at, row, live, is_causal, WORDS).to(gl.uint32, bitcast=True)
    high = _word(words, at + 1, row, live, is_causal, WORDS)
    return (low >> by.to(gl.uint32)).to(gl.int32, bitcast=True) | high << 1 << (31 - by)


@gluon.jit
def _hidden(scores, words, tail, row, live, is_causal, WORDS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores [M, 64], -inf where the row does not see the key; `tail` is the first key's place in the tail."""
    gl.static_assert(scores.shape[1] == 64)
    n = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    near = _word_from(words, tail, row, live, is_causal, WORDS)
    far = _word_from(words, tail + 32, row, live, is_causal, WORDS)
    chosen = gl.where((n < 32)[None, :], near[:, None], far[:, None])
    return gl.where((chosen << (31 - (n & 31))[None, :]) < 0, scores, float("-inf"))


@gluon.jit
def _fold(  # type: ignore[no-untyped-def]
    q, peak, mass, acc, count, is_first, tail, words, row, live, is_causal, scale_log2, ring, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr, OPEN: gl.constexpr,
):  # fmt: skip
    """Peak, mass and output of the online softmax, in base 2, after the ring's next tile; OPEN if every row sees all of
    it. The product with its values runs on when this returns."""
    keys, values, keys_full, keys_empty, values_full, values_empty = ring
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = count % STAGES
    phase = count // STAGES % 2
    mbarrier.wait(keys_full.index(stage), phase)
    nothing = gl.full([_HALF, BLOCK_N], 0.0, gl.float32, score_layout)
    scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores, output = warpgroup_mma_wait(0, deps=[scores, acc])
    mbarrier.arrive(keys_empty.index(stage), count=1)
    # The product with the values of the tile before has ended too.
    mbarrier.arrive(values_empty.index((count + STAGES - 1) % STAGES), count=1, pred=is_first == 0)
    if not OPEN:
        scores = _hidden(scores, words, tail, row, live, is_causal, WORDS, score_layout)
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    # A row that has seen no key yet has a peak of -inf, and -inf - -inf is NaN.
    base = new_peak if OPEN else gl.where(new_peak == float("-inf"), 0.0, new_peak)
    probs = gl.exp2(scores * scale_log2 - base[:, None])
    fade = gl.exp2(peak - base)
    output = output * gl.convert_layout(fade, gl.SliceLayout(1, layout))[:, None]
    weights = gl.convert_layout(probs.to(q.dtype), gl.DotOperandLayout(0, layout, 2))
    mbarrier.wait(values_full.index(stage), phase)
    acc = warpgroup_mma(weights, values.index(stage), output, is_async=True)
    return new_peak, mass * fade + gl.sum(probs, 1), acc


@gluon.jit
def _skip_tiles(count, tiles, ring, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Let the ring's next tiles go by, of a block without rows for this warpgroup."""
    _, _, keys_full, keys_empty, values_full, values_empty = ring
    for at in range(count, count + tiles):
        stage = at % STAGES
        phase = at // STAGES % 2
        mbarrier.wait(keys_full.index(stage), phase)
        mbarrier.arrive(keys_empty.index(stage), count=1)
        mbarrier.wait(values_full.index(stage), phase)
        mbarrier.arrive(values_empty.index(stage), count=1)


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    read, record, low, high, count, packed, q, ring, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Peak, mass and output of half a block, the packed rows from `packed`, over tiles low to high of a group."""
    query, words, scale_log2, query_row_stride, query_head_stride = read
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_start = gl.load(record).to(gl.int64)
    rows = gl.load(record + 1)
    prefix = gl.load(record + 2)
    head = gl.load(record + 7) // 2
    is_causal = gl.load(record + 7) % 2
    m = packed + gl.arange(0, _HALF, gl.SliceLayout(1, copied))
    d = gl.arange(0, D, gl.SliceLayout(0, copied))
    at = m // GROUP * query_row_stride + (head * GROUP + m % GROUP) * query_head_stride
    first = query + row_start * query_row_stride
    q.store(gl.load(first + at[:, None] + d[None, :], mask=(m // GROUP < rows)[:, None], other=0.0))
    fence_async_shared()
    _barrier()
    row = (packed + gl.arange(0, _HALF, gl.SliceLayout(1, score_layout))) // GROUP
    live = row < rows
    own_words = words + row_start * (2 * WORDS)
    peak = gl.full([_HALF], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    mass = gl.full([_HALF], 0.0, gl.float32, gl.SliceLayout(1, score_layout))
    acc = warpgroup_mma_init(gl.full([_HALF, D], 0.0, gl.float32, layout))
    # Keys that every row of the half sees need no mask: the prefix and, in a causal tail, the rows before.
    open_keys = prefix + is_causal * (packed // GROUP)
    middle = gl.maximum(gl.minimum(open_keys // BLOCK_N, high), low)
    for tile in range(low, middle):
        peak, mass, acc = _fold(
            q, peak, mass, acc, count + tile - low, tile == low, tile * BLOCK_N - prefix, own_words, row, live,
            is_causal, scale_log2, ring, D, BLOCK_N, STAGES, WORDS, True,
        )  # fmt: skip
    for tile in range(middle, high):
        peak, mass, acc = _fold(
            q, peak, mass, acc, count + tile - low, tile == low, tile * BLOCK_N - prefix, own_words, row, live,
            is_causal, scale_log2, ring, D, BLOCK_N, STAGES, WORDS, False,
        )  # fmt: skip
    output = warpgroup_mma_wait(0, deps=[acc])
    _barrier()
    _, _, _, _, _, values_empty = ring
    mbarrier.arrive(values_empty.index((count + high - low - 1) % STAGES), count=1)
    whole = gl.where(mass == 0.0, 1.0, mass)
    return peak, mass, output / gl.convert_layout(whole, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    read, written, work, queries, ring, HALF: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Attend with one half of each block of this program's chunk, and store outputs of groups that lie in it whole and
    partials of the others."""
    output, output_lse, partials, partial_lse = written
    groups, chunk_table = work
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    chunk = gl.program_id(0)
    own = chunk_table + chunk * 16
    per_chunk = gl.load(own + 10)
    half = HALF * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    dv = gl.arange(0, D, gl.SliceLayout(0, layout))
    count = 0
    for group in range(gl.load(own + 8), gl.load(own + 9) + 1):
        record = groups + group * 8
        rows = gl.load(record + 1)
        low, high = _span(record, chunk, per_chunk)
        packed = gl.load(record + 4) * _BLOCK_M
        first = packed + HALF * _HALF
        if (low < high) & (first >= rows * GROUP):
            _skip_tiles(count, high - low, ring, STAGES)
        elif low < high:
            q = queries.index(HALF)
            peak, mass, values = _attend(
                read, record, low, high, count, first, q, ring, GROUP, D, BLOCK_N, STAGES, WORDS
            )
            row = (packed + half) // GROUP
            stored = (row < rows)[:, None]
            own_half = HALF * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, score_layout))
            own_row = (packed + own_half) // GROUP
            lse = gl.where(mass == 0.0, float("-inf"), peak + gl.log2(mass))
            if (low == 0) & (high == gl.load(record + 6)):
                first_head = gl.load(record + 7) // 2 * GROUP
                at = (row * (KV_HEADS * GROUP) + first_head + (packed + half) % GROUP) * D
                start = gl.load(record).to(gl.int64) * (KV_HEADS * GROUP)
                to = output + start * D
                gl.store(to + at[:, None] + dv[None, :], values.to(output.dtype.element_ty), mask=stored)
                if LSE:
                    own_at = own_row * (KV_HEADS * GROUP) + first_head + (packed + own_half) % GROUP
                    gl.store(output_lse + start + own_at, lse, mask=own_row < rows)
            else:
                slot = (chunk * 2 + (gl.load(record + 5) > chunk * per_chunk).to(gl.int32)) * _BLOCK_M
                gl.store(partials + (slot + half)[:, None] * D + dv[None, :], values, mask=stored)
                gl.store(partial_lse + slot + own_half, lse, mask=own_row < rows)
        count += gl.maximum(high - low, 0)


@gluon.jit
def specialised_kernel(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, output, output_lse, partials, partial_lse, page_table, words, groups, chunk_table,
    scale_log2, query_row_stride, query_head_stride, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr, FAR: gl.constexpr,
    LSE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Every program takes one chunk, and of it the groups that lie in it. words: [R, 2 * WORDS] int32.

    Keys and values are of one width D, 64 or 128, and of 16 bits.
    """
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = query.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [2, _HALF, D], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], shared)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    keys_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    values_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=_LOADERS)
        mbarrier.init(values_full.index(stage), count=_LOADERS)
        mbarrier.init(keys_empty.index(stage), count=2)
        mbarrier.init(values_empty.index(stage), count=2)
    fence_async_shared()
    _barrier()
    if DEPENDENT:
        # The results of the launch before may be read from here on; the launch after may start and wait.
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    ring = (keys, values, keys_full, keys_empty, values_full, values_empty)
    work = (groups, chunk_table)
    cached = (key_cache, value_cache, page_table)
    read = (query, words, scale_log2, query_row_stride, query_head_stride)
    written = (output, output_lse, partials, partial_lse)
    warp_specialize(
        [
            (_multiply, (read, written, work, queries, ring, 0, GROUP, KV_HEADS, D, BLOCK_N, STAGES, WORDS, LSE)),
            (_multiply, (read, written, work, queries, ring, 1, GROUP, KV_HEADS, D, BLOCK_N, STAGES, WORDS, LSE)),
            (_load_tiles, (cached, work, ring, KV_HEADS, D, PAGE_SIZE, BLOCK_N, STAGES, FAR)),
        ],
        [4, 4],
    )
