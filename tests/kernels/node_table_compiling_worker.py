"""Compiles the kernels of `node_table` for an H100 or H200, which takes no GPU, as they would be launched, and writes
what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import random
import sys

import random_tables
import torch
from compiling import Compiling
from examples import is_full
from random_tables import CASES, Case, assign_slots, given_for, random_verdicts, table_for

from tree_kernels.node_table import triton_backend as _triton_node_table
from tree_kernels.node_table import triton_recycling as _triton_recycling
from tree_kernels.verification import keep_accepted
from tree_kernels.verification import triton_move as _triton_move

KERNELS = ("_choose_rows_kernel", "_report_kernel", "lay_out_kernel", "copy_tables_kernel")
RECYCLING = ("likeliest_kernel", "enter_kernel")
VOCABULARY = 49152
MAX_SEQUENCES = 256


def launch(case: Case, needed: dict[str, int]) -> list[str]:
    """All that is launched around a pass, after warming up. What was not compiled by then."""
    given = given_for(case, 0)
    table, verdicts = table_for(case, given.tokens, "triton"), random_verdicts(given.step, 3, random.Random(0))
    table.warm_up(given.step)
    warmed = set(needed)
    assign_slots(table, given.table_slots, given.tables)
    table.choose_rows(given.step, given.pending, given.moves)
    step = given.step
    keep_accepted(table.tokens, step.token_ids, step.slots, step.parameters, verdicts, "triton")
    table.recycle(
        given.step, torch.zeros(len(given.step.token_ids), VOCABULARY, dtype=torch.bfloat16), VOCABULARY, verdicts
    )
    table.report_and_choose_rows(given.step, verdicts)
    table.report(given.step, verdicts)
    return sorted(needed.keys() - warmed)


def main() -> None:
    needed: dict[str, int] = {}
    for name in KERNELS:
        setattr(_triton_node_table, name, Compiling(getattr(_triton_node_table, name), needed))
    _triton_move.keep_kernel = Compiling(_triton_move.keep_kernel, needed)
    for name in RECYCLING:
        setattr(_triton_recycling, name, Compiling(getattr(_triton_recycling, name), needed))
    random_tables.MAX_SEQUENCES = MAX_SEQUENCES
    # One sequence and several, with and without lookup, recycling, and as many as run at once on a GPU.
    more = (CASES[4], CASES[7]) if is_full() else ()
    cases = (CASES[0], *more, CASES[11], Case(16, [8] * MAX_SEQUENCES, 512, 40, 3))
    late = [name for case in cases for name in launch(case, needed)]
    json.dump({"needed": needed, "late": late}, sys.stdout)


if __name__ == "__main__":
    main()
