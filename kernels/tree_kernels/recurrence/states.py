"""What recurrent layers keep of sequences: states, and the inputs of nodes that were not accepted yet.

A state is that of the committed tokens that have been folded into it, `lengths` of them. A pass reads it and does not
write what its rows add: their inputs are kept in a ring of `window` places, accepted ones are moved right behind the
root as keys are (`verification.move_accepted`), and the next pass folds them into the state before it reads that. So
neither the host nor a pass that is launched ahead needs what was accepted: the length of the prefix shows it.

Nor does the state behind a page end, where other sequences may go on. A sequence may have a second slot. The pass that
takes its state past a page end reads it from the one and writes it to the other, which costs nothing: what is left has
the state before, and the inputs up to the page end and further. The longer state is the sequence's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from tree_kernels.device_event import DeviceEvent
from tree_kernels.lazy_memory import lazy_zeros
from tree_kernels.pages import OutOfPages
from tree_kernels.recurrence.types import RecurrencePlan, StateShape


class StatesMirror(Protocol):
    """States of the same slots elsewhere, which are changed as these are."""

    def copy_slot(self, source: int, target: int) -> None:
        """See `RecurrentStates.copy_slot`."""

    def pair_slots(self, slot: int, second: int) -> None:
        """See `RecurrentStates.pair_slots`."""

    def part_slots(self, slot: int, second: int, tokens: int) -> None:
        """See `RecurrentStates.part_slots`."""

    def move_nodes(self, slot: int, source_keys: Sequence[int], target_keys: Sequence[int]) -> None:
        """See `RecurrentStates.move_nodes`."""


class SlotLength:
    """The tokens that a slot's state is of, on their way to the host behind what was launched before."""

    def __init__(self, length: torch.Tensor) -> None:
        """`length` [1] int32."""
        on_gpu = length.is_cuda
        self._host = torch.empty(1, dtype=torch.int32, pin_memory=on_gpu)
        self._host.copy_(length, non_blocking=True)
        self._there = DeviceEvent(on_gpu=on_gpu)
        self._there.record()

    def read(self) -> int:
        """The tokens; negative where the slot has no state. Waits for them."""
        self._there.wait()
        return int(self._host)


