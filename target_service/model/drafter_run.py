"""A drafter behind the passes of a runner: what it reads of them, on every rank that has a part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from target_service.model.forward import ForwardPass
from target_service.model.rank_link import PrepareDrafting
from target_service.model.runner import ModelRunner
from tree_kernels.attention import AttentionPlan, TreeAttention
from tree_kernels.pass_trees import VerifiedRows
from tree_kernels.verification import Verdicts
from tree_models.in_pass import DraftingKind, InPassDrafter, TablesToWrite, VerifiedPass
from tree_models.layers.paged import PagedPass


class DrafterRun:
    """Launches a runner's drafter."""

    def __init__(self, runner: ModelRunner, drafter: InPassDrafter, max_rows: int) -> None:
        """Behind passes of at most `max_rows`. Other ranks that have a part of the drafter prepare theirs."""
        if drafter.divided and runner.link is not None:
            runner.link.send(PrepareDrafting(max_rows))
        own = runner.attention
        # Keys and values beside a target of latents have plans of the same form.
        self._attention = own if drafter.latent == runner.latent else TreeAttention("triton", runner.device)
        drafter.prepare(self._attention, runner.cache.page_size, runner.max_context, max_rows)
        self._runner, self._drafter = runner, drafter

    # Whoever launches it: what is allocated once is written by all.
    @torch.inference_mode()
    def launch(
        self,
        kind: DraftingKind,
        done: ForwardPass,
        verdicts: Verdicts,
        move: Callable[[], None],
        to: TablesToWrite | None,
    ) -> None:
        """Launch it behind a pass that was verified, with the verdicts of the leading rank; `move` moves its accepted
        rows. Trees are written to the tables, if there are some."""
        runner, hooks, texts, plan = self._runner, self._runner.hooks, done.texts, done.plan
        assert hooks is not None and plan is not None and done.positions is not None, "passes have them with a drafter"
        runner.share_verdicts(verdicts)
        rows = VerifiedRows(
            done.token_ids, done.parameters, texts.query_starts, texts.prefix_lengths, texts.page_starts,
            texts.page_table, verdicts,
        )  # fmt: skip
        step = PagedPass(self._attention, _planned_again(plan), done.slots, runner.cache)
        states = hooks.states(len(done.token_ids))
        self._drafter.read(VerifiedPass(rows, states, done.positions, step), kind.sequences)
        move()
        if kind.grows:
            self._drafter.grow(kind.sequences, step, to, coupled=kind.coupled)


def _planned_again(plan: AttentionPlan) -> AttentionPlan:
    """The plan of a pass, whose work is divided once more: the pass itself need not have run, where what follows it is
    captured."""
    return replace(plan, schedules={}, parts=None) if hasattr(plan, "schedules") else plan  # type: ignore[call-arg]
