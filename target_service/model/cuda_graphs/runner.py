"""Steps as captured CUDA graphs: a step costs the host one small copy and one launch.

A graph reads its step from tensors with fixed addresses, all of them parts of one buffer of integers per bucket, which
one copy from pinned memory fills. Rows that a step leaves free have no sequence, no slot and no effect.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import NotSupported
from target_service.core.kv_cache import KVCache
from target_service.model.cuda_graphs.sizes import Bucket, buckets_up_to, choose_bucket
from target_service.model.cuda_graphs.step_buffer import StepBuffer
from target_service.model.forward import ForwardInput, ForwardPass, pass_over, rows_of
from target_service.model.hidden_state_hooks import LayerHooks
from target_service.model.preparing import prepare_network
from target_service.model.rank_link import (
    CapturePass,
    CountFreeMemory,
    DropCaptures,
    EmptyPass,
    MoveAccepted,
    ReplayPass,
    UseCache,
)
from target_service.model.runner import Begin, ModelRunner
from tree_kernels.attention.triton_planning import TritonPlan
from tree_kernels.compiled_layers import eagerly, recompiling
from tree_kernels.graph_capture import GraphCapture
from tree_kernels.logit_shaping import SequenceTexts
from tree_kernels.node_table import NodeTable, fill_pending
from tree_kernels.recurrence import RecurrentPass
from tree_kernels.verification import Verdicts
from tree_models.fused.preparing import LayerOptions
from tree_models.in_pass import DraftingKind
from tree_models.layers.decoder import Decoder

log = logging.getLogger(__name__)
# Versions of a layer that the compiler may make: one for each number of rows and each frame of a layer.
_RECOMPILE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What is captured."""

    max_rows: int = 512  # of all sequences of a step; larger steps run eagerly
    max_sequences: int = 256  # of a step; at most `config.MAX_SEQUENCES`
    layers: LayerOptions = field(default_factory=LayerOptions)  # how layers are prepared
    hooked: tuple[int, ...] = ()  # decoder layers whose outputs every step keeps; see `LayerHooks`
    # Rows whose logits are computed at most where those of others are not needed, in sizes of at least twice as many.
    # So many rows of the head take as long as one: reading its weights takes longer than multiplying.
    few_outputs: int = 128
    common_pages: bool = False  # whether sequences may share pages, which some steps then read once


class _OutputGraphs(NamedTuple):
    """From hidden rows to logits, of every row or of few, which stand at the same places."""

    every: torch.cuda.CUDAGraph
    few: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Captured:
    graph: torch.cuda.CUDAGraph  # up to the hidden rows where `outputs` are apart
    outputs: _OutputGraphs | None
    buffer: StepBuffer
    logits: Tensor  # [bucket rows, vocabulary], overwritten by every replay
    token_ids: Tensor  # [bucket rows] int32, likewise
    node_slots: Tensor | None  # [bucket rows] int32, likewise; see `ForwardPass`


