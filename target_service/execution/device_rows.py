"""Passes whose rows the device chose from its node tables: the host reads the results of all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.sampling import TokenLogprobs
from target_service.core.sequence import DevicePass
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import CopiedLater
from target_service.execution.pass_extras import PassExtras, WantedExtras
from target_service.execution.prompt_scores import ScoredPrompt, ScoresUnderWay
from target_service.grammars.row_masks import TreeRows
from target_service.sampling.verifier import Verified
from tree_kernels.device_event import DeviceEvent
from tree_kernels.node_table import NodeTable, StepIntegers
from tree_kernels.node_table.layout import EXPECTED_UNIT, PROSPECTS, REPORT_ROWS, REPORT_TOKENS, ReportField
from tree_kernels.verification import Verdicts, Walk

Ints = npt.NDArray[np.int32]
_NO_EXTRAS = WantedExtras(lossy=False, logprobs=None)


class LaidOut(NamedTuple):
    """A tree of such a pass that the host laid out."""

    root_row: int


class ChosenRows:
    """Room on the host for the rows of one pass, used again for every pass."""

    def __init__(self, max_sequences: int, max_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # [3, max_rows or more] int32: tokens, parents, and where each sequence's rows begin.
        self._host = torch.zeros(3, max(max_rows, max_sequences + 1), dtype=torch.int32, pin_memory=on_gpu)
        self._copied = DeviceEvent(on_gpu=on_gpu)
        self._lists: tuple[list[int], list[int], list[int]] | None = None
        self.most = 0  # rows of the pass

    def copy(self, step: StepIntegers) -> None:
        """Copy the rows of a pass behind what chooses them, and before it runs. Does not wait."""
        for own, integers in zip(self._host, (step.token_ids, step.parents, step.query_starts), strict=True):
            own[: len(integers)].copy_(integers, non_blocking=True)
        self._copied.record()
        self.most, self._lists = len(step.token_ids), None

    def of(self, place: int) -> tuple[int, TreeRows]:
        """The first row of the `place`th sequence of the pass, and its rows. Waits until they are chosen."""
        if self._lists is None:
            self._copied.wait()
            token_ids, parents, starts = self._host.tolist()
            self._lists = token_ids, parents, starts
        token_ids, parents, starts = self._lists
        first, end = starts[place : place + 2]
        return first, TreeRows(token_ids[first:end], parents[first:end])


@dataclass(eq=False)
class TableStep(CopiedLater):
    """A step of one or several passes whose rows the device chooses; see `Launched`. Its result is valid until the next
    but one is launched."""

    sequences: int
    passes: int
    table: NodeTable
    host: Tensor  # [max_sequences, max_passes, REPORT], receives the table's reports of this step's passes
    span: DeviceSpan | None = None
    # Of the first sequences, whose rows the host laid out; None where no token follows, as the prompt goes on.
    laid_out: SequenceOf[LaidOut | None] = ()
    verdicts: Verdicts | None = None  # on the host, of this step; None where the host laid out no drafted row
    wanted: SequenceOf[WantedExtras] = ()
    extras: SequenceOf[PassExtras] = ()  # of each pass
    prompts: list[ScoresUnderWay] = field(default_factory=list)
    errors: Mapping[int, OutriderError] = field(default_factory=dict)  # by place, why a sequence cannot go on
    can_launch_before_results = True

    def __post_init__(self) -> None:
        self._reports = self.host[: self.sequences]
        self._reports.copy_(self.table.reports[: self.sequences], non_blocking=True)
        super().__init__(self.table.reports)

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`."""
        return [each.read() for each in self.prompts]

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        reports, laid_out = self._reports.numpy(), len(self.laid_out)
        outcomes: list[Verified | None] = []
        for place, (token, tree) in enumerate(
            zip(reports[:laid_out, 0, REPORT_TOKENS].tolist(), self.laid_out, strict=True)
        ):
            outcomes.append(None if tree is None else self._verified(place, token, tree))
        for place, (figures, made, rows) in enumerate(_read(reports[laid_out:, : self.passes]), start=laid_out):
            passes, tokens = tuple(map(_pass_of, figures, rows)), list[int]()
            for one, of_pass in zip(passes, made, strict=True):
                tokens += of_pass[: one.accepted + 1]
            lossy, logprobs = self._extras_of(place, passes)
            error = self.errors.get(place)
            outcomes.append(Verified(Walk((), tokens[0]), logprobs, tuple(tokens[1:]), passes, lossy, error))
        return outcomes

    def _wanted_of(self, place: int) -> WantedExtras:
        return self.wanted[place] if self.wanted else _NO_EXTRAS

    def _verified(self, place: int, token: int, tree: LaidOut) -> Verified:
        """The outcome of a tree that the host laid out."""
        rows: tuple[int, ...] = ()
        if self.verdicts is not None:
            count = int(self.verdicts.accepted_counts[place])
            rows = tuple(self.verdicts.accepted_rows[tree.root_row : tree.root_row + count].tolist())
        wanted, logprobs, lossy = self._wanted_of(place), tuple[TokenLogprobs, ...](), tuple[bool, ...]()
        if wanted.logprobs is not None:
            logprobs = self.extras[0].logprobs_of(tree.root_row, len(rows), wanted.logprobs)
        if wanted.lossy:
            lossy = self.extras[0].lossy_of(tree.root_row, len(rows))
        return Verified(Walk(rows, token), logprobs, lossy=lossy, error=self.errors.get(place))

    def _extras_of(
        self, place: int, passes: SequenceOf[DevicePass]
    ) -> tuple[tuple[bool, ...], tuple[TokenLogprobs, ...]]:
        """What passes of a sequence brought that only some requests need."""
        wanted = self._wanted_of(place)
        lossy, logprobs = list[bool](), list[TokenLogprobs]()
        if wanted.lossy or wanted.logprobs is not None:
            for one, extras in zip(passes, self.extras, strict=True):
                if wanted.lossy:
                    lossy += extras.lossy_of(one.root_row, one.accepted)
                logprobs += extras.logprobs_of(one.root_row, one.accepted, wanted.logprobs)
        return tuple(lossy), tuple(logprobs)


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
    accepted, drafted, from_table, expected, root_row, accepted_from_table, expected_from_table, *others = figures
    return DevicePass(
        drafted, from_table, accepted, accepted_from_table, expected / EXPECTED_UNIT,
        expected_from_table / EXPECTED_UNIT, tuple([each / EXPECTED_UNIT for each in others[: len(PROSPECTS)]]),
        root_row, tuple(rows[:accepted]),
    )  # fmt: skip
