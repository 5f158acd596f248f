"""Where the host leaves tables for the device, which takes the newest of each when a step begins.

A step is launched while another runs, and the device comes to it milliseconds later. Its tables are therefore not
copied with the launch: they lie in memory of the host that the device reads by itself, and what a draft says until the
last moment is there. Nobody waits: the host writes a table where the device does not look yet, and then says that it is
there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tree_kernels.node_table.layout import TABLE

# Tables of a box that are kept at once, so that the newest is whole while further ones are written. A power of two.
# The device reads one in some microseconds, in which a host writes no more than one.
TURNS = 4
# Numbers of tables begin again behind it.
LAST_NUMBER = (1 << 30) - 1


class Mailboxes:
    """A box for each slot of a `NodeTable`.

    Attributes:
        newest: [B] int32, the number of the last table that was put into each box; 0 before the first.
        tables: [B, TURNS, TABLE] int32, that with number n at n % `TURNS`.
    """

    def __init__(self, slots: int, *, pinned: bool) -> None:
        """`pinned`: in memory that a GPU can read, which takes one."""
        self.newest = torch.zeros(slots, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(slots, TURNS, TABLE, dtype=torch.int32, pin_memory=pinned)
        self._newest, self._tables = self.newest.numpy(), self.tables.numpy()

    def next_table(self, slot: int) -> npt.NDArray[np.int32]:
        """[TABLE] int32 to write the slot's next table to, which the device does not read before `put`."""
        table: npt.NDArray[np.int32] = self._tables[slot, (int(self._newest[slot]) + 1) % TURNS]
        return table

    def put(self, slot: int) -> None:
        """The table that was written last is whole."""
        self._newest[slot] = (int(self._newest[slot]) + 1) & LAST_NUMBER
