"""Steps of random sequences where a device reads them, and what moving them on makes of them."""

from __future__ import annotations

import torch

from tree_kernels.node_table import StepIntegers
from tree_kernels.verification import RECORD
from tree_kernels.verification.records import POSITION

LAST_POSITION = 40
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_SEQUENCES = 8


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """[shape] int32 from low to high - 1."""
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def random_step(
    rows: list[int],
    page_size: int,
    generator: torch.Generator,
    *,
    longest: int = LAST_POSITION,
    room: int = 4,
    rows_in_all: int = 0,
) -> StepIntegers:
    """A step of sequences with so many rows, or none, with rows of padding behind them. Prefixes are shorter than
    `longest`, and pages have `room` for as many keys more."""
    count, rows_in_all = len(rows), rows_in_all or sum(rows) + 3
    # By a generator of their own, so that no other number hangs on how many fields a record has.
    parameters = integers(torch.Generator().manual_seed(sum(rows)), 0, 1000, RECORD * count)
    # One position is about to come round.
    parameters[POSITION] = -2
    starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    prefixes = integers(generator, 0, longest, count)
    pages = (prefixes + room) // page_size + 1
    page_starts = (pages.cumsum(0) - pages).int()
    table = torch.randperm(int(pages.sum()), generator=generator).int()
    return StepIntegers(
        integers(generator, 0, 99, rows_in_all), integers(generator, 0, LAST_POSITION, rows_in_all),
        integers(generator, 0, 99, rows_in_all), parameters, starts, prefixes, page_starts, table,
        integers(generator, 0, 99, rows_in_all), integers(generator, 0, 99, rows_in_all),
        integers(generator, 0, 2, count),
    )  # fmt: skip
