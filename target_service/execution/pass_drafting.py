"""Runs a drafter behind passes: what it reads of them, and the trees that it leaves in the node tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from target_service.model.forward import ForwardPass
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionPlan, TreeAttention
from tree_kernels.node_table import NodeTable
from tree_kernels.pass_trees import VerifiedRows
from tree_kernels.verification import Verdicts
from tree_models.in_pass import InPassDrafter, TablesToWrite, VerifiedPass
from tree_models.layers.paged import PagedPass


class DraftingKind(NamedTuple):
    """What is done behind a pass: for how many sequences at most, whether trees are grown, and some are COUPLED."""

    sequences: int
    grows: bool
    coupled: bool


class PassDrafting:
    """Launches the drafter of a runner behind its passes, for one engine."""

    def __init__(self, runner: ModelRunner, drafter: InPassDrafter, table: NodeTable, max_rows: int) -> None:
        """Behind passes of at most `max_rows`."""
        own = runner.attention
        # Keys and values beside a target of latents have plans of the same form.
        self._attention = own if drafter.latent == runner.latent else TreeAttention("triton", runner.device)
        drafter.prepare(self._attention, runner.cache.page_size, runner.max_context, max_rows)
        self._runner, self._drafter, self._table = runner, drafter, table
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

    # Whoever launches it: what is allocated once is written by all.
    @torch.inference_mode()
    def draft_behind(self, kind: DraftingKind, done: ForwardPass, verdicts: Verdicts, move: Callable[[], None]) -> None:
        """Launch it behind a pass that was verified; `move` moves its accepted rows."""
        hooks, texts, plan, positions = self._runner.hooks, done.texts, done.plan, done.positions
        assert hooks is not None and plan is not None and positions is not None, "passes have them with a drafter"
        rows = VerifiedRows(
            done.token_ids, done.parameters, texts.query_starts, texts.prefix_lengths, texts.page_starts,
            texts.page_table, verdicts,
        )  # fmt: skip
        step = PagedPass(self._attention, _planned_again(plan), done.slots, self._runner.cache)
        states = hooks.states(len(done.token_ids))
        self._drafter.read(VerifiedPass(rows, states, positions, step), kind.sequences)
        move()
        if kind.grows:
            to = TablesToWrite(self._table.table_slots, self._trust, self._table.tables)
            self._drafter.grow(kind.sequences, step, to, coupled=kind.coupled)


def _planned_again(plan: AttentionPlan) -> AttentionPlan:
    """The plan of a pass, whose work is divided once more: the pass itself need not have run, where what follows it is
    captured."""
    return replace(plan, schedules={}, parts=None) if hasattr(plan, "schedules") else plan  # type: ignore[call-arg]
