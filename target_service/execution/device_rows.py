"""Passes whose rows the device chose from its node tables: the host reads the results of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from target_service.core.sequence import DevicePass
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import CopiedLater
from target_service.sampling.verifier import Verified
from tree_kernels.node_table import EXPECTED_UNIT, PROSPECTS, REPORT, REPORT_ROWS, REPORT_TOKENS, Figure, NodeTable
from tree_kernels.verification import Walk

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
        reports = self._reports.numpy()
        outcomes: list[Verified | None] = []
        for sequence, ends in zip(reports[: len(self._reading)], self._reading, strict=True):
            token = int(sequence[0, REPORT_TOKENS])
            outcomes.append(Verified(Walk((), token), ()) if ends else None)
        for place, sequence in enumerate(reports[len(self._reading) :, : self._passes], start=len(self._reading)):
            tokens: list[int] = []
            passes: list[DevicePass] = []
            lossy: list[bool] = []
            for number, one in enumerate(sequence):
                figures = one[:REPORT_TOKENS].tolist()
                count = figures[Figure.ACCEPTED]
                tokens += one[REPORT_TOKENS : REPORT_TOKENS + count + 1].tolist()
                path = tuple(one[REPORT_ROWS : REPORT_ROWS + count].tolist())
                passes.append(_pass_of(figures, path))
                lossy += self._lossy_rows(place, number, figures[Figure.FIRST_ROW], count)
            first, *following = tokens
            outcomes.append(Verified(Walk((), first), (), tuple(following), tuple(passes), tuple(lossy)))
        return outcomes

    def _lossy_rows(self, place: int, number: int, root_row: int, count: int) -> list[bool]:
        """Of the rows that a pass accepted of a sequence, whether the model would have drawn another token."""
        rows = self._lossy[number] if self._lossy else None
        if rows is None or not self._typical[place]:
            return []
        return [bool(lossy) for lossy in rows[root_row : root_row + count].tolist()]


def _pass_of(figures: list[int], path: tuple[int, ...]) -> DevicePass:
    return DevicePass(
        drafted=figures[Figure.DRAFTED],
        drafted_from_table=figures[Figure.DRAFTED_FROM_TABLE],
        accepted=figures[Figure.ACCEPTED],
        accepted_from_table=figures[Figure.ACCEPTED_FROM_TABLE],
        expected=figures[Figure.EXPECTED] / EXPECTED_UNIT,
        expected_from_table=figures[Figure.EXPECTED_FROM_TABLE] / EXPECTED_UNIT,
        prospects=tuple([expected / EXPECTED_UNIT for expected in figures[_PROSPECTS]]),
        age=figures[Figure.AGE],
        root_row=figures[Figure.FIRST_ROW],
        path=path,
    )
