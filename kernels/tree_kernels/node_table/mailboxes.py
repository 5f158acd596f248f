"""Boxes of tables from the host, of which the device takes the newest when a step begins.

A step is launched while another runs, and the device comes to it milliseconds later. Its tables are therefore not
copied with the launch: they lie in boxes that are written concurrently, so that trees which a draft sends until the
last moment are used. Neither side waits: a table is copied to a place that the device does not read yet, followed by
its number, which makes it the newest.

The boxes are in the device's memory. A kernel that read them from the host's took 65 to 160 us at the start of every
pass, 8 and 32 sequences at 8B size (H200, `benchmarks/results/2026-11-23-h200-widened-seventh.md`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.node_table.layout import TABLE

# Tables that a box holds at once, so that the newest is whole while further ones are written. A power of two. The
# device reads one in some microseconds, in which no more than one is written.
TURNS = 4
# Numbers of tables wrap around after it.
LAST_NUMBER = (1 << 30) - 1
# Sends in flight at most. A table's place on the host is reused after `TURNS` sends, its numbers' place after these.
_IN_FLIGHT = 2


class Mailboxes:
    """A box for each slot of a `NodeTable`, and the host's own copy of it."""

    def __init__(self, slots: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # [B] int32, the number of the last table that came into each box; 0 before the first.
        self.newest = torch.zeros(slots, dtype=torch.int32, device=device)
        # [B, TURNS, TABLE] int32, that with number n at n % `TURNS`.
        self.tables = torch.zeros(slots, TURNS, TABLE, dtype=torch.int32, device=device)
        own = torch.zeros(slots, TURNS, TABLE, dtype=torch.int32, pin_memory=on_gpu)
        self._written: npt.NDArray[np.int32] = own.numpy()
        self._numbers = np.zeros(slots, np.int32)
        self._own = own
        # Views of both sides' places, since making them takes longer than copying.
        self._from = [list(turns) for turns in own]
        self._to = [list(turns) for turns in self.tables]
        # [_IN_FLIGHT, B] numbers as they are sent.
        self._sent_numbers = torch.zeros(_IN_FLIGHT, slots, dtype=torch.int32, pin_memory=on_gpu)
        # Slots whose newest table was not sent yet.
        self._put: dict[int, None] = {}
        self._sends = 0
        self._stream: torch.cuda.Stream | None = None
        self._sent: list[torch.cuda.Event] = []
        if on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # After the zeros.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._sent = [torch.cuda.Event() for _ in range(_IN_FLIGHT)]  # type: ignore[no-untyped-call]

    def next_table(self, slot: int) -> npt.NDArray[np.int32]:
        """[TABLE] int32 to write the slot's next table to; it is not sent before `put`, those before it are."""
        if slot in self._put:
            # The device detects a torn table by a number that came while it read. So each is sent, and before a copy of
            # the whole box may have a part of the next table.
            self.send()
        table: npt.NDArray[np.int32] = self._written[slot, (int(self._numbers[slot]) + 1) % TURNS]
        return table

    def put(self, slot: int) -> None:
        """Mark the table that was written last as whole: the next `send` sends it."""
        self._numbers[slot] = (int(self._numbers[slot]) + 1) & LAST_NUMBER
        self._put[slot] = None

    def send(self) -> None:
        """Copy the tables that were `put` to the device, on a stream of its own, and then their numbers."""
        if not self._put:
            return
        place = self._sends % _IN_FLIGHT
        to, own = self._places()
        if self._stream is None:
            self._copy(to, own, place)
        else:
            # Complete long before, as a rule; an event that was never recorded is.
            self._sent[place].synchronize()
            with torch.cuda.stream(self._stream):
                self._copy(to, own, place)
                self._sent[place].record()
        self._sends += 1
        self._put.clear()

    def _places(self) -> tuple[list[Tensor], list[Tensor]]:
        """What is copied for the tables that were put: places on the device, and on the host.

        Boxes that lie close together are copied as a whole. Tables that the device has already are then overwritten by
        themselves, and a part of one that the host is just writing is not read: its number comes behind a later copy.
        """
        first, end = min(self._put), max(self._put) + 1
        # As one range if at least one box in four has a new table. Chosen, not measured: every copy takes host time,
        # and a box of 80 KB little of the bus's.
        if len(self._put) > 1 and end - first <= 4 * len(self._put):
            return [self.tables[first:end]], [self._own[first:end]]
        turns = [(slot, int(self._numbers[slot]) % TURNS) for slot in self._put]
        return [self._to[slot][turn] for slot, turn in turns], [self._from[slot][turn] for slot, turn in turns]

    def _copy(self, to: list[Tensor], own: list[Tensor], place: int) -> None:
        torch._foreach_copy_(to, own, non_blocking=True)
        numbers = self._sent_numbers[place]
        numbers.numpy()[:] = self._numbers
        self.newest.copy_(numbers, non_blocking=True)

    def await_sent(self) -> None:
        """Make the current stream wait until all that was sent has arrived."""
        if self._stream is not None and self._sends:
            last = self._sent[(self._sends - 1) % _IN_FLIGHT]
            if not last.query():  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(self.newest.device).wait_event(last)
