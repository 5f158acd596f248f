"""Attends for levels of trees with the Triton kernel, and by the definition, and writes errors as JSON to stdout."""

from __future__ import annotations

import json
import sys

import torch
from tail_levels import CASES, Case, inputs_of, levels_of

from tree_kernels.level_attention.reference import attend_level
from tree_kernels.level_attention.triton_backend import TritonLevelAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    json.dump({name: error_of(case) for name, case in CASES.items()}, sys.stdout)


def error_of(case: Case) -> float:
    """The largest difference, of rows that are there."""
    launched = TritonLevelAttention(DEVICE, processors=case.processors, least_keys=16)
    worst = 0.0
    for level in levels_of(case, DEVICE):
        own = inputs_of(case, level, DEVICE)
        # Again with the counters that the first launch left.
        for _ in range(2):
            found = launched.run(level, *own)
            there = torch.tensor([prefix is not None for prefix in case.prefixes], device=DEVICE)
            there = there.repeat_interleave(level.end - level.first)
            error = (found - attend_level(level, *own))[there].abs().max().item()
            worst = error if not error <= worst else worst
    return worst


if __name__ == "__main__":
    main()
