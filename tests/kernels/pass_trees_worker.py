"""Reads passes and writes trees with the Triton kernels, and with PyTorch; writes both as JSON to standard output."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from torch import Tensor

from tree_kernels.growth import make_growth, make_kept
from tree_kernels.node_table.layout import TABLE
from tree_kernels.pass_trees import Tails, VerifiedRows, make_tails, read_outcome, write_tables
from tree_kernels.verification import Mode, RowsToVerify, Verdicts
from tree_kernels.verification.records import pack_parameters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Sequences, levels, width.
CASES = [(1, 2, 1), (2, 4, 3), (5, 3, 8), (3, 7, 8)]
PAGE_SIZE, PAGES, ROWS, LAST_POSITION = 4, 40, 96, 130


def main() -> None:
    cases = [
        {"found": made(*case, DEVICE, "triton"), "expected": made(*case, torch.device("cpu"), "torch")}
        for case in CASES
    ]
    json.dump(cases, sys.stdout)


def made(sequences: int, levels: int, width: int, device: torch.device, backend: Any) -> dict[str, Any]:
    """Everything that a pass of random rows, and random trees, write."""
    rng, room = random.Random(100 * sequences + levels), sequences + 1
    tails = make_tails(room, levels, width, ROWS, PAGES, device)
    rows = pass_of(rng, sequences, room, device)
    read_outcome(rows, tails, PAGE_SIZE, LAST_POSITION, backend)
    kept, tables = trees_of(rng, room, levels, device), torch.zeros(room + 2, TABLE, dtype=torch.int32, device=device)
    slots = torch.tensor([*rng.sample(range(room + 2), room - 1), -1], dtype=torch.int32, device=device)
    trust = torch.tensor([0.9], dtype=torch.float32, device=device)
    write_tables(kept, tails, slots, trust, tables, backend)
    return {**read(tails), "tables": tables.tolist()}


def read(tails: Tails) -> dict[str, Any]:
    own = {name: value for name, value in tails._asdict().items() if name != "gumbel_max"}
    draw = {f"draw's {name}": value for name, value in tails.gumbel_max._asdict().items()}
    return {name: value.tolist() for name, value in {**own, **draw}.items()}


def pass_of(rng: random.Random, sequences: int, room: int, device: torch.device) -> VerifiedRows:
    """A pass of prompts that go on, chains and trees."""
    starts, prefixes, pages, page_starts = [0], list[int](), list[int](), list[int]()
    records, accepted_rows, counts, following = list[RowsToVerify](), [0] * ROWS, [0] * room, [-1] * room
    for b in range(sequences):
        first, known, drafted = starts[-1], rng.choice([1, 1, 6]), rng.choice([0, 4, 9])
        reads_on = known > 1 and rng.random() < 0.5
        drafted = 0 if reads_on else drafted
        prefix, held = rng.randrange(0, 60), rng.choice([0, 2, 20])
        total = -(-(prefix + known + drafted) // PAGE_SIZE) + held
        page_starts.append(len(pages))
        pages += [rng.randrange(1, 1000) for _ in range(total)]
        prefixes.append(prefix)
        root = first + known - 1
        starts.append(root + 1 + drafted)
        mode = rng.choice([Mode.GREEDY, Mode.COUPLED])
        drawn = {"seed": rng.getrandbits(64), "temperature": rng.choice([0.01, 0.7]), "top_k": 5, "min_p": 0.1}
        note = {"following": rng.randrange(100), "room": total * PAGE_SIZE, "drafts": int(rng.random() < 0.8)}
        records.append(RowsToVerify(0 if reads_on else root, 0 if reads_on else 1 + drafted, mode, **drawn, **note))
        if not reads_on:
            path = sorted(rng.sample(range(1, drafted + 1), rng.randrange(drafted + 1)))
            accepted_rows[root : root + len(path)] = path
            counts[b], following[b] = len(path), rng.randrange(100)
    end = starts[-1]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    verdicts = Verdicts.over(on_device([*counts, *following, *accepted_rows]), room)
    return VerifiedRows(
        on_device([rng.randrange(100) for _ in range(ROWS)]),
        torch.from_numpy(pack_parameters(records, room, ROWS, 1000)).to(device),
        on_device([*starts, *[end] * (room - sequences)]),
        on_device([*prefixes, *[0] * (room - sequences)]),
        on_device([*page_starts, *[len(pages)] * (room - sequences)]),
        on_device([*pages, 0]),
        verdicts,
    )


def trees_of(rng: random.Random, sequences: int, levels: int, device: torch.device) -> Tensor:
    """[sequences, ..] as `growth.make_kept`: trees of up to 64 rows, parents before children."""
    kept = make_kept(make_growth(sequences, levels, 20, 20, device), 63)
    rows = (kept.shape[1] - 1) // 3
    for b in range(sequences):
        count = rng.randrange(1, rows + 1)
        depths, parents = [0], [0]
        for row in range(1, count):
            parent = rng.choice([place for place in range(row) if depths[place] < levels])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        scores = torch.tensor([rng.choice([0.0, 1.0, rng.random()]) for _ in range(count)])
        kept[b, 0] = count
        kept[b, 1 : 1 + count] = torch.tensor([rng.randrange(100) for _ in range(count)])
        kept[b, 1 + rows : 1 + rows + count] = torch.tensor(parents)
        kept[b, 1 + 2 * rows : 1 + 2 * rows + count] = scores.view(torch.int32).to(device)
    return kept


if __name__ == "__main__":
    main()
