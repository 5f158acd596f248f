"""Steps that the device verifies: the host only reads back which rows were accepted, the next tokens, and
log-probabilities where they were asked for."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Literal, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import OutriderError
from target_service.compiling import LOOPS
from target_service.core.sequence import MAX_PASSES, SequenceRequest
from target_service.execution import node_tables
from target_service.execution.batch import StepBatch, StepItem
from target_service.execution.device_rows import ChosenRows, LaidOut, TableStep
from target_service.execution.device_time import DeviceSpan, device_spans
from target_service.execution.host_executor import CopiedLater, HostSteps, Launched, Ready, Steps
from target_service.execution.node_tables import NodeTables
from target_service.execution.pass_drafting import PassDrafting
from target_service.execution.pass_extras import PassExtras, WantedExtras
from target_service.execution.post_pass import PostPass, PostPassWork, TableWork
from target_service.execution.pre_pass import PrePass
from target_service.execution.prompt_scores import ScoredPrompt, ScoresUnderWay, score_prompts
from target_service.execution.shaped_logits import ShapedLogits
from target_service.grammars import row_masks
from target_service.model.forward import ForwardPass
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.logit_shaping import DeviceShaper
from tree_kernels.logprobs import DeviceLogprobs
from tree_kernels.logprobs.layout import WIDTH as LOGPROBS_WIDTH
from tree_kernels.node_table import Mailboxes, NodeTable, StepIntegers
from tree_kernels.node_table.layout import REPORT
from tree_kernels.verification import DeviceVerifier, Mode, RowsToVerify, Verdicts, Walk, records_of

log = logging.getLogger(__name__)
# Results in flight at most: that of a step, and that of the one launched after it.
_RESULTS = 2
# Seconds without a step after which a pause is used: a client that asks again once it has its answer did so 4 ms after
# the answer's last step, measured on an H200 host. Also how often an idle engine looks (`Engine._iterate`). Chosen.
_PAUSE_BEGINS = 0.05
# Seconds without a step after which whole sizes are captured, for each of which a request that comes then waits: 0.14 s
# on an H100 (`benchmarks/results/2026-11-27-h100-start.md`). Chosen.
_LONG_PAUSE = 0.5


def best_steps(runner: ModelRunner, *, max_sequences: int, max_rows: int, typical: bool = False) -> Steps:
    """`DeviceSteps` on a GPU that has Triton, else `HostSteps`."""
    if runner.device.type != "cuda" or not importlib.util.find_spec("triton"):
        return HostSteps(runner)
    steps = DeviceSteps(runner, max_sequences=max_sequences, max_rows=max_rows, typical=typical)
    steps.warm_up()
    return steps


class _FirstPass(NamedTuple):
    """The first pass of a launch, which runs."""

    batch: StepBatch
    verifiers: SequenceOf[SequenceVerifier]
    rows: SequenceOf[RowsToVerify]
    passes: int  # of the launch
    done: ForwardPass
    span: DeviceSpan | None


class DeviceSteps:
    """Launches steps one after the other on the device's stream, without waiting for them."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_sequences: int,
        max_rows: int,
        backend: Literal["triton", "torch"] | None = None,
        typical: bool = False,
    ) -> None:
        """`max_sequences` and `max_rows` bound every step; `backend` is that of `DeviceVerifier`. `typical`: requests
        may use typical acceptance, so what it needs is compiled and captured before the first."""
        self._runner = runner
        self._typical = typical
        self.in_background = self._pins = on_gpu = runner.device.type == "cuda"
        bounds = (runner.device, runner.vocabulary_size, max_sequences, max_rows)
        self._verifier = DeviceVerifier(*bounds, backend)
        self._shaper, self._logprobs = DeviceShaper(*bounds, backend), DeviceLogprobs(*bounds, backend)
        self._shaped = ShapedLogits(self._shaper)
        # Of the last launch whose masks depend on the rows that the device chose.
        self._chosen = ChosenRows(max_sequences, max_rows, runner.device)
        table = runner.node_table
        if table is not None and table.max_sequences != max_sequences:
            raise ValueError(f"drafts are looked up for steps of {table.max_sequences}, not {max_sequences}")
        size = 2 * max_sequences + max_rows
        pinned = torch.zeros(_RESULTS, size, dtype=torch.int32, pin_memory=on_gpu)
        self._results = [Verdicts.over(tensor, max_sequences) for tensor in pinned]
        # [_RESULTS, MAX_PASSES - 1, max_sequences] int32
        self._following = torch.zeros(_RESULTS, MAX_PASSES - 1, max_sequences, dtype=torch.int32, pin_memory=on_gpu)
        # Of each pass in flight, where any sequence is TYPICAL: see `DeviceVerifier.lossy_rows`.
        self._lossy = torch.zeros(_RESULTS, MAX_PASSES, max_rows, dtype=torch.int32, pin_memory=on_gpu)
        # Of each pass in flight, where any sequence has them returned: see `DeviceLogprobs.found`.
        sizes = _RESULTS, MAX_PASSES, max_rows, LOGPROBS_WIDTH
        self._found = torch.zeros(sizes, dtype=torch.int32, pin_memory=on_gpu)
        # Each as `NodeTable.reports`.
        self._reports = torch.zeros(_RESULTS, max_sequences, MAX_PASSES, REPORT, dtype=torch.int32, pin_memory=on_gpu)
        self.tables: NodeTables | None = None
        self._pre_pass: PrePass | None = None
        if table is not None:
            mail = Mailboxes(max_sequences, runner.device)
            self.tables, self._pre_pass = NodeTables(max_sequences, mail), PrePass(runner, table, mail)
        self._count = 0
        # When a pause was first seen since a step was launched last. Not the time of that launch: its pass may have run
        # for long.
        self._paused_since: float | None = -inf
        self._spans = device_spans() if on_gpu else None
        # Of the last step that was launched.
        self._verdicts = self._verifier.verdicts
        self._nothing = torch.zeros(max_sequences, dtype=torch.int32, device=runner.device)
        # Drafted rows that it accepts, by place in the batch; None where the device chose its rows.
        self._moves: Tensor | None = self._nothing
        self._drafting = None
        # Where steps could not be captured there is no table, and nothing drafts.
        if runner.in_pass is not None and table is not None and self.tables is not None:
            self._drafting = self.tables.drafting = PassDrafting(runner, runner.in_pass, table, max_rows)
        parts = self._verifier, self._shaper, self._logprobs
        self._post_pass = PostPass(runner, *parts, backend, typical, self._drafting)

    def warm_up(self) -> None:
        """Compile every kernel that a request may need, so that none waits for it. Takes seconds for each, once."""
        self._runner.compile_ahead("what follows steps", self._launches())
        self._runner.ahead.close(whole=True)
        self._warm_up_verifier()
        self._post_pass.capture_ahead()
        LOOPS.wait()
        row_masks.warm_up()
        if self._pre_pass is not None:
            self._pre_pass.capture_ahead()
            node_tables.warm_up()

    def _launches(self) -> Iterator[Callable[[], object]]:
        yield self._warm_up_verifier
        yield from self._post_pass.launches()
        if self._pre_pass is not None:
            yield from self._pre_pass.launches()

    def _warm_up_verifier(self) -> None:
        self._verifier.warm_up(self._runner.dtype, typical=(False, True) if self._typical else (False,))
        # Of shaped logits.
        self._verifier.warm_up(torch.float32, filtered=(True,), typical=(self._typical,))

    def use_pause(self) -> bool:
        """See `Steps.use_pause`."""
        now = time.monotonic()
        if self._paused_since is None:
            self._paused_since = now
        paused = now - self._paused_since
        if paused < _LONG_PAUSE:
            if paused >= _PAUSE_BEGINS:
                self._post_pass.capture_more()
            return True
        done = self._runner.capture_later()
        if done is None:
            return self._post_pass.capture_more()
        try:
            self._post_pass.capture_behind(done)
            if self._pre_pass is not None:
                self._pre_pass.capture_before(done)
        except torch.OutOfMemoryError:
            log.warning("no memory to capture what follows a step of %d rows", len(done.token_ids))
        return True

    def launch(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        """See `Steps.launch`."""
        self._paused_since = None
        places = self._shaped.write(batch, verifiers)
        rows = [_to_verify(*each) for each in zip(batch.items, verifiers, places, strict=True)]
        masked = any([one.masked for one in verifiers])
        if not masked:
            self._shaped.clear_masks()
        parameters = self._verifier.pack(rows)
        if self._drafting is not None:
            self._drafting.sequences = len(batch.items)
            _note_for_drafting(batch, parameters)
        moves, table = self._moves, self._runner.node_table
        if batch.device_rows is not None:
            # What each sequence may get; the device finds behind every pass how many rows it has.
            records_of(parameters, len(rows))["rows"] += batch.device_rows.limits
            return self._launch_device_rows(batch, verifiers, rows, parameters, passes, ready)
        ready()
        if self._drafting is not None:
            assert table is not None and self.tables is not None
            # Trees behind this pass go where those of its sequences belong, and after what the host has sent.
            self._assign_slots(batch, table)
            table.copy_tables(self.tables.mail)
        span = self._begin_span()
        if moves is not self._nothing and min(batch.input.token_ids) < 0:
            assert passes == 1, "only the device has the positions of later passes"
            if moves is None:
                assert table is not None
                moves = table.accepted
            done = self._runner.run_after(batch.input, moves, parameters)
        else:
            done = self._runner.run_pass(batch.input, parameters)
        self._moves = self._verdicts.accepted_counts if batch.drafted else self._nothing
        first = _FirstPass(batch, verifiers, rows, passes, done, span)
        conclude = partial(self._conclude_laid_out, first, parameters)
        return self._masked(first, None, conclude) if masked else conclude({})

    def _masked(
        self, first: _FirstPass, chosen: ChosenRows | None, conclude: Callable[[Mapping[int, OutriderError]], Launched]
    ) -> Launched:
        """A launch whose forward pass runs, and which `conclude` launches the rest of, given what `ShapedLogits.mask`
        returns."""

        def mask(under_way: SequenceOf[bool]) -> Launched:
            return conclude(self._shaped.mask(first.batch, first.verifiers, under_way, chosen))

        return MaskedLater(mask, self._runner.device.type == "cuda", first.span)

    def _conclude_laid_out(
        self, first: _FirstPass, parameters: NDArray[numpy.int32], errors: Mapping[int, OutriderError]
    ) -> Launched:
        """Launch what follows the first pass of a step that the host laid out, and its later passes."""
        batch, verifiers, rows, passes, done, span = first
        prompts = self._score_prompts(batch, done)
        draft = self._conclude(batch, rows, done)
        verdicts, count, place = self._verdicts, len(rows), self._next_place()
        result = self._results[place]
        result.tensor.copy_(verdicts.tensor, non_blocking=True)
        extras = [self._extras_of(rows, place, 0)]
        following = self._following[place, : passes - 1, :count]
        for later in range(1, passes):
            draft()
            done = self._runner.run_later(batch.input, later, parameters)
            draft = self._conclude(batch, rows, done)
            following[later - 1].copy_(verdicts.next_tokens[:count], non_blocking=True)
            extras.append(self._extras_of(rows, place, later))
        launched = _OnDevice(done.logits, batch, verifiers, errors, result, extras, following, span, prompts)
        draft()
        return launched

    def _begin_span(self) -> DeviceSpan | None:
        return next(self._spans).record_start() if self._spans is not None else None

    def _next_place(self) -> int:
        """Where on the host the results of a launch go."""
        self._count += 1
        return self._count % _RESULTS

    def _score_prompts(self, batch: StepBatch, done: ForwardPass) -> list[ScoresUnderWay]:
        """The log-probabilities of prompts that a pass has, before another overwrites its logits."""
        ends = [item.first_row + 1 for item in batch.items]
        return score_prompts(batch.items, ends, done.logits, self._runner.vocabulary_size)

    def _extras_of(self, rows: SequenceOf[RowsToVerify], place: int, number: int) -> PassExtras:
        """On the host, receives what of the launch's `number`th pass only some requests need."""
        lossy = logprobs = None
        if any(map(_is_typical, rows)):
            lossy = self._lossy[place, number]
            lossy.copy_(self._verifier.lossy_rows, non_blocking=True)
        if any(one.logprobs for one in rows):
            logprobs = self._found[place, number]
            logprobs.copy_(self._logprobs.found, non_blocking=True)
        return PassExtras(lossy, logprobs)

    def _launch_device_rows(
        self,
        batch: StepBatch,
        verifiers: SequenceOf[SequenceVerifier],
        rows: SequenceOf[RowsToVerify],
        parameters: NDArray[numpy.int32],
        passes: int,
        ready: Ready,
    ) -> Launched:
        """Behind each pass the device moves the step on and chooses the rows of the next pass; see `NodeTable`."""
        table, tables, pre_pass, span = self._runner.node_table, self.tables, self._pre_pass, None
        assert table and tables and pre_pass, "rows are chosen from tables, which need the tokens kept"
        masked = any([one.masked for one in verifiers])
        assert passes == 1 or not masked, "the host masks the rows of each pass"

        def begin(step: StepIntegers, graph_buffers: object | None) -> None:
            nonlocal span
            # What follows is no part of the pass.
            with torch.inference_mode(False):
                ready()
                # Not sooner, or time in which the device is idle would be measured as busy.
                span = self._begin_span()
                self._assign_slots(batch, table)
            pre_pass.launch(step, graph_buffers, self._moves, batch.input.laid_out)
            if masked:
                self._chosen.copy(step)

        done = self._runner.run_device_rows(batch.input, parameters, begin)
        self._moves = None
        first = _FirstPass(batch, verifiers, rows, passes, done, span)
        conclude = partial(self._conclude_device_rows, first)
        return self._masked(first, self._chosen, conclude) if masked else conclude({})

    def _conclude_device_rows(self, first: _FirstPass, errors: Mapping[int, OutriderError]) -> Launched:
        """Launch what follows the first pass of a step whose rows the device chose, and its later passes."""
        batch, verifiers, rows, passes, done, span = first
        table, tables, place = self._runner.node_table, self.tables, self._next_place()
        assert table and tables, "rows are chosen from tables"
        prompts = self._score_prompts(batch, done)
        extras: list[PassExtras] = []
        for number in range(1, passes):
            # Growth that was published while the pass ran.
            table.copy_tables(tables.mail)
            self._conclude(batch, rows, done, TableWork.REPORT_AND_CHOOSE_ROWS)()
            extras.append(self._extras_of(rows, place, number - 1))
            done = self._runner.run_again(batch.input, done)
        draft = self._conclude(batch, rows, done, TableWork.REPORT)
        extras.append(self._extras_of(rows, place, passes - 1))
        laid_out = [
            None if item.tree is None else LaidOut(item.first_row) for item in batch.items[: batch.input.laid_out]
        ]
        verdicts = None
        if batch.drafted:
            verdicts = self._results[place]
            verdicts.tensor.copy_(self._verdicts.tensor, non_blocking=True)
        wanted = [
            WantedExtras(_is_typical(one), verifier.logprobs) for one, verifier in zip(rows, verifiers, strict=True)
        ]
        report = self._reports[place]
        step = TableStep(len(rows), passes, table, report, span, laid_out, verdicts, wanted, extras, prompts, errors)
        draft()
        return step

    def _assign_slots(self, batch: StepBatch, table: NodeTable) -> None:
        """Publish the growth received by now, and which table and owner each sequence of the step has."""
        assert self.tables is not None, "there is one where the runner has a table"
        self.tables.publish()
        sequences = [item.sequence for item in batch.items]
        ids, tenants = [one.sequence_id for one in sequences], [one.request.tenant for one in sequences]
        assignment = self.tables.slot_assignment(ids, tenants)
        if assignment is not None:
            # PyTorch does not reuse pinned memory that a copy still reads.
            pinned = torch.empty(assignment.shape, dtype=torch.int32, pin_memory=self._pins)
            pinned.numpy()[:] = assignment
            table.assign_slots(*pinned)

    def _conclude(
        self, batch: StepBatch, rows: SequenceOf[RowsToVerify], done: ForwardPass, table: TableWork = TableWork.NONE
    ) -> Callable[[], None]:
        """Launch what follows a pass: verification, accepted keys and values into place, tokens for the next pass.
        Returns what drafts behind it, to be called once copies of its results are queued."""
        typical = any(map(_is_typical, rows))
        shaped, logprobs = any(one.shaping for one in rows), any(one.logprobs for one in rows)
        distributions = {
            item.first_row + row: (drawn.token_ids, drawn.weights)
            for item in batch.items
            if item.tree is not None
            for row, drawn in item.tree.distributions.items()
        }
        if distributions:
            packed = torch.from_numpy(self._verifier.pack_distributions(distributions))
            work = PostPassWork(batch.drafted, typical=typical, shaped=shaped, logprobs=logprobs)
            what = (work, done, packed.to(done.logits.device))
            self._post_pass.launch(*what)
            return partial(self._post_pass.draft, *what)
        greedy = all(one.mode is Mode.GREEDY for one in rows)
        # Of shaped logits always the same kernels, which are compiled.
        filtered = not greedy and (shaped or any(one.filtered for one in rows))
        drafted = batch.drafted or table is not TableWork.NONE
        work = PostPassWork(drafted, greedy, filtered, table, typical, shaped, logprobs)
        self._post_pass.launch(work, done)
        return partial(self._post_pass.draft, work, done)


def _note_for_drafting(batch: StepBatch, parameters: NDArray[numpy.int32]) -> None:
    """Note in the records what a drafter behind passes has to know of each sequence."""
    records, attention, items = records_of(parameters, len(batch.items)), batch.input.attention, batch.items
    records["room"] = [len(pages) * attention.page_size for pages in attention.pages]
    records["following"] = [
        item.sequence.token_ids[item.start + item.known] if item.tree is None else 0 for item in items
    ]
    records["drafts"] = [_is_drafted_in_passes(item.sequence.request) for item in items]


def _is_drafted_in_passes(request: SequenceRequest) -> bool:
    """Whether a sequence gets trees that are grown behind passes. What the host sends later takes their place."""
    return request.device_rows and request.speculate and request.max_draft_nodes > 0


def _is_typical(rows: RowsToVerify) -> bool:
    """Whether they are verified by typical acceptance, which at temperature 0 is GREEDY."""
    return rows.mode is Mode.TYPICAL and rows.temperature > 0


@dataclass(eq=False)
class MaskedLater:
    """A step of `DeviceSteps` whose masks are computed while its forward pass runs; see `Launched`."""

    _mask: Callable[[SequenceOf[bool]], Launched]
    on_device: bool
    span: DeviceSpan | None
    can_launch_before_results = True
    _masked: Launched | None = None

    @property
    def awaits_masks(self) -> bool:
        """See `Launched.awaits_masks`."""
        return self._masked is None

    def mask(self, under_way: SequenceOf[bool]) -> None:
        """See `Launched.mask`."""
        self._masked = self._mask(under_way)

    @property
    def _launched(self) -> Launched:
        assert self._masked is not None, "nothing follows the pass before its masks are there"
        return self._masked

    def wait(self) -> None:
        """See `Launched.wait`."""
        self._launched.wait()

    def ended(self) -> bool:
        """See `Launched.ended`."""
        return self._launched.ended()

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        return self._launched.outcomes()

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`."""
        return self._launched.prompt_logprobs()


@dataclass(eq=False)
class _OnDevice(CopiedLater):
    """A step of `DeviceSteps` whose rows the host laid out. Its result is valid until the next but one is launched."""

    _logits: Tensor
    _batch: StepBatch
    _verifiers: SequenceOf[SequenceVerifier]
    _errors: Mapping[int, OutriderError]  # by place in the batch
    _result: Verdicts
    _extras: SequenceOf[PassExtras]
    _following: Tensor  # [passes after the first, sequences], receives the tokens of those passes
    span: DeviceSpan | None
    _prompts: list[ScoresUnderWay]
    can_launch_before_results = True

    def __post_init__(self) -> None:
        super().__init__(self._logits)

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`."""
        return [each.read() for each in self._prompts]

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        result, items = self._result, self._batch.items
        outcomes: list[Verified | None] = [None] * len(items)
        counts, tokens = result.accepted_counts[: len(items)].tolist(), result.next_tokens[: len(items)].tolist()
        accepted = result.accepted_rows[: len(self._batch.input.token_ids)].tolist() if any(counts) else []
        following = self._following.T.tolist()
        for place, (item, verifier) in enumerate(zip(items, self._verifiers, strict=True)):
            if item.tree is None:
                continue
            first, count = item.first_row, counts[place]
            logprobs = tuple(
                entry
                for number, extras in enumerate(self._extras)
                for entry in extras.logprobs_of(first, 0 if number else count, verifier.logprobs)
            )
            lossy = self._extras[0].lossy_of(first, count) if verifier.lossy else ()
            walk = Walk(tuple(accepted[first : first + count]), tokens[place])
            error = self._errors.get(place)
            outcomes[place] = Verified(walk, logprobs, tuple(following[place]), lossy=lossy, error=error)
        return outcomes


def _to_verify(item: StepItem, verifier: SequenceVerifier, place: int) -> RowsToVerify:
    """What is to be verified of a sequence; no rows where there is nothing. `place` as in `RowsToVerify.shaping`."""
    if item.tree is None:
        return RowsToVerify(0, 0)
    sequence = item.sequence
    # Each pending token is that of one step.
    step = sequence.step + sequence.pending_tokens
    rows = verifier.rows_to_verify(item.tree, item.first_row, sequence.length, step)
    if place or verifier.logprobs is not None:
        return rows._replace(shaping=place, logprobs=0 if verifier.logprobs is None else 1 + verifier.logprobs)
    return rows
