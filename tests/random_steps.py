"""Steps of random sequences where a device reads them, and what moving them on makes of them."""

from __future__ import annotations

import itertools
from typing import Literal

import torch

from tree_kernels.device_verification import Verdicts
from tree_kernels.feeding import StepIntegers
from tree_kernels.lookup import DeviceLookup
from tree_kernels.verification_records import MODE, POSITION, RECORD, ROWS, Mode

LAST_POSITION = 40
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_SEQUENCES = 8
# (page size, rows that each sequence may have, rows of all, keys of the longest, tokens in use): few tokens make many
# runs.
LOOKUPS = (
    (1, [4], 4, 40, 3),
    (4, [8, 0, 8, 1], 16, 90, 2),
    (16, [16] * 6, 64, 700, 4),
    (16, [16] * 6, 32, 700, 20),
    (16, [2, 16, 5], 16, 2500, 50),
    (64, [16, 16], 32, 9000, 2),
    (16, [16, 16], 64, 30, 1000),
    (16, [16, 1, 16, 0, 16, 9, 3], 8, 300, 6),
)


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
    parameters = integers(generator, 0, 1000, RECORD * count)
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
        integers(generator, 0, 99, rows_in_all),
    )  # fmt: skip


# Page size, rows, rows in all, longest, vocabulary.
Case = tuple[int, list[int], int, int, int]


def inputs(case: Case, seed: int) -> tuple[StepIntegers, dict[str, torch.Tensor]]:
    """A step of roots, and what its tokens are found in; the same in every process."""
    page_size, limits, rows_in_all, longest, vocabulary = case
    generator = torch.Generator().manual_seed(seed)
    roots = [min(1, limit) for limit in limits]
    step = random_step(roots, page_size, generator, longest=longest, room=80, rows_in_all=rows_in_all)
    records = step.parameters.view(-1, RECORD)
    records[:, MODE] = torch.arange(len(limits)).int() % 2
    records[0, MODE] = Mode.COUPLED
    records[:, ROWS] = torch.tensor(limits, dtype=torch.int32)
    first = list(range(sum(roots)))
    step.token_ids[first] = integers(generator, 0, vocabulary, len(first))
    # Some are awaited.
    step.token_ids[first[::2]] = -1 - torch.randperm(MAX_SEQUENCES, generator=generator)[: len(first[::2])].int()
    slots = (int(step.page_table.max()) + 1) * page_size
    return step, {
        "tokens": integers(generator, 0, vocabulary, slots),
        "awaited": integers(generator, 0, vocabulary, MAX_SEQUENCES),
        "moves": integers(generator, 0, 4, MAX_SEQUENCES),
        # Of the rows that there will be, and next tokens, of two passes.
        "accepted": torch.rand(2, MAX_SEQUENCES, generator=generator),
        "next": integers(generator, 0, vocabulary, 2, MAX_SEQUENCES),
    }


def looked_up(case: Case, seed: int, backend: Literal["triton", "torch"]) -> list[object]:
    """The step after `begin`, and after each of two `go_on`, with what was said by then."""
    step, given = inputs(case, seed)
    device = DEVICE if backend == "triton" else torch.device("cpu")
    step = StepIntegers(*(getattr(step, name).to(device) for name in step.__slots__))
    given = {name: tensor.to(device) for name, tensor in given.items()}
    lookup = DeviceLookup(
        given["tokens"], case[0], LAST_POSITION, max_sequences=MAX_SEQUENCES, max_passes=2, backend=backend
    )
    # Left over from a launch before.
    lookup.accepted.copy_(given["moves"])
    lookup.passes.fill_(1)
    found: list[object] = []

    def note() -> None:
        found.append([getattr(step, name).tolist() for name in step.__slots__])

    lookup.begin(step, given["awaited"], given["moves"] if seed % 2 else None)
    note()
    verdicts = Verdicts.over(torch.zeros(2 * MAX_SEQUENCES + 4, dtype=torch.int32, device=device), MAX_SEQUENCES)
    count = len(step.prefix_lengths)
    for one in range(2):
        rows = step.query_starts.diff()
        verdicts.accepted_counts[:count] = (given["accepted"][one][:count] * rows).int()
        verdicts.next_tokens.copy_(given["next"][one])
        lookup.go_on(step, verdicts)
        note()
    said = lookup.said[:count].tolist()
    # What lies behind the last token of a pass means nothing.
    found.append([[one[: 3 + one[0]] for one in passes] for passes in said])
    found += [lookup.passes[:count].tolist(), lookup.accepted[:count].tolist()]
    keep_accepted(lookup, step, torch.Generator().manual_seed(seed))
    return [*found, lookup.tokens.tolist()]


def keep_accepted(lookup: DeviceLookup, step: StepIntegers, generator: torch.Generator) -> None:
    """Accept some rows of every sequence, and keep their tokens."""
    starts = step.query_starts.tolist()
    verdicts = Verdicts.over(torch.zeros(2 * MAX_SEQUENCES + starts[-1], dtype=torch.int32), MAX_SEQUENCES)
    step.parameters.view(-1, RECORD)[:, 0] = step.query_starts[:-1]
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        rows = [row for row in range(1, end - first) if torch.rand(1, generator=generator) < 0.5]
        verdicts.accepted_counts[b] = len(rows)
        verdicts.accepted_rows[first : first + len(rows)] = torch.tensor(rows, dtype=torch.int32)
    on_device = Verdicts.over(verdicts.tensor.to(lookup.tokens.device), MAX_SEQUENCES)
    lookup.keep_accepted(step.token_ids, step.slots, step.parameters, on_device)