class RecurrentStates:
    """Slots of states, one a sequence, of `layers` recurrent layers, and `kept_slots` for those kept behind pages. Slot
    0 is of no sequence: passes that are run to be measured or checked use it.

    `states` [layers, slots, H, Dk, Dv] fp32; `windows` [layers, slots, K - 1, C] the last inputs of the convolution,
    the oldest first; `lengths` [slots] int32. Of nodes, `inputs` [layers, slots, window, 1, C] and `gates`
    [layers, slots, window, 1, G] fp32: key `t` of a sequence is at place `t % window`. `seconds` [slots] int32 are the
    slots that sequences have besides, each its own where there is none.
    """

    def __init__(
        self,
        layers: int,
        sequences: int,
        window: int,
        shape: StateShape,
        dtype: torch.dtype,
        device: torch.device,
        kept: int = 0,
        page_size: int = 1,
    ) -> None:
        """`window` is the most rows that a tree has, its root among them; `kept`, how many slots are for states behind
        pages of `page_size` tokens."""
        if layers < 1 or sequences < 1 or window < 1:
            raise ValueError(f"expected layers, sequences and rows, got {layers}, {sequences} and {window}")
        self.shape, self.window, self.page_size = shape, window, page_size
        slots = sequences + 1 + kept
        self.kept_slots = range(sequences + 1, slots)
        self.states = lazy_zeros(
            (layers, slots, shape.heads, shape.key_width, shape.value_width), torch.float32, device
        )
        self.windows = lazy_zeros((layers, slots, shape.taps - 1, shape.channels), dtype, device)
        self.lengths = lazy_zeros((slots,), torch.int32, device)
        self.seconds = torch.arange(slots, dtype=torch.int32, device=device)
        self.inputs = lazy_zeros((layers, slots, window, 1, shape.channels), dtype, device)
        self.gates = lazy_zeros((layers, slots, window, 1, shape.gates), torch.float32, device)
        # The lowest last, which is taken first.
        self._free = list(range(sequences, 0, -1))
        self._sequences = sequences
        # Of the other ranks of a model.
        self.mirror: StatesMirror | None = None

    @staticmethod
    def layer_bytes(shape: StateShape, window: int, dtype: torch.dtype) -> int:
        """Bytes that one layer keeps of one sequence."""
        state = shape.heads * shape.key_width * shape.value_width
        inputs = (window + shape.taps - 1) * shape.channels
        # The state and gates are of four bytes.
        return 4 * (state + window * shape.gates) + inputs * dtype.itemsize

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence, all layers."""
        return len(self.states) * self.layer_bytes(self.shape, self.window, self.windows.dtype)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def allocate_slot(self) -> int:
        """A slot for a sequence that begins. Its first pass has no prefix and so reads nothing of what is there. Raises
        `OutOfPages` where none is free."""
        if not self._free:
            raise OutOfPages("every slot of recurrent states has a sequence")
        return self._free.pop()

    def release_slot(self, slot: int) -> None:
        """Give a slot back."""
        assert 0 < slot <= self._sequences and slot not in self._free, f"slot {slot} has no sequence"
        self._free.append(slot)

    def check_slots(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless every slot is free or has one sequence, of those in `owned`."""
        assert sorted([*self._free, *owned]) == list(range(1, self._sequences + 1)), "a slot was lost or has two owners"

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int) -> None:
        """Copy all that one slot holds to another, behind the passes that were launched before."""
        if self.mirror is not None:
            self.mirror.copy_slot(source, target)
        for pool in (self.states, self.windows, self.inputs, self.gates):
            pool[:, target].copy_(pool[:, source])
        self.lengths[target : target + 1].copy_(self.lengths[source : source + 1])

    @torch.inference_mode()
    def pair_slots(self, slot: int, second: int) -> None:
        """Give a sequence a `second` slot, for the passes that are launched from now on; its own takes that away."""
        if self.mirror is not None:
            self.mirror.pair_slots(slot, second)
        self.seconds[slot : slot + 1].fill_(second)
        if second != slot:
            self.lengths[second : second + 1].fill_(-1)

    @torch.inference_mode()
    def part_slots(self, slot: int, second: int, tokens: int) -> SlotLength:
        """Take a sequence's `second` slot away, and leave there what the state behind its first `tokens` is made of, a
        page end that all passes before have reached: the last state of no more tokens, and the inputs behind it.
        Returns of how many tokens that is. There is none where these are more, or negative: its state had left the page
        end before it had two slots, or has left another since."""
        if self.mirror is not None:
            self.mirror.part_slots(slot, second, tokens)
        own, other = (self.lengths[one : one + 1] for one in (slot, second))
        is_own = (own <= tokens) & ((own > other) | (other > tokens))
        for pool in (self.states, self.windows, self.inputs, self.gates):
            torch.where(is_own, pool[:, slot], pool[:, second], out=pool[:, second])
        torch.where(is_own, own, other, out=other)
        self.seconds[slot : slot + 1].fill_(slot)
        return SlotLength(other)

    def current(self, slot: int) -> int:
        """The slot that has the state of a sequence: its own, or its second one. Waits for the device."""
        return max((slot, int(self.seconds[slot])), key=lambda one: int(self.lengths[one]))

    def move_nodes(self, slot: int, source_keys: Sequence[int], target_keys: Sequence[int]) -> None:
        """Copy the inputs of nodes at these keys of a sequence to others, of all layers. All sources are read before
        any target is written."""
        if self.mirror is not None:
            self.mirror.move_nodes(slot, source_keys, target_keys)
        slot = self.current(slot)
        source, target = (
            torch.tensor([key % self.window for key in keys], device=self.inputs.device)
            for keys in (source_keys, target_keys)
        )
        for pool in (self.inputs, self.gates):
            own = pool[:, slot]
            own.index_copy_(1, target, own.index_select(1, source))

    def __str__(self) -> str:
        kept = f" and {len(self.kept_slots)} copies" if self.kept_slots else ""
        return f"recurrent states of {self._sequences} sequences{kept}, {self.sequence_bytes:,} bytes each"


class LayerStates(NamedTuple):
    """The states of one layer in one step."""

    plan: RecurrencePlan
    states: RecurrentStates
    layer: int
