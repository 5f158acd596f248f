"""Passes whose rows the device chose from its node tables: what they said, read by the host once for all."""

from __future__ import annotations

import torch
from torch import Tensor

from target_service.core.sequence import DevicePass
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import CopiedLater
from target_service.sampling.verifier import Verified
from tree_kernels.node_table import PROSPECTS, SAID, SAID_ROWS, SAID_TOKENS, NodeTable
from tree_kernels.verification import Walk

# Columns of what is said of a pass; see `NodeTable`.
ACCEPTED, DRAFTED, FROM_TABLE, PROMISED, FIRST_ROW, ACCEPTED_FROM_TABLE, AGE, PROMISED_FROM_TABLE = range(8)
_PROSPECTS = slice(8, 8 + len(PROSPECTS))
# The promise is in this share of a token.
_PROMISE_UNIT = 1024


def room_for_said(turns: int, max_sequences: int, max_passes: int, *, on_gpu: bool) -> Tensor:
    """[turns, max_sequences, max_passes, SAID] int32 on the host, as `NodeTable.said` has them."""
    return torch.zeros(turns, max_sequences, max_passes, SAID, dtype=torch.int32, pin_memory=on_gpu)


class TableStep(CopiedLater):
    """A step of one or several passes whose rows the device chooses; see `launch.Launched`. Its result is good until
    the next but one is launched."""

    followable = True

    def __init__(
        self, sequences: int, passes: int, table: NodeTable, host: Tensor, span: DeviceSpan | None = None
    ) -> None:
        """`host` [max_sequences, max_passes, SAID] gets what `table` says of this step's passes."""
        self.span = span
        self._passes = passes
        self._said = host[:sequences]
        self._said.copy_(table.said[:sequences], non_blocking=True)
        super().__init__(table.said)

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        said = self._said.numpy()
        outcomes: list[Verified | None] = []
        for sequence in said[:, : self._passes]:
            tokens: list[int] = []
            passes: list[DevicePass] = []
            for one in sequence:
                figures = one[:SAID_TOKENS].tolist()
                count = figures[ACCEPTED]
                tokens += one[SAID_TOKENS : SAID_TOKENS + count + 1].tolist()
                path = tuple(one[SAID_ROWS : SAID_ROWS + count].tolist())
                passes.append(_pass_of(figures, path))
            first, *following = tokens
            outcomes.append(Verified(Walk((), first), (), tuple(following), tuple(passes)))
        return outcomes


def _pass_of(figures: list[int], path: tuple[int, ...]) -> DevicePass:
    return DevicePass(
        drafted=figures[DRAFTED],
        drafted_from_table=figures[FROM_TABLE],
        accepted=figures[ACCEPTED],
        accepted_from_table=figures[ACCEPTED_FROM_TABLE],
        promised=figures[PROMISED] / _PROMISE_UNIT,
        promised_from_table=figures[PROMISED_FROM_TABLE] / _PROMISE_UNIT,
        prospects=tuple([promise / _PROMISE_UNIT for promise in figures[_PROSPECTS]]),
        age=figures[AGE],
        root_row=figures[FIRST_ROW],
        path=path,
    )
