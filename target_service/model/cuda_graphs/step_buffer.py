"""The integers of a captured step, in one tensor of a fixed address, and the pinned memory that fills it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from target_service.model.cuda_graphs.sizes import Bucket, capacity, padded
from target_service.model.forward import ForwardInput
from tree_kernels.attention import plan_integers
from tree_kernels.attention.triton_planning import TritonPlan, TritonPlanner
from tree_kernels.device_event import DeviceEvent
from tree_kernels.node_table import StepIntegers, advance_one_token, shift_by_accepted
from tree_kernels.recurrence.triton_backend import PassTensors
from tree_kernels.verification import RECORD, parameter_count

# Pinned buffers: one is filled for the next step while the other is copied.
_PINNED_BUFFERS = 2
# [3, 1]: token id, position and slot of a row that a step leaves free.
_FREE_ROW = numpy.array([[0], [0], [-1]], numpy.int32)


class _Pinned:
    """Integers on the host that an asynchronous copy to the device reads."""

    def __init__(self, size: int, *, on_gpu: bool) -> None:
        # [size] int32, and the same as an array.
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self.array: NDArray[numpy.int32] = self.tensor.numpy()
        # Reached once the last copy has read them.
        self.copied = DeviceEvent(on_gpu=on_gpu)


class StepBuffer:
    """The integers of one step on the device, and the plan that lies in them.

    Layout: token ids, positions and slots [rows] each, then the parameters for verification, slots of recurrent states,
    rows whose logits are computed where these are few, then the plan, whose pages come last, so that a step with few
    pages copies little.
    """

    def __init__(
        self,
        bucket: Bucket,
        attention: TritonPlanner,
        device: torch.device,
        page_size: int,
        pages_each: int,
        verified: tuple[int, int],
        *,
        recurrent: bool = False,
        shared: bool = False,
        few_outputs: int = 0,
    ) -> None:
        """Each sequence has up to `pages_each`, and with `recurrent` a slot of states; the parameters have room for
        `verified` (sequences, rows). With `shared`, other ranks run the step too. `few_outputs` rows may be those whose
        logits are computed, fewer than the bucket's."""
        self.bucket = bucket
        largest = capacity(bucket, page_size, pages_each)
        rows = bucket.rows
        self._states_at = 3 * rows + parameter_count(*verified)
        self._outputs_at = self._states_at + (bucket.sequences if recurrent else 0)
        self._plan_at = self._outputs_at + few_outputs
        size = self._plan_at + plan_integers(largest)
        self._attention = attention
        on_gpu = device.type == "cuda"
        # Used in turns, so that none is written while it is read.
        self._hosts = [_Pinned(size, on_gpu=on_gpu) for _ in range(_PINNED_BUFFERS)]
        self._turn = 0
        # [size + rows] int32, what other ranks get: the integers, and behind them the token ids with those filled in
        # that only the device had.
        self.shared = torch.zeros(size + (rows if shared else 0), dtype=torch.int32, device=device)
        self.integers, self.filled_token_ids = self.shared[:size], self.shared[size:]
        self.token_ids, self.positions, self.slots = self.integers[: 3 * rows].view(3, rows)
        # [few_outputs] int32: every row of the loaded step whose logits are needed, where it was loaded as one of few.
        self.few_outputs = self.integers[self._outputs_at : self._plan_at]
        # [parameters] int32
        self.parameters = self.integers[3 * rows : self._states_at]
        self.plan: TritonPlan = attention.plan(largest, self.integers[self._plan_at :])
        plan, of_rows = self.plan, (self.token_ids, self.positions, self.slots, self.parameters)
        of_sequences = plan.query_starts, plan.prefix_lengths, plan.page_starts, plan.page_table
        owners = self.parameters[RECORD * verified[0] :]
        self.step = StepIntegers(*of_rows, *of_sequences, owners, plan.parents, plan.causal)
        self._page_size = page_size
        # What layers with states need of the plan.
        self.recurrent_tensors = PassTensors(
            plan.query_starts,
            plan.prefix_lengths,
            plan.causal,
            plan.parents,
            self.integers[self._states_at : self._outputs_at],
        )

    def rehearsal(self) -> ForwardInput:
        """A step that fills the bucket and writes no key."""
        rows = (0,) * self.bucket.rows
        return ForwardInput(rows, rows, (-1,) * len(rows), self.plan.batch, ())

    def load(
        self,
        batch: ForwardInput,
        last_position: int,
        parameters: NDArray[numpy.int32] | None = None,
        outputs: Sequence[int] | None = None,
    ) -> None:
        """Copy a step to the device, with its parameters if it is to be verified, without waiting. `outputs` are the
        rows whose logits are needed, rising, where these are few. Call `loaded` once the pass is launched. Raises
        `ValueError` where the step does not fit."""
        count, rows_end = len(batch.token_ids), 3 * self.bucket.rows
        positions = batch.positions
        if max(positions) > last_position:
            positions = tuple(min(position, last_position) for position in positions)
        used = array("i", batch.token_ids + positions + batch.slots)
        packed = self._attention.pack(self.plan, padded(batch.attention, self.bucket))
        end = self._plan_at + len(packed)
        self._turn = (self._turn + 1) % _PINNED_BUFFERS
        host = self._hosts[self._turn]
        host.copied.wait()
        # Small writes take a fifth of the time in numpy, and rows that are free half of it in a list.
        rows = host.array[:rows_end].reshape(3, -1)
        rows[:, :count] = numpy.frombuffer(used, numpy.int32).reshape(3, count)
        rows[:, count:] = _FREE_ROW
        if parameters is not None:
            host.array[rows_end : self._states_at] = parameters
        if self._outputs_at > self._states_at:
            host.array[self._states_at : self._outputs_at] = 0
            host.array[self._states_at : self._states_at + len(batch.state_slots)] = batch.state_slots
        if outputs is not None:
            # A row that nothing reads may be computed several times.
            unread = next((place for place, row in enumerate(outputs) if place != row), len(outputs))
            host.array[self._outputs_at : self._plan_at] = unread
            host.array[self._outputs_at : self._outputs_at + len(outputs)] = outputs
        host.array[self._plan_at : end] = numpy.frombuffer(packed, numpy.int32)
        self.integers[:end].copy_(host.tensor[:end], non_blocking=True)

    def loaded(self) -> None:
        """Record that the copy of `load` was launched. Apart from it, so that the pass is launched first."""
        self._hosts[self._turn].copied.record()

    def advance_one_token(self, last_position: int) -> None:
        """Move the loaded step of one row a sequence on to the next; see
        `tree_kernels.node_table.advance_one_token`."""
        advance_one_token(self.step, self._page_size, last_position)

    def shift_by_accepted(self, accepted_counts: Tensor, last_position: int) -> None:
        """Move the loaded step on by what the one before accepted; see `tree_kernels.node_table.shift_by_accepted`."""
        shift_by_accepted(self.step, accepted_counts, self._page_size, last_position)
