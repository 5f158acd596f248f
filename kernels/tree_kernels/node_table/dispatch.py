"""Drafted rows chosen on the device: from trees that a draft sent some passes ago, and from sequences' own texts.

No pass waits for a draft: each sequence has a table of drafted nodes in device memory, a token tree rooted at a token
that was generated some passes ago (`layout`). Between two passes two kernels find, without the host, where every
sequence is in its table now, add what prompt lookup finds in its own text, and lay out the likeliest nodes of all
sequences as the next pass, so that several drafted passes can be launched at once. The text's tokens lie beside their
keys, one for each slot of the KV cache, so they are shared and released with the pages. A sequence whose table holds
nothing behind its last token has a tree of recycled tokens (`recycling`).

Prompt lookup's rule (Saxena, "Prompt lookup decoding", 2023): the longest run of tokens up to `LONGEST` that ends the
text and occurs in it before, of equally long ones the last; what followed it is drafted, as a chain.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tree_kernels.node_table import layout, recycling
from tree_kernels.node_table.layout import KEPT, LOOKUP, NO_KEY, PROSPECTS, REPORT, TABLE
from tree_kernels.node_table.mailboxes import Mailboxes
from tree_kernels.node_table.step_integers import StepIntegers
from tree_kernels.verification.dispatch import Verdicts


class NodeTable:
    """Moves a step of GREEDY and COUPLED trees on, pass by pass, and chooses its rows.

    Symbols: B = `max_sequences`, P = `max_passes`, R rows of a step. Nothing is read back, no shape depends on data and
    every tensor keeps its address, so that all calls can be captured.

    Attributes:
        reports: [B, P, REPORT] int32 by sequence and pass: the figures of `Figure`; from `REPORT_TOKENS` on the
            accepted tokens and then the target's own; from `REPORT_ROWS` on the accepted rows, relative to the root.
            What follows either is undefined.
        passes: [B] int32, passes that were reported since `choose_rows`.
        accepted: [B] int32, drafted rows that were accepted since `choose_rows`.
        limits: [B] int32, rows that may be drafted for a sequence, since `choose_rows`.
        table_slots: [B] int32, the table of the step's b-th sequence; -1 for none.
        owners: [B] int32, whose the step's b-th sequence is; -1 where nothing is recycled for it.
        laid_out: [1] int32, of how many of the step's sequences, the first ones, the host laid out all rows.
        tables: [B, TABLE] int32 by slot, see `layout`.
        entries: [PLACES, ENTRY] int32, see `recycling`; empty where nothing is recycled.
        taken: [B] int32, the number of the table in each slot; see `Mailboxes`.
    """

    def __init__(
        self,
        tokens: Tensor,
        page_size: int,
        last_position: int,
        *,
        max_sequences: int,
        max_passes: int,
        lookup_tokens: int = LOOKUP,
        recycles: bool = False,
        backend: Literal["triton", "torch"] | None = None,
    ) -> None:
        """`tokens` [slots] int32 of the KV cache are written by every pass that feeds them; `last_position` is the
        model's largest; `max_sequences` are those that steps' parameters are packed for. `lookup_tokens` 0 looks
        nothing up. `recycles`: sequences whose table holds nothing have recycled tokens. `backend` None is "triton" on
        a GPU and "torch" elsewhere. Raises `ValueError` for more `lookup_tokens` than `LOOKUP`."""
        if not 0 <= lookup_tokens <= LOOKUP:
            raise ValueError(f"expected 0 to {LOOKUP} tokens of a lookup, got {lookup_tokens}")
        device = tokens.device
        self.tokens = tokens
        self.page_size = page_size
        self.last_position = last_position
        self.max_sequences = max_sequences
        self.lookup_tokens = lookup_tokens
        self.reports = torch.zeros(max_sequences, max_passes, REPORT, dtype=torch.int32, device=device)
        self.recycles = recycles
        self.tables = torch.zeros(max_sequences, TABLE, dtype=torch.int32, device=device)
        self.entries = recycling.empty_entries(device) if recycles else torch.zeros(0, dtype=torch.int32, device=device)
        # [5, NODES] int32
        self.shape = torch.tensor(recycling.SHAPE, dtype=torch.int32, device=device)
        # [B, 2, NODES] tokens and costs of recycled trees: scratch of a kernel.
        self.recycled = torch.zeros(max_sequences, 2, recycling.NODES, dtype=torch.int32, device=device)
        integers = torch.zeros(8, max_sequences, dtype=torch.int32, device=device)
        # Of the next pass: how many candidates were kept (-1 for absent sequences), and the root's token.
        self.passes, self.accepted, self.limits, self.table_slots, self.owners = integers[:5]
        self.counts, self.roots, self.taken = integers[5:]
        self.laid_out = torch.zeros(1, dtype=torch.int32, device=device)
        for none_yet in (self.table_slots, self.counts, self.owners):
            none_yet.fill_(-1)
        # [B, KEPT + 1] keys of the kept candidates, rising, followed by `NO_KEY`. [B, 3, KEPT + 1] their tokens, links
        # (see `link_of`) and chances.
        self.keys = torch.full((max_sequences, KEPT + 1), NO_KEY, dtype=torch.int32, device=device)
        self.ranked = torch.zeros(max_sequences, 3, KEPT + 1, dtype=torch.int32, device=device)
        # [3 + len(PROSPECTS), B] of the rows that were laid out: nodes of the table, expected tokens of all, and of
        # these nodes; and the prospects of the candidates.
        self.noted = torch.zeros(3 + len(PROSPECTS), max_sequences, dtype=torch.int32, device=device)
        # [B, 4, KEPT + 1] keys, tokens, depths and parents of the kept candidates, by rising numbers: scratch of a
        # kernel.
        self.unranked = torch.zeros(max_sequences, 4, KEPT + 1, dtype=torch.int32, device=device)
        # [2, LONGEST + 1] int32.
        self.lookup_costs = torch.tensor([layout.FIRST_COST, layout.NEXT_COST], dtype=torch.int32, device=device)
        costs = np.arange(0, layout.MOST_COST, layout.COSTS_PER_CHANCE)
        # [MOST_COST / COSTS_PER_CHANCE] int32 of `SURE`. Computed on the host, so that all devices add up the same.
        chances = np.floor(layout.SURE * 2.0 ** -(costs / layout.COST_OF_HALVING)).astype(np.int32)
        self.chances = torch.from_numpy(chances).to(device)
        # `accepted` of the launch before, while `choose_rows` overwrites it.
        self._before = torch.zeros_like(self.accepted)
        self.backend: Literal["triton", "torch"] = backend or ("triton" if device.type == "cuda" else "torch")
        # Only here: Triton may be absent.
        self._backend = import_module(f"tree_kernels.node_table.{self.backend}_backend")

    def warm_up(self, step: StepIntegers) -> None:
        """Compile the kernels for the tensors of `step`, whose sequences have no rows yet. Another table's tensors are
        used, since passes in flight may use this one's."""
        own = NodeTable(
            self.tokens,
            self.page_size,
            self.last_position,
            max_sequences=self.max_sequences,
            max_passes=self.reports.shape[1],
            lookup_tokens=self.lookup_tokens,
            recycles=self.recycles,
            backend=self.backend,
        )
        own.copy_tables(Mailboxes(self.max_sequences, self.tokens.device))
        nothing = torch.zeros(2 * self.max_sequences + 1, dtype=torch.int32, device=self.tokens.device)
        own.choose_rows(step, nothing)
        own.report_and_choose_rows(step, Verdicts.over(nothing, self.max_sequences))
        own.report(step, Verdicts.over(nothing, self.max_sequences))

    def assign_slots(self, table_slots: Tensor, owners: Tensor | None = None) -> None:
        """Assign tables and owners to the sequences of the next step, in stream order: [B] int32, -1 for none. Without
        `owners` they stay."""
        self.table_slots.copy_(table_slots, non_blocking=True)
        if owners is not None:
            self.owners.copy_(owners, non_blocking=True)

    def copy_tables(self, mail: Mailboxes) -> None:
        """Copy the newest table of every box that has a newer one than was taken last.

        All that was sent before the call is taken; what is sent until the device runs it may be. A box that is
        overwritten while it is read yields no tree. `ValueError` where there are not as many boxes as slots.
        """
        mail.await_sent()
        self.copy_sent_tables(mail)

    def copy_sent_tables(self, mail: Mailboxes) -> None:
        """As `copy_tables`, on a stream that waits for what was sent already. It can be captured."""
        if len(mail.newest) != self.max_sequences:
            raise ValueError(f"expected {self.max_sequences} boxes, got {len(mail.newest)}")
        self._backend.copy_tables(self, mail)

    def choose_rows(self, step: StepIntegers, pending: Tensor, moves: Tensor | None = None, laid_out: int = 0) -> None:
        """Choose the rows of a step that was just laid out, after moving it on. In place.

        Args:
            step: every sequence has one row, or none, and free rows stand behind them. A row feeds a token, or -1 - i
                for `pending[i]`; it is laid out as if the step before had accepted no drafted row. Its sequence's
                record has as many rows as the sequence may get, the first included. The pages hold the keys that may
                come.
            pending: [any] int32.
            moves: [any] int32, what the step before has accepted, by the sequences' places in it; None for `accepted`,
                which then still is of the launch before.
            laid_out: of how many sequences, the first ones, the host laid out all rows: those that read their
                prompts, and trees. They stay as they are. Reported of them is how many rows were accepted, and the
                target's own token; such a step must not be run again.
        """
        if moves is None:
            moves = self._before.copy_(self.accepted)
        self._backend.choose_rows(self, step, pending, moves, laid_out)

    def report_and_choose_rows(self, step: StepIntegers, verdicts: Verdicts) -> None:
        """Report what a pass of `step` generated, turn the step into the next pass of its sequences, and choose its
        rows. In place, after `verification.keep_accepted`, and at most P times after a `choose_rows`, for which
        `reports` has room. The step is as `choose_rows` or the last call left it, and as it was run."""
        self._backend.report_and_choose_rows(self, step, verdicts, last=False)

    def report(self, step: StepIntegers, verdicts: Verdicts) -> None:
        """Report what a pass of `step` generated, as `report_and_choose_rows` does, and choose no rows: `choose_rows`
        comes next. The step is not changed."""
        self._backend.report_and_choose_rows(self, step, verdicts, last=True)

    def recycle(self, step: StepIntegers, logits: Tensor, vocabulary: int, verdicts: Verdicts) -> None:
        """After a pass, keep the likeliest tokens behind those that it accepted, and behind each root: of `logits`
        [R, at least `vocabulary`], the last dimension contiguous. Nothing where the table does not recycle, or the step
        has more rows than `recycling.MOST_ROWS`. Before `report_and_choose_rows` or `report`."""
        if self.recycles_in(step):
            self._backend.recycle(self, step, logits, vocabulary, verdicts)

    def recycles_in(self, step: StepIntegers) -> bool:
        """Whether the sequences of a step may have recycled trees, and keep what they may recycle."""
        return self.recycles and len(step.token_ids) <= recycling.MOST_ROWS
