"""Steps as captured CUDA graphs: a step costs the host one small copy and one launch.

A graph reads its step from tensors that stay where they are. All of them are parts of one buffer of integers per
bucket, which one copy from pinned memory fills. Rows that a step leaves free have no sequence, no slot and no effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import AttentionInterface

from target_service.model.buckets import Bucket, buckets_up_to, capacity, choose_bucket, padded
from target_service.model.joining import compile_shared, join_linears
from target_service.model.runner import ForwardInput, ModelRunner, _attend, _Step
from tree_kernels._triton_attention import TritonAttention, TritonPlan, plan_integers

log = logging.getLogger(__name__)
ATTENTION = "outrider_captured"
# Versions of a layer that the compiler may make: one per number of rows, and frames that a layer falls into.
_RECOMPILE_LIMIT = 64


class _Held:
    """Keeps the compiler from looking into a step, and from compiling once per layer."""

    def __init__(self, step: _Step) -> None:
        self.step = step


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_opaque(
    *args: Any, outrider_step: _Step | None = None, outrider_held: _Held | None = None, **kw: Any
) -> Any:
    """`runner._attend`, in which layers differ, between the compiled parts of a layer, in which they do not."""
    return _attend(*args, outrider_step=outrider_held.step if outrider_held else outrider_step, **kw)


AttentionInterface.register(ATTENTION, _attend_opaque)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What is captured, and how layers are prepared.

    Attributes:
        max_rows: of all sequences of a step; larger steps run eagerly.
        max_sequences: of a step.
        compiled: fuse what lies between matrix products with the compiler.
        joined: compute products that share their input as one. Only for compiled layers.
    """

    max_rows: int = 256
    max_sequences: int = 64
    compiled: bool = True
    joined: bool = True


