"""Triton: a sequence a program. The tensors are those of `pass_trees.types`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.attention.tree_mask import MAX_TREE_ROWS
from tree_kernels.growth import COLDEST, GREEDY_TEMPERATURE
from tree_kernels.node_table import layout
from tree_kernels.pass_trees.dispatch import NODES as MOST_NODES
from tree_kernels.pass_trees.types import Tails, VerifiedRows
from tree_kernels.verification.triton_rows import (
    COUPLED,
    DRAFTS,
    FIRST_ROW,
    FOLLOWING,
    MIN_P,
    MODE,
    ROOM,
    ROWS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_double,
    load_long,
    record_of,
    without_mark,
)

_PATH = tl.constexpr(MAX_TREE_ROWS)
# Rows of a prompt, and pages of a sequence, that are copied at a time. Chosen: as many as a path has.
_COPIED = tl.constexpr(MAX_TREE_ROWS)
_MOST_NODES = tl.constexpr(MOST_NODES)
_COLDEST, _GREEDY = tl.constexpr(COLDEST), tl.constexpr(GREEDY_TEMPERATURE)
_NODES, _TABLE = tl.constexpr(layout.NODES), tl.constexpr(layout.TABLE)
_MOST_CHANCE, _MOST_COST = tl.constexpr(layout.MOST_CHANCE), tl.constexpr(layout.MOST_COST)
_COST_OF_HALVING = tl.constexpr(layout.COST_OF_HALVING)


@triton.jit
def _write_next_tokens(  # type: ignore[no-untyped-def]
    token_ids, accepted_rows, next_tokens, first, root_row, accepted, following
):
    """The token after each kept row of a sequence, of which `accepted` are below the root, -1 without any row; returns
    the last of these rows."""
    for start in tl.range(first, root_row, _COPIED):
        row = start + tl.arange(0, _COPIED)
        after = tl.load(token_ids + row + 1, mask=row < root_row, other=0)
        tl.store(next_tokens + row, after, mask=row < root_row)
    k = tl.arange(0, _PATH)
    below = tl.load(accepted_rows + root_row + k, mask=k < accepted, other=0)
    row = tl.load(accepted_rows + root_row + k - 1, mask=(k > 0) & (k <= accepted), other=0)
    after = tl.load(token_ids + root_row + below, mask=k < accepted, other=0)
    after = tl.where(k < accepted, after, following)
    tl.store(next_tokens + root_row + row, after, mask=k <= accepted)
    return root_row + tl.max(tl.where(k == accepted, row, 0), 0)


@triton.jit
def _write_draw(  # type: ignore[no-untyped-def]
    record, b, keys, temperatures, coupled, top_k, top_p, min_p, seeds, noise_positions
):
    """How a sequence's tokens are drawn, where it is COUPLED."""
    is_coupled = tl.load(record + MODE) == COUPLED
    temperature = tl.maximum(load_double(record + TEMPERATURE), _COLDEST)
    tl.store(temperatures + b, tl.where(is_coupled, temperature, _GREEDY).to(tl.float32))
    tl.store(coupled + b, is_coupled.to(tl.int32))
    tl.store(top_k + b, tl.where(is_coupled, tl.load(record + TOP_K), 0))
    tl.store(top_p + b, tl.where(is_coupled, load_double(record + TOP_P), 1.0))
    tl.store(min_p + b, tl.where(is_coupled, load_double(record + MIN_P), 0.0))
    tl.store(seeds + b, load_long(record + SEED))
    tl.store(noise_positions + b, (keys + 1).to(tl.int64))


