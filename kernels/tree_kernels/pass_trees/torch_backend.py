"""The reference of `tree_kernels.pass_trees`, in plain Python on PyTorch tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tree_kernels.growth import COLDEST, GREEDY_TEMPERATURE
from tree_kernels.node_table.layout import COST_OF_HALVING, MOST_CHANCE, MOST_COST, NODES
from tree_kernels.pass_trees.dispatch import NODES as MOST_NODES
from tree_kernels.pass_trees.types import Tails, VerifiedRows
from tree_kernels.verification.records import RECORD, TOKEN_BITS, Mode, records_of


def read_outcome(rows: VerifiedRows, tails: Tails, page_size: int, last_position: int) -> None:
    """See `pass_trees.read_outcome`."""
    sequences, verdicts = len(tails.bases), rows.verdicts
    starts, prefixes = rows.query_starts.tolist(), rows.prefix_lengths.tolist()
    starts += [starts[-1]] * (sequences + 1 - len(starts))
    records = records_of(rows.parameters.cpu().numpy(), min(sequences, len(rows.parameters) // RECORD))
    for b in range(sequences):
        first, end = starts[b], starts[b + 1]
        if end == first:
            _write_tail(tails, b, 0, 0, [], page_size, last_position)
            tails.last_rows[b] = tails.bases[b] = tails.limits[0, b] = 0
            continue
        record = records[b]
        verified = bool(record["rows"])
        path, following = [end - 1], int(record["following"])
        if verified:
            root, count = int(record["first_row"]), int(verdicts.accepted_counts[b])
            path = [root, *(root + verdicts.accepted_rows[root : root + count]).tolist()]
            following = int(verdicts.next_tokens[b]) & TOKEN_BITS
        for row in range(first, path[0]):
            tails.next_tokens[row] = rows.token_ids[row + 1]
        for row, after in zip(path, [*(int(rows.token_ids[row]) for row in path[1:]), following], strict=True):
            tails.next_tokens[row] = after
        keys = prefixes[b] + path[0] - first + len(path)
        drafts = verified and bool(record["drafts"])
        tails.last_rows[b], tails.roots[b] = path[-1], following
        tails.bases[b], tails.limits[0, b] = (keys + 1, MOST_NODES) if drafts else (0, 0)
        page = int(rows.page_starts[b])
        held = rows.page_table[page : page + -(-int(record["room"]) // page_size)].tolist()
        _write_tail(tails, b, keys, int(record["room"]), held, page_size, last_position)
        coupled, gumbel_max = int(record["mode"]) == Mode.COUPLED, tails.gumbel_max
        tails.temperatures[b] = max(float(record["temperature"]), COLDEST) if coupled else GREEDY_TEMPERATURE
        gumbel_max.coupled[b], gumbel_max.top_k[b] = coupled, int(record["top_k"]) if coupled else 0
        gumbel_max.top_p[b] = float(record["top_p"]) if coupled else 1.0
        gumbel_max.min_p[b] = float(record["min_p"]) if coupled else 0.0
        gumbel_max.seeds[b] = int(record["seed"].astype(np.int64))
        gumbel_max.positions[b] = keys + 1


def _write_tail(
    tails: Tails, b: int, keys: int, room: int, held: list[int], page_size: int, last_position: int
) -> None:
    """Where the rows of a sequence's tail stand behind `keys` keys, in the pages `held` for `room` keys."""
    levels, _, width = tails.slots.shape
    pages = tails.page_table.shape[1]
    needed = min(pages, -(-(keys + levels * width) // page_size))
    first = held[0] if held else 0
    for place in range(needed):
        tails.page_table[b, place] = held[place] if place < len(held) else first
    tails.prefix_lengths[b] = max(0, keys - 1)
    tails.limits[1, b] = 1 + max(0, min(levels, (min(room, pages * page_size) - keys) // width))
    for i in range(levels * width):
        key, level = keys + i, i // width
        taken = keys > 0 and key < min(room, pages * page_size)
        slot = held[key // page_size] * page_size + key % page_size if taken else -1
        tails.slots[level, b, i % width] = slot
        tails.positions[level, b, i % width] = min(keys + level, last_position)


def write_tables(kept: Tensor, tails: Tails, table_slots: Tensor, trust: Tensor, tables: Tensor) -> None:
    """See `pass_trees.write_tables`."""
    rows = (kept.shape[1] - 1) // 3
    for b, base in enumerate(tails.bases.tolist()):
        slot = int(table_slots[b])
        if slot < 0 or not base:
            continue
        count = min(int(kept[b, 0]), rows)
        tokens, parents = kept[b, 1 : 1 + count].tolist(), kept[b, 1 + rows : 1 + rows + count].tolist()
        scores = kept[b, 1 + 2 * rows :].contiguous().view(torch.float32)[:count].double() * float(trust)
        sizes = [1] * count
        for i in range(count - 1, 0, -1):
            sizes[parents[i]] += sizes[i]
        place, following, table = [0] * count, [1] * count, torch.zeros(5, NODES, dtype=torch.int32)
        table[:, 0] = torch.tensor([int(tails.roots[b]), 0, count, 0, 0])
        for i in range(1, count):
            above = parents[i]
            place[i] = following[above]
            following[above] += sizes[i]
            following[i] = place[i] + 1
            chance, cost = min(float(scores[i]), MOST_CHANCE), MOST_COST
            if chance > 0.0:
                cost = min(MOST_COST, max(1, int(-math.log2(chance) * COST_OF_HALVING + 0.5)))
            up = place[above]
            own = [tokens[i], up, place[i] + sizes[i], int(table[3, up]) + 1, int(table[4, up]) + cost]
            table[:, place[i]] = torch.tensor(own)
        tables[slot, 0], tables[slot, 1] = base, count
        tables[slot, 2:].view(5, NODES)[:, :count] = table[:, :count].to(tables.device)