class CapturedRunner(ModelRunner):
    """A `ModelRunner` on a GPU whose steps run as CUDA graphs, captured when first used or ahead by `capture`.

    The result of `forward` is overwritten by the next step of the same bucket.
    """

    def __init__(self, runner: ModelRunner, options: CaptureOptions | None = None) -> None:
        """Take over the runner's model, which is changed for good. Raises `ValueError` where the runner's attention is
        not Triton's."""
        super().__init__(**{each.name: getattr(runner, each.name) for each in fields(ModelRunner)})
        self._options = options or CaptureOptions()
        self._triton = runner.attention.capturable
        # Every size that a step can be captured for, smallest first.
        common = self._options.common_pages and runner.attention.reads_common_pages
        self.buckets = buckets_up_to(self._options.max_rows, self._options.max_sequences, common=common)
        self._capturable = len(self.buckets)
        self._captured: dict[Bucket, _Captured] = {}
        # Sizes that are captured while it serves.
        self._later: list[Bucket] = []
        self._graphs = GraphCapture(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        self.ahead = runner.ahead
        fused = prepare_network(self.network, self._options.layers, self.ahead)
        # Whether capturing a size compiles nothing any more once the largest is captured and others were rehearsed:
        # layers that PyTorch compiles are compiled where they are captured.
        self.compiled_ahead = self.ahead.compiles_ahead and fused == self.network.layer_count
        self.draft_head = runner.draft_head
        self.in_pass = runner.in_pass
        if runner.node_table is not None:
            self._keep_tokens_as(runner.node_table)
        if runner.hooks is not None:
            # Their memory moves.
            runner.hooks.remove()
        if self._options.hooked:
            # After layers are prepared, and before any graph is captured.
            self.hooks = LayerHooks(self.network, self._options.hooked, self.buckets[-1].rows, grows=False)

    def hook(self, layers: tuple[int, ...]) -> None:
        """See `ModelRunner.hook`. Layers were chosen before graphs were captured."""
        if self.hooks is None or self.hooks.layers != layers:
            raise NotSupported(f"captured steps keep the states of layers {self._options.hooked}: set --draft-head")

    @property
    def captured_steps(self) -> tuple[int, int]:
        return len(self._captured), self._capturable

    def pass_sizes(self, sequences: int) -> Sequence[int]:
        """See `ModelRunner.pass_sizes`."""
        return sorted({bucket.rows for bucket in self.buckets if bucket.sequences >= sequences})

    @property
    def scratch_bytes(self) -> int:
        """Bytes of partial attention results, of the captured step with the most."""
        schedules = [one.buffer.plan.schedules.values() for one in self._captured.values()]
        return max((sum(schedule.partials.nbytes for schedule in each) for each in schedules), default=0)

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> Tensor:
        """See `ModelRunner.forward`. Steps outside the buckets run eagerly."""
        captured = self._replay(batch)
        if captured is None:
            # Compiled layers would be compiled once more for every length of a prompt's chunk.
            with eagerly():
                return super().forward(batch)
        return rows_of(captured.logits, batch.logit_rows)

    @torch.inference_mode()
    def run_pass(self, batch: ForwardInput, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """See `ModelRunner.run_pass`. `parameters` have the size of those of the largest step."""
        captured = self._replay(batch, parameters)
        if captured is None:
            with eagerly():
                return super().run_pass(batch, parameters)
        return _pass_of(captured, self.cache)

    @torch.inference_mode()
    def run_later(self, first: ForwardInput, passes: int, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """See `ModelRunner.run_later`. The step moves on in device memory, and the host lays out nothing."""
        bucket = choose_bucket(self.buckets, first.attention)
        captured = None if bucket is None else self._captured.get(bucket)
        if captured is None:
            return super().run_later(first, passes, parameters)
        captured.buffer.advance_one_token(self._last_position)
        self._launch(captured)
        return _pass_of(captured, self.cache)

    @torch.inference_mode()
    def run_after(self, batch: ForwardInput, accepted_counts: Tensor, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """See `ModelRunner.run_after`. The step moves on in device memory, and the host does not wait."""
        last = self._last_position
        captured = self._replay(batch, parameters, lambda step: step.buffer.shift_by_accepted(accepted_counts, last))
        return (
            super().run_after(batch, accepted_counts, parameters)
            if captured is None
            else _pass_of(captured, self.cache)
        )

    @torch.inference_mode()
    def run_device_rows(self, batch: ForwardInput, parameters: NDArray[numpy.int32], begin: Begin) -> ForwardPass:
        """See `ModelRunner.run_device_rows`. The host does not wait."""
        captured = self._replay(batch, parameters, lambda step: begin(step.buffer.step, step))
        return super().run_device_rows(batch, parameters, begin) if captured is None else _pass_of(captured, self.cache)

    @torch.inference_mode()
    def run_again(self, batch: ForwardInput, done: ForwardPass) -> ForwardPass:
        """See `ModelRunner.run_again`. The result has the same tensors."""
        if not isinstance(done.graph_buffers, _Captured):
            return super().run_again(batch, done)
        self._launch(done.graph_buffers)
        return done

    @torch.inference_mode()
    def replay(self, bucket: Bucket, *, few_outputs: bool) -> None:
        """Run the captured pass of this size, with integers that the leading rank shares."""
        self._launch(self._captured[bucket], few_outputs=few_outputs)

    def pass_of(self, bucket: Bucket) -> ForwardPass:
        """The captured pass of this size, as it ran last."""
        return _pass_of(self._captured[bucket], self.cache)

    def prepare_moves(self, done: ForwardPass, verdicts: Verdicts, drafting: DraftingKind | None = None) -> None:
        """See `ModelRunner.prepare_moves`."""
        if not isinstance(done.graph_buffers, _Captured):
            super().prepare_moves(done, verdicts, drafting)
        elif self.link is not None:
            bucket = done.graph_buffers.buffer.bucket
            counts = len(verdicts.accepted_counts), len(verdicts.tensor)
            of_bucket = bucket.rows, bucket.sequences
            self.link.send(MoveAccepted(*counts, *of_bucket, common=bucket.common, drafting=drafting))

    @torch.inference_mode()
    def empty_pass_of(self, bucket: Bucket) -> ForwardPass:
        """The captured pass of this size, without sequences."""
        return self._empty(self._captured[bucket])

    @torch.inference_mode()
    def empty_passes(self) -> Iterator[ForwardPass]:
        yield from map(self._empty, self._captured.values())

    @torch.inference_mode()
    def capture_later(self) -> ForwardPass | None:
        """See `ModelRunner.capture_later`."""
        if not self._later:
            return None
        bucket = self._later.pop(0)
        try:
            self._captured[bucket] = self._capture(bucket)
        # Also where the device has no memory left: steps of these sizes run as the next larger ones.
        except RuntimeError as error:
            log.warning("%d sizes of steps are not captured: %s", 1 + len(self._later), error)
            self._later.clear()
            return None
        self.keep_to_captured(self._later)
        if not self._later:
            log.info("captured all %d sizes of steps", len(self._captured))
        return self._empty(self._captured[bucket])

    def _empty(self, captured: _Captured) -> ForwardPass:
        """The pass without sequences."""
        if self.link is not None:
            bucket = captured.buffer.bucket
            self.link.send(EmptyPass(bucket.rows, bucket.sequences, bucket.common))
        captured.buffer.integers.zero_()
        return _pass_of(captured, self.cache)

    def drop_captures(self) -> None:
        """Drop every graph and its memory."""
        if self.link is not None:
            self.link.send(DropCaptures())
        torch.cuda.synchronize(self.device)
        self._captured.clear()

    def free_memory(self) -> int:
        """Bytes that are free on the device, of several ranks on the fullest."""
        # Joining layers leaves as much memory as they weigh with PyTorch, which capturing gives back to the device.
        # Counted as free only then, a step seemed to take less than nothing, and the cache got 77 GB on a GPU with 66
        # left.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        if self.link is None:
            return free
        self.link.send(CountFreeMemory())
        return self.link.least(free)

    def _keep_tokens_as(self, table: NodeTable) -> None:
        """Have a table of one's own that looks up and recycles as this one does."""
        self.enable_device_row_selection(self._options.max_sequences, table.lookup_tokens, recycles=table.recycles)

    def use_cache(self, cache: KVCache) -> None:
        """Serve from another cache. Graphs hold addresses of the old one, so they are dropped before."""
        if self.link is not None:
            self.link.send(UseCache(cache.num_pages))
        assert not self._captured, "their graphs hold addresses of the old cache"
        self.cache = cache
        if self.node_table is not None:
            self._keep_tokens_as(self.node_table)

    def keep_to_captured(self, later: Iterable[Bucket] = ()) -> None:
        """Capture nothing more, but those for `later` by `capture_later`: a step of another size runs as the next
        larger captured one, or eagerly."""
        self.buckets = tuple(sorted(self._captured))
        self._later = [bucket for bucket in later if bucket not in self._captured]

    def capture(
        self, buckets: Iterable[Bucket], *, seconds: float = inf, progress: Callable[[], object] | None = None
    ) -> int:
        """Capture `buckets` ahead of the first request; none begins when `seconds` are over. Returns how many are
        captured; the rest is when first used, unless `keep_to_captured`. `progress` is called after each capture."""
        start, done = time.monotonic(), 0
        for bucket in buckets:
            if time.monotonic() - start > seconds:
                break
            if bucket not in self._captured:
                with torch.inference_mode():
                    self._captured[bucket] = self._capture(bucket)
            done += 1
            if progress is not None:
                progress()
        return done

    def _replay(
        self,
        batch: ForwardInput,
        parameters: NDArray[numpy.int32] | None = None,
        before: Callable[[_Captured], None] | None = None,
    ) -> _Captured | None:
        """Launch the step, and `before` it what changes its integers on the device. None outside the buckets."""
        bucket = choose_bucket(self.buckets, batch.attention, batch.room)
        if bucket is None or not batch.token_ids:
            return None
        captured = self._captured.get(bucket)
        if captured is None:
            captured = self._captured[bucket] = self._capture(bucket)
        if self.cache.frames is not None:
            self.cache.frames.send()
        outputs = batch.output_rows
        few = captured.outputs is not None and len(outputs) <= self._options.few_outputs
        captured.buffer.load(batch, self._last_position, parameters, outputs if few else None)
        try:
            if before is not None:
                before(captured)
            self._launch(captured, few_outputs=few)
        finally:
            # Also where the device has no memory for `before`: the copy reads the buffer's integers.
            captured.buffer.loaded()
        return captured

    def _launch(self, captured: _Captured, *, few_outputs: bool = False) -> None:
        """Run a captured pass, on every rank; with the logits of the few rows that the buffer was loaded with only."""
        if self.link is not None:
            bucket = captured.buffer.bucket
            self.link.send(ReplayPass(bucket.rows, bucket.sequences, bucket.common, few_outputs))
        captured.graph.replay()
        if captured.outputs is not None:
            (captured.outputs.few if few_outputs else captured.outputs.every).replay()

    @torch.inference_mode()
    def rehearse(self, bucket: Bucket) -> None:
        """Launch the kernels that a step of this size launches, by a few layers, outside of a graph and without effect.
        Of several ranks on this one alone, see `RankLink.alone`."""
        network = self.network
        with network.few_layers() if isinstance(network, Decoder) else contextlib.nullcontext():
            buffer = self._rehearsed(bucket)
            rows, _, _ = self._run(buffer)
            if self._has_outputs_apart(bucket):
                self._few_logits(buffer, rows, self._logits(rows))

    def _rehearsed(self, bucket: Bucket) -> StepBuffer:
        """A buffer that holds a step which fills the bucket and writes no key."""
        pages_each = self.cache.pages_for(self.max_context + bucket.rows)
        verified = self._options.max_sequences, self._options.max_rows
        buffer = StepBuffer(
            bucket,
            self._triton,
            self.device,
            self.cache.page_size,
            pages_each,
            verified,
            recurrent=self._recurrence is not None,
            shared=self.link is not None,
            few_outputs=self._options.few_outputs if self._has_outputs_apart(bucket) else 0,
        )
        # Compiled for the alignment of this buffer's parts. No sequence has a row yet, so nothing moves on.
        buffer.advance_one_token(self._last_position)
        buffer.shift_by_accepted(self.pending, self._last_position)
        if self.node_table is not None:
            self.node_table.warm_up(buffer.step)
        buffer.load(buffer.rehearsal(), self._last_position)
        buffer.loaded()
        return buffer

    def _capture(self, bucket: Bucket) -> _Captured:
        link = self.link
        if link is not None:
            link.send(CapturePass(bucket.rows, bucket.sequences, bucket.common))
        buffer = self._rehearsed(bucket)
        graph, (rows, *others) = self._record(lambda: self._run(buffer), buffer.plan)
        if not self._has_outputs_apart(bucket):
            return _Captured(graph, None, buffer, rows, *others)
        every, (logits,) = self._record(lambda: (self._logits(rows),))
        few, () = self._record(lambda: self._few_logits(buffer, rows, logits))
        return _Captured(graph, _OutputGraphs(every, few), buffer, logits, *others)

    def _has_outputs_apart(self, bucket: Bucket) -> bool:
        """Whether the logits of such a size are a graph of their own, and those of few rows another."""
        return isinstance(self.network, Decoder) and bucket.rows >= 2 * self._options.few_outputs

    def _record(
        self, launch: Callable[[], tuple[Any, ...]], plan: TritonPlan | None = None
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Any, ...]]:
        """The graph of a launch and its results; `plan` is that of its attention, if there is some."""
        with recompiling(_RECOMPILE_LIMIT):
            return self._graphs.capture(launch, plan)

    def _logits(self, rows: Tensor) -> Tensor:
        """[.., V] of hidden rows [.., H]."""
        assert isinstance(self.network, Decoder), "other networks compute both in one"
        return self.network.logits(rows)

    def _few_logits(self, buffer: StepBuffer, rows: Tensor, logits: Tensor) -> tuple[()]:
        """Write the logits of the buffer's few outputs to their places in `logits` [bucket rows, V]."""
        few = self._logits(rows.index_select(0, buffer.few_outputs))
        logits.index_copy_(0, buffer.few_outputs.long(), few)
        return ()

    def _run(self, buffer: StepBuffer) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits of all rows of the bucket, or hidden rows where logits are apart, with token ids and places of nodes'
        inputs."""
        recurrent, states = None, self.cache.recurrent
        if self._recurrence is not None and states is not None:
            plan = self._recurrence.capturable.plan_on_device(buffer.plan.batch, buffer.recurrent_tensors, states)
            recurrent = RecurrentPass(self._recurrence, plan, states)
        step = pass_over(self.attention, buffer.plan, buffer.slots, self.cache, recurrent)
        token_ids = self._token_ids(buffer)
        network, of_rows = self.network, (token_ids, buffer.positions, step)
        if isinstance(network, Decoder) and self._has_outputs_apart(buffer.bucket):
            rows = network.hidden(*of_rows)
        else:
            rows = network(*of_rows)
        return rows, token_ids, None if recurrent is None else recurrent.plan.node_slots

    def _token_ids(self, buffer: StepBuffer) -> Tensor:
        """[bucket rows] int32, with those filled in that only the device has. Other ranks get all integers of the
        step."""
        link, filled = self.link, buffer.filled_token_ids
        if link is None or link.leads:
            token_ids = fill_pending(buffer.token_ids, self.pending, buffer.slots, self.cache.tokens)
            if link is None:
                return token_ids
            filled.copy_(token_ids)
        link.share(buffer.shared)
        return filled


def _pass_of(captured: _Captured, cache: KVCache) -> ForwardPass:
    buffer = captured.buffer
    step = buffer.step
    texts = SequenceTexts(
        cache.tokens, cache.page_size, step.query_starts, step.prefix_lengths, step.page_starts, step.page_table
    )
    parents, slots, parameters = buffer.plan.parents, buffer.slots, buffer.parameters
    return ForwardPass(
        captured.logits,
        captured.token_ids,
        parents,
        slots,
        parameters,
        texts,
        captured,
        buffer.step,
        captured.node_slots,
        buffer.positions,
        buffer.plan,
    )
