"""Token recycling: trees of the tokens that were likeliest behind each token before, where a draft's table is empty.

After Luo et al., "Turning trash into treasure: accelerating inference of large language models with token recycling",
arXiv 2408.08696: the target's likeliest tokens behind a token, at the last place where it stood in any text, follow it
with a good chance elsewhere. They are kept, `WIDTH` for each token, and a tree of fixed shape is filled in from the
root down. Prompt lookup is merged with it as with a draft's tree. Over 42 recorded answers of seven tasks, passes of 8,
16 and 32 rows make 1.92, 2.06 and 2.14 tokens with it and 1.69, 1.74 and 1.74 with lookup alone
(`benchmarks/results/2026-11-26-cpu-recycling.md`).

Texts of one owner never show in another's trees. Entries have one place each, by a hash of owner and token; a later one
replaces what is there. Each is int32 [ENTRY]: owner (-1 where it is empty), token, `WIDTH` following tokens, the
likeliest first, and what choosing each costs, as in `layout`, after a softmax over the `WIDTH` of them.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tree_kernels.node_table import layout
from tree_kernels.node_table.layout import COST_OF_HALVING, MOST_COST

# Following tokens of an entry. Chosen.
WIDTH = 4
ENTRY = 16
TOKENS_AT, COSTS_AT = 2, 2 + WIDTH
# Places for entries, 4 MB. Chosen: more than there are different tokens in the texts of several tenants.
PLACES = 1 << 16
# Nodes of a tree with its root, and their greatest depth; more made no more tokens over the recorded answers.
NODES, LEVELS = 64, 5
# The number of a tree's root among a sequence's candidates, the others' behind it: a larger table leaves no room.
FIRST = layout.NODES - NODES
# Tokens of a sequence behind which a pass keeps what followed. Chosen: twice and more of what passes make on average.
KEPT_TOKENS = 8
# Rows of the largest pass that keeps, and that builds trees: above, rows are worth more to other sequences. Chosen.
MOST_ROWS = 64
_FACTORS = (0x9E3779B1, 0x85EBCA6B)
_WORD = 0xFFFFFFFF


class RecycledShape(NamedTuple):
    """Of a tree whose nodes are in depth-first order: of each its parent's place, its rank among the entry's tokens,
    the place behind all that is below it, its depth, and what its edge costs beyond the entry's cost."""

    parents: list[int]
    ranks: list[int]
    ends: list[int]
    depths: list[int]
    extra: list[int]


def shape() -> RecycledShape:
    """The likeliest `NODES` nodes by the chances of their ranks."""
    likeliest: list[tuple[int, ...]] = []
    ahead: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while len(likeliest) < NODES:
        chance, path = heapq.heappop(ahead)
        likeliest.append(path)
        if len(path) < LEVELS:
            # Chances of a likeliest token and those behind it, for the shape alone. Chosen: larger shapes made no more
            # tokens.
            for rank, share in enumerate((0.62, 0.2, 0.11, 0.07)):
                heapq.heappush(ahead, (chance * share, (*path, rank)))
    paths = sorted(likeliest)
    places = {path: place for place, path in enumerate(paths)}
    ends = [place + sum(one[: len(path)] == path for one in paths) for place, path in enumerate(paths)]
    # How often the chances of a softmax hold at another place, and each level further down. 0.5 to 1.0 made the same
    # within two per cent over the recorded answers.
    extra = [round(-math.log2(0.6 * 0.9**level) * COST_OF_HALVING) for level in range(LEVELS)]
    return RecycledShape(
        [places[path[:-1]] for path in paths],
        [path[-1] if path else 0 for path in paths],
        ends,
        [len(path) for path in paths],
        [extra[len(path) - 1] if path else 0 for path in paths],
    )


SHAPE = shape()


def place_of(owner: int, token: int) -> int:
    """Where the entry of an owner's token is kept."""
    return ((owner * _FACTORS[0] & _WORD ^ token * _FACTORS[1] & _WORD) * _FACTORS[0] & _WORD) >> 16


def empty_entries(device: torch.device) -> Tensor:
    """[PLACES, ENTRY] int32 without an entry."""
    return torch.full((PLACES, ENTRY), -1, dtype=torch.int32, device=device)


def entry_of(owner: int, token: int, logits: Tensor) -> Tensor:
    """The entry [ENTRY] int32 of an owner's token behind which the target had `logits` [V]."""
    values, ids = logits.float().sort(descending=True, stable=True)
    values, entry = values[:WIDTH], torch.full((ENTRY,), -1, dtype=torch.int32)
    # Where logits are no finite numbers, nothing follows.
    ids = ids[:WIDTH].masked_fill(~values.isfinite(), -2)
    costs = -torch.log_softmax(values, 0) / math.log(2.0) * COST_OF_HALVING
    entry[0], entry[1] = owner, token
    entry[TOKENS_AT:COSTS_AT] = ids
    entry[COSTS_AT : COSTS_AT + WIDTH] = costs.nan_to_num(MOST_COST).clamp(1, MOST_COST).round()
    return entry


def recycled_tree(entries: Tensor, owner: int, root: int) -> tuple[list[int], list[int]]:
    """Tokens and costs of the nodes of a tree [NODES] below an owner's token: -2 and at least `MOST_COST` for a node
    without an entry above it."""
    tokens, costs = [root], [0]
    for parent, rank, extra in list(zip(SHAPE.parents, SHAPE.ranks, SHAPE.extra, strict=True))[1:]:
        above, token, cost = tokens[parent], -2, MOST_COST
        entry = entries[place_of(owner, above)].tolist() if above >= 0 else []
        if entry[:2] == [owner, above]:
            token, cost = entry[TOKENS_AT + rank], entry[COSTS_AT + rank]
        tokens.append(token)
        costs.append(costs[parent] + cost + extra)
    return tokens, costs
