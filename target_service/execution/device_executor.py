"""Steps that the device verifies: the host only reads back which rows were accepted, and the next tokens.

Sequences for which more than logits and parameters is needed (penalties, biases, log-probabilities) are verified
together when the pass has ended, from the same logits: what their tokens were is known to the host alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from target_service.core.kv_cache import KVCache
from target_service.core.sequence import MAX_PASSES
from target_service.execution import node_tables
from target_service.execution.batch import StepBatch, StepItem
from target_service.execution.device_rows import TableStep
from target_service.execution.device_time import DeviceSpan, device_spans
from target_service.execution.host_executor import CopiedLater, HostSteps, Launched, Ready, Steps, move_on_host
from target_service.execution.node_tables import NodeTables
from target_service.execution.post_pass import PostPass, PostPassWork, TableWork
from target_service.execution.pre_pass import PrePass
from target_service.model.forward import ForwardPass
from target_service.model.runner import ModelRunner
from target_service.sampling.batch_verifier import Asked, BatchVerifier
from target_service.sampling.verifier import SequenceVerifier, Verified
from tree_kernels.node_table import Mailboxes, NodeTable, StepIntegers
from tree_kernels.node_table.layout import REPORT
from tree_kernels.verification import DeviceVerifier, Mode, RowsToVerify, Verdicts, Walk, records_of

# Results in flight at most: that of a step, and that of the one launched after it.
_RESULTS = 2


def best_steps(runner: ModelRunner, *, max_sequences: int, max_rows: int, typical: bool = False) -> Steps:
    """`DeviceSteps` on a GPU that has Triton, else `HostSteps`."""
    if runner.device.type != "cuda" or not importlib.util.find_spec("triton"):
        return HostSteps(runner)
    steps = DeviceSteps(runner, max_sequences=max_sequences, max_rows=max_rows, typical=typical)
    steps.warm_up()
    return steps


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
        may ask for typical acceptance, so what it needs is compiled and captured before the first."""
        self._runner = runner
        self._typical = typical
        self.in_background = self._pins = on_gpu = runner.device.type == "cuda"
        bounds = (runner.device, runner.vocabulary_size, max_sequences, max_rows)
        self._verifier = DeviceVerifier(*bounds, backend)
        self._batch_verifier = BatchVerifier(DeviceVerifier(*bounds, backend), typical=typical)
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
        # Each as `NodeTable.reports`.
        self._reports = torch.zeros(_RESULTS, max_sequences, MAX_PASSES, REPORT, dtype=torch.int32, pin_memory=on_gpu)
        self.tables: NodeTables | None = None
        self._pre_pass: PrePass | None = None
        if table is not None:
            mail = Mailboxes(max_sequences, runner.device)
            self.tables, self._pre_pass = NodeTables(max_sequences, mail), PrePass(runner, table, mail)
        self._count = 0
        self._spans = device_spans() if on_gpu else None
        # Of the last step that was launched.
        self._verdicts = self._verifier.verdicts
        self._nothing = torch.zeros(max_sequences, dtype=torch.int32, device=runner.device)
        # Drafted rows that it accepts, by place in the batch; None where the device chose its rows.
        self._moves: Tensor | None = self._nothing
        self._post_pass = PostPass(runner, self._verifier, backend, typical)

    def warm_up(self) -> None:
        """Compile every kernel that a request may need, so that none waits for it. Takes seconds for each, once."""
        self._verifier.warm_up(self._runner.dtype, typical=(False, True) if self._typical else (False,))
        self._batch_verifier.warm_up()
        self._post_pass.capture_ahead()
        if self._pre_pass is not None:
            self._pre_pass.capture_ahead()
            node_tables.warm_up()

    def launch(self, batch: StepBatch, verifiers: SequenceOf[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        """See `Steps.launch`."""
        pairs = zip(batch.items, verifiers, strict=True)
        rows = [_on_device(item, verifier) or RowsToVerify(0, 0) for item, verifier in pairs]
        parameters = self._verifier.pack(rows)
        moves, table = self._moves, self._runner.node_table
        if batch.device_rows is not None:
            # What each sequence may get; the device finds behind every pass how many rows it has.
            records_of(parameters, len(rows))["rows"] += batch.device_rows.limits
            return self._launch_device_rows(batch, rows, parameters, passes, ready)
        ready()
        span = next(self._spans).record_start() if self._spans is not None else None
        if moves is not self._nothing and min(batch.input.token_ids) < 0:
            assert passes == 1, "only the device has the positions of later passes"
            if moves is None:
                assert table is not None
                moves = table.accepted
            done = self._runner.run_after(batch.input, moves, parameters)
        else:
            done = self._runner.run_pass(batch.input, parameters)
        self._moves = self._verdicts.accepted_counts if batch.drafted else self._nothing
        self._conclude(batch, rows, done)
        verdicts, count = self._verdicts, len(rows)
        self._count += 1
        place = self._count % _RESULTS
        result = self._results[place]
        result.tensor.copy_(verdicts.tensor, non_blocking=True)
        lossy = self._lossy_of(rows, place, 0)
        following = self._following[place, : passes - 1, :count]
        for later in range(1, passes):
            done = self._runner.run_later(batch.input, later, parameters)
            self._conclude(batch, rows, done)
            following[later - 1].copy_(verdicts.next_tokens[:count], non_blocking=True)
        cache, apart = self._runner.cache, self._batch_verifier
        return _OnDevice(cache, apart, batch, verifiers, done.logits, result, lossy, following, span)

    def _lossy_of(self, rows: SequenceOf[RowsToVerify], place: int, number: int) -> Tensor | None:
        """[max_rows] on the host: receives `DeviceVerifier.lossy_rows` of the launch's `number`th pass. None where no
        sequence is TYPICAL."""
        if not any(map(_is_typical, rows)):
            return None
        lossy = self._lossy[place, number]
        lossy.copy_(self._verifier.lossy_rows, non_blocking=True)
        return lossy

    def _launch_device_rows(
        self,
        batch: StepBatch,
        rows: SequenceOf[RowsToVerify],
        parameters: NDArray[numpy.int32],
        passes: int,
        ready: Ready,
    ) -> Launched:
        """Behind each pass the device moves the step on and chooses the rows of the next pass; see `NodeTable`."""
        table, tables, pre_pass, span = self._runner.node_table, self.tables, self._pre_pass, None
        assert table and tables and pre_pass, "rows are chosen from tables, which need the tokens kept"

        def begin(step: StepIntegers, graph_buffers: object | None) -> None:
            nonlocal span
            # What follows is no part of the pass.
            with torch.inference_mode(False):
                ready()
                # Not sooner, or time in which the device is idle would be measured as busy.
                span = next(self._spans).record_start() if self._spans is not None else None
                self._seat(batch, table)
            pre_pass.launch(step, graph_buffers, self._moves, batch.input.prefilling)

        self._count += 1
        place = self._count % _RESULTS
        done = self._runner.run_device_rows(batch.input, parameters, begin)
        lossy: list[Tensor | None] = []
        for number in range(1, passes):
            # Growth that was published while the pass ran.
            table.copy_tables(tables.mail)
            self._conclude(batch, rows, done, TableWork.REPORT_AND_CHOOSE_ROWS)
            lossy.append(self._lossy_of(rows, place, number - 1))
            done = self._runner.run_again(batch.input, done)
        self._conclude(batch, rows, done, TableWork.REPORT)
        lossy.append(self._lossy_of(rows, place, passes - 1))
        self._moves = None
        prefilling = [item.tree is not None for item in batch.items[: batch.input.prefilling]]
        typical = [_is_typical(one) for one in rows]
        return TableStep(len(rows), passes, table, self._reports[place], span, prefilling, typical, lossy)

    def _seat(self, batch: StepBatch, table: NodeTable) -> None:
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
    ) -> None:
        """Launch what follows a pass: verification, accepted keys and values into place, tokens for the next pass."""
        typical = any(map(_is_typical, rows))
        distributions = {
            item.first_row + row: (drawn.token_ids, drawn.weights)
            for item in batch.items
            if item.tree is not None
            for row, drawn in item.tree.distributions.items()
        }
        if distributions:
            packed = torch.from_numpy(self._verifier.pack_distributions(distributions))
            self._post_pass.launch(PostPassWork(batch.drafted, typical=typical), done, packed.to(done.logits.device))
            return
        greedy = all(one.mode is Mode.GREEDY for one in rows)
        filtered = not greedy and any(one.filtered for one in rows)
        drafted = batch.drafted or table is not TableWork.NONE
        self._post_pass.launch(PostPassWork(drafted, greedy, filtered, table, typical), done)


def _is_typical(rows: RowsToVerify) -> bool:
    """Whether they are verified by typical acceptance, which at temperature 0 is GREEDY."""
    return rows.mode is Mode.TYPICAL and rows.temperature > 0


@dataclass(eq=False)
class _OnDevice(CopiedLater):
    """A step of `DeviceSteps`. Its result is valid until the next but one is launched, its logits until the next one:
    where sequences are verified from them later, `can_launch_before_results` is False, so that none is launched before
    they are."""

    _cache: KVCache
    _batch_verifier: BatchVerifier
    _batch: StepBatch
    _verifiers: SequenceOf[SequenceVerifier]
    _logits: Tensor
    _result: Verdicts
    _lossy: Tensor | None  # [max_rows], receives what `DeviceVerifier.lossy_rows` had; None where none is TYPICAL
    _following: Tensor  # [passes after the first, sequences], receives the tokens of those passes
    span: DeviceSpan | None

    def __post_init__(self) -> None:
        super().__init__(self._logits)

    @property
    def can_launch_before_results(self) -> bool:
        """Whether every sequence is verified right behind the pass."""
        return all(verifier.on_device for verifier in self._verifiers)

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        result, pairs = self._result, list(zip(self._batch.items, self._verifiers, strict=True))
        outcomes = self._verified_apart(pairs)
        move_on_host(self._batch.items, outcomes, self._cache)
        counts, tokens = result.accepted_counts[: len(pairs)].tolist(), result.next_tokens[: len(pairs)].tolist()
        accepted = result.accepted_rows[: len(self._batch.input.token_ids)].tolist() if any(counts) else []
        following = self._following.T.tolist()
        for place, (item, verifier) in enumerate(pairs):
            if item.tree is not None and verifier.on_device:
                at = slice(item.first_row, item.first_row + counts[place])
                lossy = self._lossy[at].tolist() if self._lossy is not None and verifier.lossy else ()
                walk = Walk(tuple(accepted[at]), tokens[place])
                outcomes[place] = Verified(walk, (), tuple(following[place]), lossy=tuple(map(bool, lossy)))
        return outcomes

    def _verified_apart(self, pairs: SequenceOf[tuple[StepItem, SequenceVerifier]]) -> list[Verified | None]:
        """Outcomes of the sequences that the pass itself did not verify; None for the others."""
        asked = {
            place: Asked(verifier, item.tree, item.first_row, item.sequence.output, item.sequence.step)
            for place, (item, verifier) in enumerate(pairs)
            if item.tree is not None and not verifier.on_device
        }
        outcomes: list[Verified | None] = [None] * len(pairs)
        for place, outcome in zip(asked, self._batch_verifier.verify(list(asked.values()), self._logits), strict=True):
            outcomes[place] = outcome
        return outcomes


def _on_device(item: StepItem, verifier: SequenceVerifier) -> RowsToVerify | None:
    """What is to be verified of a sequence right behind the pass; None where there is nothing, or `BatchVerifier` does
    it once the pass has ended."""
    if item.tree is None or not verifier.on_device:
        return None
    sequence = item.sequence
    # Each pending token is that of one step.
    step = sequence.step + sequence.pending_tokens
    return verifier.rows_to_verify(item.tree, item.first_row, sequence.length, step)
