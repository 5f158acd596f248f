"""What the device said of passes whose rows it chose, as the host reads it."""

from __future__ import annotations

import pytest
import torch

from target_service.core.sequence import DevicePass
from target_service.execution.device_rows import LaidOut, TableStep
from tree_kernels.node_table import NodeTable
from tree_kernels.node_table.layout import PROSPECTS, REPORT, REPORT_ROWS, REPORT_TOKENS

MAX_SEQUENCES, MAX_PASSES = 3, 4
UNIT = 1024
NO_PROSPECTS = (0,) * len(PROSPECTS)


@pytest.fixture
def table() -> NodeTable:
    tokens = torch.zeros(64, dtype=torch.int32)
    table = NodeTable(tokens, 16, 99, max_sequences=MAX_SEQUENCES, max_passes=MAX_PASSES, backend="torch")
    # What lies behind tokens and rows means nothing.
    table.reports.random_(-9, 1 << 20)
    return table


def room() -> torch.Tensor:
    """Room on the host for a step's reports."""
    return torch.zeros(MAX_SEQUENCES, MAX_PASSES, REPORT, dtype=torch.int32)


def say(
    table: NodeTable,
    place: int,
    turn: int,
    figures: tuple[int, ...],
    tokens: tuple[int, ...],
    rows: tuple[int, ...],
    prospects: tuple[int, ...] = NO_PROSPECTS,
) -> None:
    """`figures`: accepted, drafted, of the table, promised, first row, accepted of the table, promised of it."""
    assert figures[0] == len(rows) == len(tokens) - 1
    reports = table.reports[place, turn]
    every = torch.tensor((*figures, *prospects), dtype=torch.int32)
    reports[: len(every)] = every
    reports[REPORT_TOKENS : REPORT_TOKENS + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    reports[REPORT_ROWS : REPORT_ROWS + len(rows)] = torch.tensor(rows, dtype=torch.int32)


def test_passes_become_outcomes(table: NodeTable) -> None:
    prospects = (512, 1024, 1536, 2048, 2560, 3072)
    say(table, 0, 0, (2, 7, 5, 1536, 0, 1, 1024), (40, 41, 42), (1, 4), prospects)
    say(table, 0, 1, (0, 7, 0, 256, 2, 0, 0), (43,), ())
    say(table, 1, 0, (0, 0, 0, 0, 8, 0, 0), (50,), ())
    say(table, 1, 1, (1, 3, 3, 100, 10, 1, 100), (51, 52), (2,))
    first, second = TableStep(2, 2, table, room()).outcomes()
    assert first is not None and second is not None
    assert (first.walk.accepted_rows, first.walk.next_token, first.following) == ((), 40, (41, 42, 43))
    assert (second.walk.accepted_rows, second.walk.next_token, second.following) == ((), 50, (51, 52))
    nothing = (0.0,) * len(PROSPECTS)
    assert first.device_passes == (
        DevicePass(7, 5, 2, 1, 1.5, 1.0, (0.5, 1.0, 1.5, 2.0, 2.5, 3.0), 0, (1, 4)),
        DevicePass(7, 0, 0, 0, 0.25, 0.0, nothing, 2, ()),
    )
    assert second.device_passes[1].path == (2,) and second.device_passes[1].expected == 100 / UNIT
    assert (first.passes, first.accepted, tuple(one.accepted for one in first.device_passes)) == (2, 2, (2, 0))
    assert [one.drafted for one in first.device_passes] == [7, 7]
    assert (second.passes, second.accepted, tuple(one.accepted for one in second.device_passes)) == (2, 1, (0, 1))
    # Nobody asked for them.
    assert first.logprobs == second.logprobs == ()


def test_a_sequence_that_reads_says_a_token_at_its_end(table: NodeTable) -> None:
    say(table, 0, 0, (0, 30, 9, 0, 0, 0, 0), (77,), ())
    say(table, 1, 0, (0, 8, 9, 0, 31, 0, 0), (-1,), ())
    say(table, 2, 0, (1, 3, 3, 100, 40, 1, 100), (51, 52), (2,))
    host = room()
    first, second, third = TableStep(3, 1, table, host, laid_out=(LaidOut(0), None)).outcomes()
    assert first is not None and third is not None and second is None
    # Nothing was drafted for it.
    assert (first.walk.next_token, first.following, first.device_passes, first.passes) == (77, (), (), 1)
    assert (third.walk.next_token, third.following, third.device_passes[0].path) == (51, (52,), (2,))


def test_the_deepest_path_fits(table: NodeTable) -> None:
    most = REPORT - REPORT_ROWS
    tokens, rows = tuple(range(100, 101 + most)), tuple(range(1, 1 + most))
    say(table, 2, 0, (most, 63, 63, 9999, 5, most, 9999), tokens, rows)
    *_, outcome = TableStep(3, 1, table, room()).outcomes()
    assert outcome is not None and (outcome.walk.next_token, *outcome.following) == tokens
    assert outcome.device_passes[0].path == rows


def test_what_was_said_outlives_the_next_launch(table: NodeTable) -> None:
    """Its result is good until the next but one."""
    hosts = [room(), room()]
    steps = []
    for turn in range(2):
        say(table, 0, 0, (0, 3, 1, 0, 0, 0, 0), (60 + turn,), ())
        steps.append(TableStep(1, 1, table, hosts[turn]))
    outcomes = [step.outcomes()[0] for step in steps]
    assert [outcome and outcome.walk.next_token for outcome in outcomes] == [60, 61]


def test_without_a_gpu_it_has_ended_when_it_was_launched(table: NodeTable) -> None:
    say(table, 0, 0, (0, 0, 0, 0, 0, 0, 0), (1,), ())
    step = TableStep(1, 1, table, room())
    step.wait()
    assert step.ended() and step.can_launch_before_results and not step.on_device and step.span is None
