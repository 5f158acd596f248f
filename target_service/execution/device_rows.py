"""Passes whose rows the device chose from its node tables: the host reads the results of all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from target_service.core.sequence import DevicePass
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import CopiedLater
from target_service.sampling.verifier import Verified
from tree_kernels.node_table import EXPECTED_UNIT, PROSPECTS, REPORT, REPORT_ROWS, REPORT_TOKENS, Figure, NodeTable
from tree_kernels.verification import Walk

Ints = npt.NDArray[np.int32]

# The figures of a report that are counts, in the order of `DevicePass`.
_COUNTS = itemgetter(
    Figure.DRAFTED,
    Figure.DRAFTED_FROM_TABLE,
    Figure.ACCEPTED,
    Figure.ACCEPTED_FROM_TABLE,
    Figure.EXPECTED,
    Figure.EXPECTED_FROM_TABLE,
    Figure.AGE,
    Figure.FIRST_ROW,
)
_PROSPECTS = slice(Figure.FIRST_PROSPECT, Figure.FIRST_PROSPECT + len(PROSPECTS))


def room_for_reports(turns: int, max_sequences: int, max_passes: int, *, on_gpu: bool) -> Tensor:
    """[turns, max_sequences, max_passes, REPORT] int32 on the host, as `NodeTable.reports` has them."""
    return torch.zeros(turns, max_sequences, max_passes, REPORT, dtype=torch.int32, pin_memory=on_gpu)


class TableStep(CopiedLater):
    """A step of one or several passes whose rows the device chooses; see `Launched`. Its result is valid until the next
    but one is launched."""

    followable = True

    def __init__(
        self,
        sequences: int,
        passes: int,
        table: NodeTable,
        host: Tensor,
        span: DeviceSpan | None = None,
        reading: SequenceOf[bool] = (),
        typical: SequenceOf[bool] = (),
        lossy: SequenceOf[Tensor | None] = (),
    ) -> None:
        """`host` [max_sequences, max_passes, REPORT] receives the table's reports of this step's passes. The first
        sequences read their prompts: `reading` is True for those that come to its end, which a token follows.

        `typical` is True for sequences that are verified by typical acceptance. If any is, `lossy` has for each pass
        [max_rows] int32, which receives what `DeviceVerifier.lossy_rows` had."""
        self.span = span
        self._passes = passes
        self._reading = reading
        self._typical = typical
        self._lossy = lossy
        self._reports = host[:sequences]
        self._reports.copy_(table.reports[:sequences], non_blocking=True)
        super().__init__(table.reports)

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        reports, reading = self._reports.numpy(), len(self._reading)
        outcomes: list[Verified | None] = []
        for token, ends in zip(reports[:reading, 0, REPORT_TOKENS].tolist(), self._reading, strict=True):
            outcomes.append(Verified(Walk((), token), ()) if ends else None)
        for place, passes in enumerate(_passes_of(reports[reading:, : self._passes]), start=reading):
            tokens: list[int] = []
            lossy: list[bool] = []
            for number, (one, made) in enumerate(passes):
                tokens += made
                lossy += self._lossy_rows(place, number, one.root_row, one.accepted)
            device_passes = tuple([one for one, _ in passes])
            outcomes.append(Verified(Walk((), tokens[0]), (), tuple(tokens[1:]), device_passes, tuple(lossy)))
        return outcomes

    def _lossy_rows(self, place: int, number: int, root_row: int, count: int) -> list[bool]:
        """Of the rows that a pass accepted of a sequence, whether the model would have drawn another token."""
        rows = self._lossy[number] if self._lossy else None
        if rows is None or not self._typical[place]:
            return []
        return [bool(lossy) for lossy in rows[root_row : root_row + count].tolist()]


def _passes_of(reports: Ints) -> Iterator[list[tuple[DevicePass, list[int]]]]:
    """Of each sequence its passes and the tokens that these made, from reports [B, P, REPORT]: all are read at once,
    since reading an integer from an array takes longer than what is done with it."""
    figures = reports[:, :, :REPORT_TOKENS].tolist()
    accepted_most = max([one[Figure.ACCEPTED] for passes in figures for one in passes], default=0)
    tokens = reports[:, :, REPORT_TOKENS : REPORT_TOKENS + accepted_most + 1].tolist()
    rows = reports[:, :, REPORT_ROWS : REPORT_ROWS + accepted_most].tolist()
    for of_sequence in zip(figures, tokens, rows, strict=True):
        yield [_pass_of(*of_pass) for of_pass in zip(*of_sequence, strict=True)]


def _pass_of(figures: list[int], tokens: list[int], rows: list[int]) -> tuple[DevicePass, list[int]]:
    """A pass and its tokens; behind these, and behind the accepted rows, there may be others."""
    drafted, from_table, accepted, accepted_from_table, expected, expected_from_table, age, root_row = _COUNTS(figures)
    prospects = tuple([each / EXPECTED_UNIT for each in figures[_PROSPECTS]])
    one = DevicePass(
        drafted, from_table, accepted, accepted_from_table, expected / EXPECTED_UNIT,
        expected_from_table / EXPECTED_UNIT, prospects, age, root_row, tuple(rows[:accepted]),
    )  # fmt: skip
    return one, tokens[: accepted + 1]
