"""The integers of a captured step, in one tensor that stays where it is, and the pinned memory that fills it."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from target_service.model.buckets import Bucket, capacity, padded
from target_service.model.runner import ForwardInput
from tree_kernels._triton_attention import TritonAttention, TritonPlan
from tree_kernels.batch import plan_integers
from tree_kernels.feeding import StepIntegers, advance, move_on


class StepBuffer:
    """The integers of one step on the device, and the plan that lies in them.

    Layout: token ids, positions, slots [rows] each, then the parameters that the step is verified with, and then the
    plan, whose pages come last, so that a step with few pages copies little.
    """

    def __init__(
        self,
        bucket: Bucket,
        attention: TritonAttention,
        device: torch.device,
        page_size: int,
        pages_each: int,
        parameters: int,
    ) -> None:
        """`pages_each` sequence at most; `parameters` is how many integers `load` may bring along."""
        self.bucket = bucket
        largest = capacity(bucket, page_size, pages_each)
        rows = bucket.rows
        self._plan_at = 3 * rows + parameters
        size = self._plan_at + plan_integers(largest)
        self._attention = attention
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        # Small writes cost numpy a fifth of what they cost torch.
        self._head = self._host.numpy()[: 3 * rows].reshape(3, rows)
        self._host_parameters = self._host.numpy()[3 * rows : self._plan_at]
        self.integers = torch.zeros(size, dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.slots = self.integers[: 3 * rows].view(3, rows)
        # [parameters] int32
        self.parameters = self.integers[3 * rows : self._plan_at]
        self.plan: TritonPlan = attention.plan(largest, self.integers[self._plan_at :])
        self._page_size = page_size
        self._step = StepIntegers(
            self.token_ids,
            self.positions,
            self.slots,
            self.parameters,
            self.plan.query_starts,
            self.plan.prefix_lengths,
            self.plan.page_starts,
            self.plan.page_table,
        )

    def load(self, batch: ForwardInput, last_position: int, parameters: NDArray[numpy.int32] | None = None) -> None:
        """Send a step to the device, with new parameters if there are any. Does not wait for it.

        Raises:
            ValueError: the step does not fit.
        """
        used = len(batch.token_ids)
        packed = self._attention.pack(self.plan, padded(batch.attention, self.bucket))
        if self._copied is not None:
            # The last copy may still read the pinned memory.
            self._copied.synchronize()
        token_ids, positions, slots = self._head
        token_ids[:used], token_ids[used:] = batch.token_ids, 0
        positions[:used], positions[used:] = batch.positions, 0
        slots[:used], slots[used:] = batch.slots, -1
        numpy.minimum(positions, last_position, out=positions)
        if parameters is not None:
            self._host_parameters[:] = parameters
        end = self._plan_at + len(packed)
        self._host[self._plan_at : end] = packed
        self.integers[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def advance(self, last_position: int) -> None:
        """Make the step that is there, of one row a sequence, the one after it; see `feeding.advance`."""
        advance(self._step, self._page_size, last_position)

    def move_on(self, accepted_counts: Tensor, last_position: int) -> None:
        """Move the step that is there on by what the one before accepted; see `feeding.move_on`."""
        move_on(self._step, accepted_counts, self._page_size, last_position)
