"""Runs a step that was laid out: forward, verify, and accepted keys and values into place.

`HostSteps` is the plain form, which verifies logits on the host; `device_executor.DeviceSteps` must generate the same.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from target_service.execution.batch import StepBatch, StepItem
from target_service.execution.device_time import DeviceSpan
from target_service.execution.node_tables import NodeTables
from target_service.execution.prompt_scores import ScoredPrompt, score_prompts
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.device_event import DeviceEvent
from tree_kernels.recurrence import RecurrentStates

# See `Steps.launch`.
Ready = Callable[[], None]


class Launched(Protocol):
    """A step under way."""

    span: DeviceSpan | None  # when the device is busy with it, if the host is free meanwhile

    @property
    def on_device(self) -> bool:
        """Whether the host is free while it runs."""

    @property
    def can_launch_before_results(self) -> bool:
        """Whether a step that reads its tokens may be launched before `outcomes` is called."""

    @property
    def awaits_masks(self) -> bool:
        """Whether the forward pass alone was launched, and `mask` is to be called: grammars mask rows of it."""

    def mask(self, under_way: SequenceOf[bool]) -> None:
        """Compute the masks of its rows, and launch what follows the forward pass, before any other step is launched.
        The tokens of the step before are committed; `under_way` are the sequences, by place in the batch, that have not
        ended with them."""

    def wait(self) -> None:
        """Wait until its results are on the host."""

    def ended(self) -> bool:
        """Whether its results are on the host."""

    def outcomes(self) -> list[Verified | None]:
        """The outcome of each tree; None for prompts that are still being read. Waits for the results. The keys and
        values of accepted rows are in place then, or will be before any later step reads them."""

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """The log-probabilities of prompts that the step read, once `wait` has returned."""


class LaunchedWhole:
    """A step that was launched with all that it needs; see `Launched`."""

    awaits_masks = False

    def mask(self, under_way: SequenceOf[bool]) -> None:
        """Never called."""
        raise AssertionError(f"a step of {len(under_way)} sequences has what it needs")


class CopiedLater(LaunchedWhole):
    """Results of a launch on their way to the host, see `Launched`: there once the device has done what is queued
    now."""

    def __init__(self, source: Tensor) -> None:
        """All copies have been queued; copies of a `source` on a GPU are asynchronous."""
        self.on_device = source.is_cuda
        self._done = DeviceEvent(on_gpu=source.is_cuda)
        self._done.record()

    def ended(self) -> bool:
        return self._done.reached()

    def wait(self) -> None:
        self._done.wait()


class Steps(Protocol):
    """An executor: what the engine launches its steps with."""

    @property
    def in_background(self) -> bool:
        """Whether the host goes on while a step runs."""

    def use_pause(self) -> bool:
        """Once called in a pause that has lasted, do for some milliseconds what later steps would wait for, or for
        longer where the pause is long. A pause begins with the first call since a step was launched; before the first
        step all time is one. No step is under way. False where nothing is left to be done."""

    @property
    def tables(self) -> NodeTables | None:
        """Receive growth for steps with `StepBatch.device_rows`; None where the device chooses no rows."""

    def launch(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        """Begin a step. Pending tokens are those of the step before; their rows move on by the drafted rows that step
        accepts.

        Args:
            batch: the step. Where the device chooses rows, all sequences are GREEDY or COUPLED and verified on it.
            verifiers: those of `batch.items`.
            passes: how many to run, each of which reads the tokens of the one before. With more than one, every tree is
                its root.
            ready: called once, before any of the step runs. Where the device chooses rows it is called after all that
                the host has to prepare: it may wait for drafts, which are copied to the device when it returns.
        """


class HostSteps:
    """Runs one step after the other, and verifies row by row as the walks come to them."""

    tables: NodeTables | None = None
    in_background: bool = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def use_pause(self) -> bool:
        """See `Steps.use_pause`."""
        return False

    def launch(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        """See `Steps.launch`. No token is pending, and no step has several passes: the results of every step are there
        before the next is launched."""
        assert passes == 1, f"{passes} passes, of which the host verifies each"
        ready()
        return StepOnHost(self._runner, batch, verifiers, self._runner.forward(batch.input))


@dataclass(eq=False)
class StepOnHost(LaunchedWhole):
    """A step of `HostSteps`: its logits are there, and masked and verified when `outcomes` is first called."""

    _runner: ModelRunner
    _batch: StepBatch
    _verifiers: SequenceOf[SequenceVerifier]
    _logits: Tensor
    _outcomes: list[Verified | None] | None = None
    span: DeviceSpan | None = None
    on_device: bool = False
    can_launch_before_results: bool = False

    def wait(self) -> None:
        """Returns at once: the launch computed the logits."""

    def ended(self) -> bool:
        return True

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        if self._outcomes is None:
            pairs = zip(self._batch.items, self._verifiers, strict=True)
            self._outcomes = [_verify(item, one, self._logits) for item, one in pairs]
            move_on_host(self._batch.items, self._outcomes, self._runner)
            move_nodes_on_host(self._batch, self._outcomes, self._runner.cache.recurrent)
        return self._outcomes

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`."""
        # The root's row is the tree's.
        ends = [item.first_logit + (item.tree is not None) for item in self._batch.items]
        scores = score_prompts(self._batch.items, ends, self._logits, self._runner.vocabulary_size)
        return [each.read() for each in scores]


def _verify(item: StepItem, verifier: SequenceVerifier, logits: Tensor) -> Verified | None:
    """Walk one sequence's tree by the step's logits [rows, vocabulary]."""
    if item.tree is None:
        return None
    rows = logits[item.first_logit : item.first_logit + len(item.tree)]
    return verifier.verify(item.tree, rows, item.sequence.output, item.sequence.step)


def move_on_host(items: SequenceOf[StepItem], outcomes: SequenceOf[Verified | None], runner: ModelRunner) -> None:
    """Move the keys and values of every accepted path right behind its root.

    Rows are accepted in rising order and only move down, so gather-then-scatter in one call is safe. A sequence that
    was cancelled since the launch has no pages any more.
    """
    cache = runner.cache
    sources: list[int] = []
    targets: list[int] = []
    for item, outcome in zip(items, outcomes, strict=True):
        if outcome is None or not item.sequence.pages:
            continue
        root_slot = item.start + item.known - 1
        for place, row in enumerate(outcome.walk.accepted_rows, start=1):
            if row != place:
                sources += cache.slots(item.sequence.pages, root_slot + row, 1)
                targets += cache.slots(item.sequence.pages, root_slot + place, 1)
    if sources:
        runner.move_rows(sources, targets)


def move_nodes_on_host(
    batch: StepBatch, outcomes: SequenceOf[Verified | None], recurrent: RecurrentStates | None
) -> None:
    """The same for what layers with states keep of every accepted path."""
    if recurrent is None:
        return
    for item, outcome, slot in zip(batch.items, outcomes, batch.input.state_slots, strict=True):
        if outcome is None or not item.kept or not item.sequence.pages:
            continue
        root = item.start + item.known - 1
        accepted = [root + row for row in outcome.walk.accepted_rows]
        if accepted:
            recurrent.move_nodes(slot, accepted, range(root + 1, root + 1 + len(accepted)))