@triton.jit(do_not_specialize=["sequences", "last_position", "pages"])
def _read_kernel(  # type: ignore[no-untyped-def]
    token_ids, parameters, query_starts, prefix_lengths, page_starts, page_table, accepted_counts, accepted_next,
    accepted_rows, next_tokens, last_rows, bases, roots, tail_prefixes, own_pages, slots, positions, limits,
    temperatures, coupled, top_k, top_p, min_p, seeds, noise_positions, sequences, last_position, pages,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LEVELS are those that are expanded, BLOCK at least as many as their rows."""
    b = tl.program_id(0)
    first, end = tl.load(query_starts + b), tl.load(query_starts + b + 1)
    here = end > first
    record = record_of(parameters, b)
    verified = here & (tl.load(record + ROWS) > 0)
    root_row = tl.where(verified, tl.load(record + FIRST_ROW), end - 1)
    accepted = tl.where(verified, tl.load(accepted_counts + b), 0)
    following = tl.where(verified, without_mark(tl.load(accepted_next + b)), tl.load(record + FOLLOWING))
    kept = tl.where(here, accepted, -1)
    last = _write_next_tokens(token_ids, accepted_rows, next_tokens, first, root_row, kept, following)
    tl.store(last_rows + b, tl.where(here, last, 0).to(tl.int64))
    keys = tl.where(here, tl.load(prefix_lengths + b) + root_row - first + 1 + accepted, 0)
    drafts = verified & (tl.load(record + DRAFTS) > 0)
    tl.store(bases + b, tl.where(drafts, keys + 1, 0))
    tl.store(roots + b, following)
    tl.store(tail_prefixes + b, tl.maximum(keys - 1, 0))
    room = tl.where(here, tl.minimum(tl.load(record + ROOM), pages * PAGE_SIZE), 0)
    tl.store(limits + b, tl.where(drafts, _MOST_NODES, 0))
    tl.store(limits + sequences + b, 1 + tl.maximum(0, tl.minimum(LEVELS, (room - keys) // WIDTH)))
    held = page_table + tl.load(page_starts + b)
    i = tl.arange(0, BLOCK)
    key, level = keys + i, i // WIDTH
    page = tl.load(held + key // PAGE_SIZE, mask=key < room, other=0)
    slot = tl.where(key < room, page * PAGE_SIZE + key % PAGE_SIZE, -1)
    at = (level * sequences + b) * WIDTH + i % WIDTH
    tl.store(slots + at, slot, mask=i < LEVELS * WIDTH)
    tl.store(positions + at, tl.minimum(keys + level, last_position), mask=i < LEVELS * WIDTH)
    # Places without a page name the first one: their keys are read, and masked.
    spare = tl.load(held, mask=room > 0, other=0)
    needed = tl.minimum(pages, (keys + LEVELS * WIDTH + PAGE_SIZE - 1) // PAGE_SIZE)
    for start in tl.range(0, needed, _COPIED):
        place = start + tl.arange(0, _COPIED)
        own = tl.load(held + place, mask=(place < needed) & (place * PAGE_SIZE < room), other=0)
        own = tl.where(place * PAGE_SIZE < room, own, spare)
        tl.store(own_pages + b * pages + place, own, mask=place < needed)
    if here:
        _write_draw(record, b, keys, temperatures, coupled, top_k, top_p, min_p, seeds, noise_positions)


def read_outcome(rows: VerifiedRows, tails: Tails, page_size: int, last_position: int) -> None:
    """See `pass_trees.read_outcome`."""
    verdicts, draw = rows.verdicts, tails.gumbel_max
    levels, _, width = tails.slots.shape
    # Those of the pass: others of the tails stay without a tree.
    sequences = len(tails.bases)
    _read_kernel[(sequences,)](
        rows.token_ids, rows.parameters, rows.query_starts, rows.prefix_lengths, rows.page_starts, rows.page_table,
        verdicts.accepted_counts, verdicts.next_tokens, verdicts.accepted_rows, tails.next_tokens, tails.last_rows,
        tails.bases, tails.roots, tails.prefix_lengths, tails.page_table, tails.slots, tails.positions, tails.limits,
        tails.temperatures, draw.coupled, draw.top_k, draw.top_p, draw.min_p, draw.seeds, draw.positions, sequences,
        last_position, tails.page_table.shape[1], LEVELS=levels, WIDTH=width, PAGE_SIZE=page_size,
        BLOCK=triton.next_power_of_2(max(1, levels * width)), num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    kept, bases, roots, table_slots, trust, tables, DOUBLINGS: tl.constexpr, KEPT: tl.constexpr, N: tl.constexpr
):
    """KEPT rows of `kept` at most, N a power of two of at least as many; no path is longer than 2 ** DOUBLINGS."""
    b = tl.program_id(0)
    slot, base = tl.load(table_slots + b), tl.load(bases + b)
    if (slot >= 0) & (base > 0):
        i = tl.arange(0, N)
        own = kept + b * (1 + 3 * KEPT)
        count = tl.minimum(tl.load(own), KEPT)
        there, below = i < count, (i > 0) & (i < count)
        token = tl.where(i > 0, tl.load(own + 1 + i, mask=there, other=0), tl.load(roots + b))
        parent = tl.where(below, tl.load(own + 1 + KEPT + i, mask=there, other=0), -1)
        score = tl.load(own + 1 + 2 * KEPT + i, mask=there, other=0).to(tl.float32, bitcast=True).to(tl.float64)
        chance = tl.minimum(score * tl.load(trust).to(tl.float64), _MOST_CHANCE)
        halvings = -tl.log2(tl.where(chance > 0.0, chance, 1.0)) * _COST_OF_HALVING + 0.5
        cost = tl.minimum(tl.maximum(halvings, 1.0), _MOST_COST).to(tl.int32)
        cost = tl.where(chance > 0.0, cost, _MOST_COST)
        # [N, N]: whether the second is the parent of the first, and whether it is on the first one's path.
        is_parent = parent[:, None] == i[None, :]
        on_path = (is_parent | (i[:, None] == i[None, :])).to(tl.float16)
        for _ in tl.static_range(0, DOUBLINGS):
            # Twice as far at a time, by a product, since sums over both axes in turn would take several times as long.
            on_path = (tl.dot(on_path, on_path) > 0.0).to(tl.float16)
        on_path = on_path.to(tl.int32)
        size = tl.sum(on_path * there.to(tl.int32)[:, None], 0)
        older = (parent[:, None] == parent[None, :]) & (i[None, :] < i[:, None]) & below[:, None]
        before = 1 + tl.sum(older.to(tl.int32) * size[None, :], 1)
        place = tl.sum(on_path * tl.where(below, before, 0)[None, :], 1)
        depth = tl.sum(on_path * below.to(tl.int32)[None, :], 1)
        path = tl.sum(on_path * tl.where(below, cost, 0)[None, :], 1)
        above = tl.sum(is_parent.to(tl.int32) * place[None, :], 1)
        table = tables + slot * _TABLE
        tl.store(table, base)
        tl.store(table + 1, count)
        nodes = table + 2 + place
        tl.store(nodes, token, mask=there)
        tl.store(nodes + _NODES, above, mask=there)
        tl.store(nodes + 2 * _NODES, place + size, mask=there)
        tl.store(nodes + 3 * _NODES, depth, mask=there)
        tl.store(nodes + 4 * _NODES, path, mask=there)


def write_tables(kept: Tensor, tails: Tails, table_slots: Tensor, trust: Tensor, tables: Tensor) -> None:
    """See `pass_trees.write_tables`."""
    rows = (kept.shape[1] - 1) // 3
    _write_kernel[(len(tails.bases),)](
        kept, tails.bases, tails.roots, table_slots, trust, tables, DOUBLINGS=tails.slots.shape[0].bit_length(),
        KEPT=rows, N=max(16, triton.next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
