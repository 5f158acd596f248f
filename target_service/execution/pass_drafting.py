"""Decides what a drafter does behind passes, and has it leave its trees in the node tables."""

from __future__ import annotations

from collections.abc import Callable

import torch

from target_service.model.drafter_run import DrafterRun
from target_service.model.forward import ForwardPass
from target_service.model.runner import ModelRunner
from tree_kernels.node_table import NodeTable
from tree_kernels.verification import Verdicts
from tree_models.in_pass import DraftingKind, InPassDrafter, TablesToWrite


class PassDrafting:
    """The drafter of a runner behind its passes, for one engine."""

    def __init__(self, runner: ModelRunner, drafter: InPassDrafter, table: NodeTable, max_rows: int) -> None:
        """Behind passes of at most `max_rows`."""
        self._run, self._runner, self._table = DrafterRun(runner, drafter, max_rows), runner, table
        self._divided = drafter.divided
        # Of the next pass, and whether it grows trees; without them it is read all the same, so that trees may follow
        # at any time.
        self.sequences = 1
        self.grows = True
        # [1] float32: what trees' scores are multiplied by.
        self._trust = torch.ones(1, dtype=torch.float32, device=runner.device)
        self._noted = 1.0

    def set_trust(self, trust: float) -> None:
        """Multiply scores by this from the next launch on."""
        # Changes that the device is told of. Chosen: a node's cost changes by a thirtieth of that of a halving.
        if abs(trust - self._noted) > 0.02 * self._noted:
            self._noted = trust
            self._trust.fill_(trust)

    def kind(self, *, greedy: bool) -> DraftingKind:
        """What is done behind the next pass; `greedy`: all of its sequences are. Of their number the next power of two:
        places of absent ones take as long as the others' levels."""
        room = min(1 << (self.sequences - 1).bit_length(), self._table.max_sequences)
        return DraftingKind(room, self.grows, self.grows and not greedy)

    def rooms(self, most: int) -> list[int]:
        """Numbers of sequences for which it is captured behind passes of up to `most`, a power of four: those that no
        smaller passes have room for."""
        return sorted({max(1, most // 2), most})

    def prepare_moves(self, done: ForwardPass, verdicts: Verdicts, *, greedy: bool) -> None:
        """Have the other ranks move the rows of a pass that are accepted, and draft behind it where they have a part of
        the drafter. Before each `draft_behind`, and outside of graphs."""
        self._runner.prepare_moves(done, verdicts, self.kind(greedy=greedy) if self._divided else None)

    def draft_behind(self, kind: DraftingKind, done: ForwardPass, verdicts: Verdicts, move: Callable[[], None]) -> None:
        """Launch it behind a pass that was verified; `move` moves its accepted rows."""
        to = TablesToWrite(self._table.table_slots, self._trust, self._table.tables)
        self._run.launch(kind, done, verdicts, move, to)
