"""Passes whose rows the device chose from its node tables: the host reads the results of all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from target_service.core.sequence import DevicePass
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import CopiedLater
from target_service.sampling.verifier import Verified
from tree_kernels.node_table import NodeTable
from tree_kernels.node_table.layout import EXPECTED_UNIT, PROSPECTS, REPORT_ROWS, REPORT_TOKENS, ReportField
from tree_kernels.verification import Walk

Ints = npt.NDArray[np.int32]


@dataclass(eq=False)
class TableStep(CopiedLater):
    """A step of one or several passes whose rows the device chooses; see `Launched`. Its result is valid until the next
    but one is launched."""

    sequences: int
    passes: int
    table: NodeTable
    host: Tensor  # [max_sequences, max_passes, REPORT], receives the table's reports of this step's passes
    span: DeviceSpan | None = None
    # Of the first sequences, which read their prompts: whether they come to its end, which a token follows.
    prefilling: SequenceOf[bool] = ()
    typical: SequenceOf[bool] = ()  # whether sequences are verified by typical acceptance
    # If any is, for each pass [max_rows] int32, which receives what `DeviceVerifier.lossy_rows` had.
    lossy: SequenceOf[Tensor | None] = ()
    can_launch_before_results = True

    def __post_init__(self) -> None:
        self._reports = self.host[: self.sequences]
        self._reports.copy_(self.table.reports[: self.sequences], non_blocking=True)
        super().__init__(self.table.reports)

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        reports, prefilling = self._reports.numpy(), len(self.prefilling)
        outcomes: list[Verified | None] = []
        for token, ends in zip(reports[:prefilling, 0, REPORT_TOKENS].tolist(), self.prefilling, strict=True):
            outcomes.append(Verified(Walk((), token), ()) if ends else None)
        for place, (figures, made, rows) in enumerate(_read(reports[prefilling:, : self.passes]), start=prefilling):
            passes, tokens = tuple(map(_pass_of, figures, rows)), list[int]()
            for one, of_pass in zip(passes, made, strict=True):
                tokens += of_pass[: one.accepted + 1]
            lossy = self._lossy_rows(passes) if self.lossy and self.typical[place] else ()
            outcomes.append(Verified(Walk((), tokens[0]), (), tuple(tokens[1:]), passes, lossy))
        return outcomes

    def _lossy_rows(self, passes: SequenceOf[DevicePass]) -> tuple[bool, ...]:
        """Of the rows that passes accepted of a sequence, whether the model would have drawn another token."""
        lossy: list[bool] = []
        for one, rows in zip(passes, self.lossy, strict=True):
            assert rows is not None, "a sequence is verified by typical acceptance"
            lossy += [bool(each) for each in rows[one.root_row : one.root_row + one.accepted].tolist()]
        return tuple(lossy)


def _read(reports: Ints) -> Iterator[tuple[list[list[int]], list[list[int]], list[list[int]]]]:
    """Of each sequence the figures, tokens and accepted rows of its passes, from reports [B, P, REPORT]; behind a
    pass's tokens and rows there may be others. All are read at once: to read one integer from an array takes longer
    than what is done with it."""
    figures = reports[:, :, :REPORT_TOKENS].tolist()
    most = max([one[ReportField.ACCEPTED] for passes in figures for one in passes], default=0)
    tokens = reports[:, :, REPORT_TOKENS : REPORT_TOKENS + most + 1].tolist()
    return zip(figures, tokens, reports[:, :, REPORT_ROWS : REPORT_ROWS + most].tolist(), strict=True)


def _pass_of(figures: list[int], rows: list[int]) -> DevicePass:
    # In the order of `ReportField`.
    accepted, drafted, from_table, expected, root_row, accepted_from_table, age, expected_from_table, *others = figures
    return DevicePass(
        drafted, from_table, accepted, accepted_from_table, expected / EXPECTED_UNIT,
        expected_from_table / EXPECTED_UNIT, tuple([each / EXPECTED_UNIT for each in others[: len(PROSPECTS)]]), age,
        root_row, tuple(rows[:accepted]),
    )  # fmt: skip
