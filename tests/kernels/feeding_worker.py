"""Fills pending tokens with the Triton kernel and writes what it made of them as JSON to standard output."""

from __future__ import annotations

import json
import sys

import torch
from random_steps import LAST_POSITION, random_step

from tree_kernels.node_table import StepIntegers
from tree_kernels.node_table.triton_feeding import advance_one_token, fill, shift_by_accepted
from tree_kernels.verification import RECORD, Mode
from tree_kernels.verification.records import MODE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    pending = torch.randint(0, 50_000, (64,), generator=generator, dtype=torch.int32)
    found = []
    for rows in (1, 5, 255, 256, 257, 600):
        token_ids = torch.randint(-64, 50_000, (rows,), generator=generator, dtype=torch.int32)
        # Half of them awaited, the first and the last among those that may be.
        token_ids[::2] = torch.randint(-64, 0, (len(token_ids[::2]),), generator=generator, dtype=torch.int32)
        token_ids[0] = -1 if rows % 2 else -64
        filled = fill(token_ids.to(DEVICE), pending.to(DEVICE))
        found.append({"token_ids": token_ids.tolist(), "filled": filled.tolist()})
    said = {"awaited": pending.tolist(), "found": found, "advanced": advanced(), "moved_on": shifted_by_accepted()}
    json.dump(said, sys.stdout)


def advanced() -> list[dict[str, list[list[int]]]]:
    """Steps before and after they were moved on three times, each as the tensors of `StepIntegers` in order."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for page_size, rows in ((1, [1]), (4, [1, 0, 1, 1]), (16, [1] * 300)):
        step = random_step(rows, page_size, generator)
        before = [getattr(step, name).tolist() for name in step.__slots__]
        moved = StepIntegers(*(getattr(step, name).to(DEVICE) for name in step.__slots__))
        for _ in range(3):
            advance_one_token(moved, page_size, LAST_POSITION)
        found.append({"before": before, "after": [getattr(moved, name).tolist() for name in moved.__slots__]})
        found[-1]["page_size"] = [[page_size]]
    return found


def shifted_by_accepted() -> list[dict[str, list[list[int]]]]:
    """Steps before and after they were moved on by what was accepted, each as the tensors of `StepIntegers` in order:
    sequences of one row that await a token or know it, of none, and of several rows."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for page_size, rows in ((1, [1]), (4, [1, 0, 1, 3, 1, 1]), (16, [1] * 300)):
        step, counts = random_step(rows, page_size, generator), torch.randint(0, 4, (300,), generator=generator)
        step.token_ids[::2] = -1 - torch.randperm(300, generator=generator)[: len(step.token_ids[::2])].int()
        step.parameters.view(-1, RECORD)[:, MODE] = torch.arange(len(rows)).int() % 3
        step.parameters[MODE] = Mode.COUPLED
        before = [getattr(step, name).tolist() for name in step.__slots__]
        moved = StepIntegers(*(getattr(step, name).to(DEVICE) for name in step.__slots__))
        shift_by_accepted(moved, counts.int().to(DEVICE), page_size, LAST_POSITION)
        found.append({"before": before, "after": [getattr(moved, name).tolist() for name in moved.__slots__]})
        found[-1] |= {"page_size": [[page_size]], "counts": [counts.tolist()]}
    return found


if __name__ == "__main__":
    main()