class StepBuffer:
    """The integers of one step on the device, and the plan that lies in them.

    Layout: token ids, positions, slots [rows] each, and then the plan, whose pages come last, so that a step with few
    pages copies little.
    """

    def __init__(
        self, bucket: Bucket, attention: TritonAttention, device: torch.device, page_size: int, pages_each: int
    ) -> None:
        self.bucket = bucket
        largest = capacity(bucket, page_size, pages_each)
        rows, size = bucket.rows, 3 * bucket.rows + plan_integers(largest)
        self._attention = attention
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        # Small writes cost numpy a fifth of what they cost torch.
        self._head = self._host.numpy()[: 3 * rows].reshape(3, rows)
        self.integers = torch.zeros(size, dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.slots = self.integers[: 3 * rows].view(3, rows)
        self.plan: TritonPlan = attention.plan(largest, self.integers[3 * rows :])

    def load(self, batch: ForwardInput, last_position: int) -> None:
        """Send a step to the device. Does not wait for it.

        Raises:
            ValueError: the step does not fit.
        """
        rows, used = self.bucket.rows, len(batch.token_ids)
        packed = self._attention.pack(self.plan, padded(batch.attention, self.bucket))
        if self._copied is not None:
            # The last copy may still read the pinned memory.
            self._copied.synchronize()
        token_ids, positions, slots = self._head
        token_ids[:used], token_ids[used:] = batch.token_ids, 0
        positions[:used], positions[used:] = batch.positions, 0
        slots[:used], slots[used:] = batch.slots, -1
        numpy.minimum(positions, last_position, out=positions)
        end = 3 * rows + len(packed)
        self._host[3 * rows : end] = packed
        self.integers[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffer: StepBuffer
    # [bucket rows, vocabulary] and [bucket rows] int64, overwritten by every replay.
    logits: Tensor
    greedy: Tensor


class CapturedRunner(ModelRunner):
    """A `ModelRunner` on a GPU whose steps run as CUDA graphs, captured when first met or ahead by `capture`.

    What `forward` returns is overwritten by the next step of the same bucket.
    """

    def __init__(self, runner: ModelRunner, options: CaptureOptions | None = None) -> None:
        """Takes over the runner's model, which is changed for good.

        Raises:
            ValueError: the runner's attention is not Triton's.
        """
        super().__init__(
            runner._model,
            runner.tokenizer,
            runner.cache,
            runner._attention,
            name=runner.name,
            max_context=runner.max_context,
            end_token_ids=runner.end_token_ids,
            tokenizer_fingerprint=runner.tokenizer_fingerprint,
        )
        self._options = options or CaptureOptions()
        self._triton = runner._attention.capturable
        self._buckets = buckets_up_to(self._options.max_rows, self._options.max_sequences)
        self._captured: dict[Bucket, _Captured] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._model.set_attn_implementation(ATTENTION)
        if self._options.compiled:
            _compile_layers(self._model, joined=self._options.joined)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every size that a step can be captured for, smallest first."""
        return self._buckets

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> Tensor:
        """See `ModelRunner.forward`. Steps outside the buckets run eagerly."""
        captured = self._replay(batch)
        if captured is None:
            return self._eager(batch)
        return _rows_of(captured.logits, batch.logit_rows)

    @torch.inference_mode()
    def greedy(self, batch: ForwardInput) -> Tensor:
        """[len(logit_rows)] int64: the likeliest token after each row, the lowest id among equals, on the device."""
        captured = self._replay(batch)
        if captured is None:
            return self._eager(batch).argmax(-1)
        return _rows_of(captured.greedy, batch.logit_rows)

    def capture(
        self,
        buckets: Iterable[Bucket],
        *,
        seconds: float = float("inf"),
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Capture ahead of the first request, until `seconds` are over. Returns how many are captured.

        Args:
            buckets: in order of importance; those left over are captured when first met.
            seconds: no capture begins later than this.
            progress: told after each how many are done, and of how many.
        """
        wanted, start, done = list(buckets), time.monotonic(), 0
        for bucket in wanted:
            if time.monotonic() - start > seconds:
                log.info("captured %d of %d step sizes in %.0f s; the others follow on use", done, len(wanted), seconds)
                break
            if bucket not in self._captured:
                with torch.inference_mode():
                    self._captured[bucket] = self._capture(bucket)
            done += 1
            if progress is not None:
                progress(done, len(wanted))
        return done

    def _eager(self, batch: ForwardInput) -> Tensor:
        # A compiled layer would be compiled once more for every length of a prompt's chunk.
        with torch.compiler.set_stance("force_eager"):
            return super().forward(batch)

    def _replay(self, batch: ForwardInput) -> _Captured | None:
        bucket = choose_bucket(self._buckets, batch.attention)
        if bucket is None or not batch.token_ids:
            return None
        captured = self._captured.get(bucket)
        if captured is None:
            captured = self._captured[bucket] = self._capture(bucket)
        captured.buffer.load(batch, self._last_position)
        captured.graph.replay()
        return captured

    def _capture(self, bucket: Bucket) -> _Captured:
        pages_each = self.cache.pages_for(self.max_context + bucket.rows)
        buffer = StepBuffer(bucket, self._triton, self.device, self.cache.page_size, pages_each)
        buffer.load(_rehearsal(buffer), self._last_position)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            # Compiles what is to be compiled, and lets libraries allocate what they keep.
            for _ in range(2):
                self._run(buffer)
        self._stream.synchronize()
        # The first layer to run makes the schedule, which has to become part of the graph.
        buffer.plan.schedules.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = self._run(buffer)
            greedy = _likeliest(logits)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return _Captured(graph, buffer, logits, greedy)

    def _run(self, buffer: StepBuffer) -> Tensor:
        """Logits of all rows of the bucket."""
        step = _Step(self._attention, buffer.plan, buffer.slots, self.cache)
        output = self._model(
            input_ids=buffer.token_ids.unsqueeze(0),
            position_ids=buffer.positions.unsqueeze(0),
            use_cache=False,
            outrider_held=_Held(step),
        )
        logits: Tensor = output.logits[0]
        return logits


def _rehearsal(buffer: StepBuffer) -> ForwardInput:
    """A step that fills the bucket and writes no key anywhere."""
    rows = (0,) * buffer.bucket.rows
    return ForwardInput(rows, rows, (-1,) * len(rows), buffer.plan.batch, ())


def _likeliest(logits: Tensor) -> Tensor:
    """[rows, V] -> [rows] int64: argmax, the lowest of equals. One row alone would keep one processor busy for long."""
    rows, vocabulary = logits.shape
    parts = next(count for count in (64, 16, 4, 1) if vocabulary % count == 0)
    values, indices = logits.view(rows, parts, vocabulary // parts).max(-1)
    best = values.argmax(-1, keepdim=True)
    return (indices.gather(1, best) + best * (vocabulary // parts)).squeeze(1)


def _rows_of(values: Tensor, rows: tuple[int, ...]) -> Tensor:
    """The rows asked for, as a view where they are consecutive."""
    if rows and rows == tuple(range(rows[0], rows[0] + len(rows))):
        return values[rows[0] : rows[0] + len(rows)]
    return values[torch.tensor(rows, dtype=torch.int64).to(values.device, non_blocking=True)]


def _compile_layers(model: Any, *, joined: bool) -> None:
    """Have every decoder layer and the last norm compiled at their first call."""
    if joined:
        join_linears(model)
    for layer in model.model.layers:
        layer.compile(backend=compile_shared, dynamic=False)
    model.model.norm.compile(backend=compile_shared, dynamic=False)
