"""What a runner needs of the other ranks of its model, and what the leading rank sends them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor

from outrider.processes.messages import ProcessMessage
from target_service.model.forward import ForwardInput
from tree_kernels.attention import AttentionBatch
from tree_models.in_pass import DraftingKind


class RunPass(ProcessMessage, frozen=True):
    """Run an eager pass, whose token ids are shared next. `logit_rows` are those whose logits are computed, None for
    all."""

    positions: tuple[int, ...]
    slots: tuple[int, ...]
    query_starts: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    pages: list[list[int]]
    page_size: int
    parents: tuple[tuple[int, ...] | None, ...]
    state_slots: tuple[int, ...]
    logit_rows: tuple[int, ...] | None

    @classmethod
    def of(cls, batch: ForwardInput, logit_rows: Sequence[int] | None) -> RunPass:
        """A pass with the logits of these rows, None for all."""
        attention = batch.attention
        return cls(
            batch.positions,
            batch.slots,
            attention.query_starts,
            attention.prefix_lengths,
            [list(held) for held in attention.pages],
            attention.page_size,
            attention.parents,
            batch.state_slots,
            None if logit_rows is None else tuple(logit_rows),
        )

    @property
    def batch(self) -> ForwardInput:
        """The pass, with tokens of zero."""
        pages = tuple(tuple(held) for held in self.pages)
        attention = AttentionBatch(self.query_starts, self.prefix_lengths, pages, self.page_size, self.parents)
        rows, states = ((0,) * len(self.positions), self.positions, self.slots), self.state_slots
        return ForwardInput(*rows, attention, self.logit_rows or (), state_slots=states)


class MoveRows(ProcessMessage, frozen=True):
    """Move keys and values between slots, as `ModelRunner.move_rows` does."""

    sources: list[int]
    targets: list[int]


class ChangeStates(ProcessMessage, frozen=True):
    """Call a method of `StatesMirror` of the recurrent states."""

    method: Literal["copy_slot", "pair_slots", "part_slots", "move_nodes"]
    arguments: list[int | list[int]]


class PrepareDrafting(ProcessMessage, frozen=True):
    """Prepare the drafter, of which each rank has a part, for passes of at most so many rows."""

    max_rows: int


class MoveAccepted(ProcessMessage, frozen=True):
    """Move what a pass wrote of accepted rows, as `ModelRunner.move_accepted` does, by `verdicts` integers, which are
    shared next."""

    max_sequences: int
    verdicts: int
    # Of the captured pass; zeros for the last eager one.
    rows: int = 0
    sequences: int = 0
    common: bool = False
    # Of an eager pass: as many integers are shared before the verdicts.
    parameters: int = 0
    # What the drafter does around that, of which each rank has a part; None where the others have none.
    drafting: DraftingKind | None = None


class CapturePass(ProcessMessage, frozen=True):
    """Capture passes of a size, a `Bucket`. A pass of it is run on the way."""

    rows: int
    sequences: int
    common: bool


class ReplayPass(ProcessMessage, frozen=True):
    """Run a captured pass, whose integers are shared by its graph; with logits of a few rows only."""

    rows: int
    sequences: int
    common: bool
    few_outputs: bool


class EmptyPass(ProcessMessage, frozen=True):
    """Let a captured pass have no sequences, so that what follows it can be captured."""

    rows: int
    sequences: int
    common: bool


class DropCaptures(ProcessMessage, frozen=True):
    """Drop captured passes and their memory."""


class UseCache(ProcessMessage, frozen=True):
    """Go on with an empty cache of so many pages."""

    num_pages: int


class CountFreeMemory(ProcessMessage, frozen=True):
    """Take part in finding the least free memory of all devices."""


class WriteWeights(ProcessMessage, frozen=True):
    """Replace the model's weights by those that were read for `RankLink.read_weights`."""


class DropWeights(ProcessMessage, frozen=True):
    """Give the memory of weights back that were read, or are being read."""


PassMessage = (
    RunPass
    | MoveRows
    | ChangeStates
    | PrepareDrafting
    | MoveAccepted
    | CapturePass
    | ReplayPass
    | EmptyPass
    | DropCaptures
    | UseCache
    | CountFreeMemory
    | WriteWeights
    | DropWeights
)


class RankLink(Protocol):
    """The ranks of a model, of which the leading one decides what is run, and the others run it too."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def leads(self) -> bool:
        """Whether this one is the leading rank."""

    def send(self, message: PassMessage) -> None:
        """Have every other rank do the same, where this one leads; else nothing."""

    def share(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the leading rank's, which has the same shape. In stream order, and in graphs."""

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""

    def alone(self) -> AbstractContextManager[None]:
        """While the block runs, nothing is sent or shared, and `least` gives this rank's number; see
        `RankGroup.alone`."""

    def expect_answers(self) -> None:
        """Have other ranks answer within a heartbeat from now on, where this one leads. Until then they may compile for
        minutes what passes launch."""

    def read_weights(self, folder: str) -> None:
        """Have every other rank read its part of a folder's weights, and wait until all have, while passes run. Raises
        `NotSupported` where one cannot."""


class LinkedStates:
    """The recurrent states of the other ranks. A `StatesMirror`."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def copy_slot(self, source: int, target: int) -> None:
        """See `StatesMirror.copy_slot`."""
        self._link.send(ChangeStates("copy_slot", [source, target]))

    def pair_slots(self, slot: int, second: int) -> None:
        """See `StatesMirror.pair_slots`."""
        self._link.send(ChangeStates("pair_slots", [slot, second]))

    def part_slots(self, slot: int, second: int, tokens: int) -> None:
        """See `StatesMirror.part_slots`."""
        self._link.send(ChangeStates("part_slots", [slot, second, tokens]))

    def move_nodes(self, slot: int, source_keys: Sequence[int], target_keys: Sequence[int]) -> None:
        """See `StatesMirror.move_nodes`."""
        self._link.send(ChangeStates("move_nodes", [slot, list(source_keys), list(target_keys)]))
