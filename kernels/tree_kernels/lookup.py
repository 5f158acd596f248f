"""Drafts from sequences' own texts, on the device: what followed the last time that their latest tokens stood there.

Nobody waits for a draft: what the last pass said, where that leaves every sequence, what is drafted for the next and
which sequences get its rows are found between two passes by two kernels, so that several drafted passes can be launched
at once. The tokens lie beside their keys, one for each slot of the KV cache, so whoever shares or gives back pages
shares and gives back the text.

The rule is prompt lookup's (Saxena, "Prompt lookup decoding", 2023): the longest run of tokens up to `LONGEST` that
ends the text and stood in it before, of equally long ones the last.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tree_kernels.device_verification import Verdicts
from tree_kernels.feeding import StepIntegers
from tree_kernels.row_shares import FIRST_COST, NEXT_COST, share_rows
from tree_kernels.verification_records import FIRST_ROW, MODE, POSITION, RECORD, ROWS, Mode

# Rows of a sequence that are drafted in one pass at most.
MAX_LOOKED_UP = 15
# Tokens of a run that is looked up at most, and how far back it is looked for.
LONGEST = 8
WINDOW = 8192
# What is said of a pass: drafted tokens accepted, rows drafted, and the tokens.
SAID = 3 + MAX_LOOKED_UP


class Run(NamedTuple):
    """Tokens that end a text and stood in it before: how many, and the place behind where they stood. 0 and the last
    place where none did."""

    length: int
    end: int


class DeviceLookup:
    """Moves a step of GREEDY and COUPLED chains on, pass by pass, and drafts for it.

    Symbols: B = `max_sequences`, P = `max_passes`, R rows of a step. Nothing is read back, so that the calls can be
    captured.

    Attributes:
        said: [B, P, SAID] int32 by sequence and pass: drafted tokens accepted, rows drafted, the accepted tokens, and
            the target's own token after them.
        passes: [B] int32, how many of them were said since `begin`.
        accepted: [B] int32, drafted tokens that were accepted since `begin`.
        limits: [B] int32, rows that may be drafted of a sequence, since `begin`.
        runs, run_ends, roots: [B] int32, of what was found for the next pass; -1 runs of who is not there.
        costs: [2, LONGEST + 1] int32, see `row_shares`.
    """

    def __init__(
        self,
        tokens: Tensor,
        page_size: int,
        last_position: int,
        *,
        max_sequences: int,
        max_passes: int,
        backend: Literal["triton", "torch"] | None = None,
    ) -> None:
        """`tokens` [slots] int32 of the KV cache, kept by every pass that feeds them; `last_position` is the largest
        that the model knows; `max_sequences` are those that steps' parameters are packed for. `backend` None is
        "triton" on a GPU and "torch" elsewhere.
        """
        device = tokens.device
        self.tokens = tokens
        self.page_size = page_size
        self.last_position = last_position
        self.max_sequences = max_sequences
        self.said = torch.zeros(max_sequences, max_passes, SAID, dtype=torch.int32, device=device)
        integers = torch.zeros(7, max_sequences, dtype=torch.int32, device=device)
        self.passes, self.accepted, self.limits, self.runs, self.run_ends, self.roots, before = integers
        # What was accepted in the launch before, while `begin` reads it.
        self._before = before
        self.costs = torch.tensor([FIRST_COST, NEXT_COST], dtype=torch.int32, device=device)
        self._on_triton = (backend or ("triton" if device.type == "cuda" else "torch")) == "triton"

    def warm_up(self, step: StepIntegers) -> None:
        """Have kernels compiled for where `step` lies, whose sequences have no rows yet. What is under way may hang on
        this lookup's own figures, so that others take their place."""
        own = DeviceLookup(
            self.tokens,
            self.page_size,
            self.last_position,
            max_sequences=self.max_sequences,
            max_passes=self.said.shape[1],
            backend="triton" if self._on_triton else "torch",
        )
        nothing = torch.zeros(2 * self.max_sequences + 1, dtype=torch.int32, device=self.tokens.device)
        own.begin(step, nothing)
        own.go_on(step, Verdicts.over(nothing, self.max_sequences))

    def begin(self, step: StepIntegers, awaited: Tensor, moves: Tensor | None = None) -> None:
        """Draft for a step that was just laid out, after moving it on. In place.

        Args:
            step: every sequence has one row, or none, and free rows stand behind them. A row feeds a token, or -1 - i
                for `awaited[i]`; it is laid out as if the step before had accepted no drafted row. Its sequence's
                record has as many rows as the sequence may get, the first included, and is a chain. The pages hold the
                keys that may come.
            awaited: [any] int32.
            moves: [any] int32, what the step before has accepted, by the sequences' places in it; None for `accepted`,
                which then still is of the launch before.
        """
        if moves is None:
            moves = self._before.copy_(self.accepted)
        if self._on_triton:
            # Only here: Triton may be absent.
            from tree_kernels._triton_lookup import begin

            begin(self, step, awaited, moves)
            return
        self.passes.zero_()
        self.accepted.zero_()
        self.runs.fill_(-1)
        for b, row, _ in _chains(step):
            self.limits[b] = step.parameters[b * RECORD + ROWS] - 1
            token, moved = int(step.token_ids[row]), 0
            if token < 0:
                token, moved = int(awaited[-1 - token]), int(moves[-1 - token])
            self._find(step, b, token, moved)
        self._lay_out(step)

    def go_on(self, step: StepIntegers, verdicts: Verdicts) -> None:
        """Note what a pass of `step` said, make of it the next pass of the same sequences, and draft for that. In
        place, and at most P times after a `begin`, for which `said` has room.

        Args:
            step: as `begin` or the last call left it, and as it was run.
            verdicts: of that pass, [at least as many sequences as the step].
        """
        if self._on_triton:
            # Only here: Triton may be absent.
            from tree_kernels._triton_lookup import go_on

            go_on(self, step, verdicts)
            return
        self.runs.fill_(-1)
        for b, row, rows in _chains(step):
            count, token = int(verdicts.accepted_counts[b]), int(verdicts.next_tokens[b])
            said = [count, rows - 1, *step.token_ids[row + 1 : row + 1 + count].tolist(), token]
            self.said[b, int(self.passes[b]), : len(said)] = torch.tensor(said, dtype=torch.int32)
            self.passes[b] += 1
            self.accepted[b] += count
            self._find(step, b, token, count + 1)
        self._lay_out(step)

    def keep_accepted(self, token_ids: Tensor, slots: Tensor, parameters: Tensor, verdicts: Verdicts) -> None:
        """After a pass with trees, whose accepted keys were moved right behind their roots, keep their tokens there.

        Args:
            token_ids: [R] int32, as the pass read them.
            slots: [R] int32, as it wrote them.
            parameters: what it was verified with, see `DeviceVerifier.pack`.
            verdicts: what was found.
        """
        if self._on_triton:
            # Only here: Triton may be absent.
            from tree_kernels._triton_lookup import keep_accepted

            keep_accepted(self, token_ids, slots, parameters, verdicts)
            return
        for b, count in enumerate(verdicts.accepted_counts.tolist()):
            if not count:
                continue
            first = int(parameters[b * RECORD])
            rows = first + verdicts.accepted_rows[first : first + count]
            places = slots[first + 1 : first + 1 + count]
            self.tokens[places.long()] = token_ids[rows.long()]

    def _find(self, step: StepIntegers, b: int, root: int, moves: int) -> None:
        """Let a sequence feed `root`, so many keys further on, and find the run that ends there."""
        step.prefix_lengths[b] += moves
        record = step.parameters[b * RECORD : (b + 1) * RECORD]
        if int(record[MODE]) == Mode.COUPLED:
            low = int(record[POSITION]) % 2**32 + moves
            record[POSITION] = _signed(low % 2**32)
            record[POSITION + 1] += low // 2**32
        prefix = int(step.prefix_lengths[b])
        first = max(0, prefix - WINDOW - LONGEST)
        run = longest_run([*self._text(step, b, first, prefix), root])
        self.runs[b], self.run_ends[b], self.roots[b] = run.length, first + run.end, root

    def _lay_out(self, step: StepIntegers) -> None:
        """Give every sequence its rows, and their tokens."""
        count = len(step.prefix_lengths)
        runs, ends, roots = (each[:count].tolist() for each in (self.runs, self.run_ends, self.roots))
        room = len(step.token_ids) - sum(run >= 0 for run in runs)
        drafted = share_rows([max(0, run) for run in runs], self.limits[:count].tolist(), room)
        step.token_ids.zero_()
        step.positions.zero_()
        step.slots.fill_(-1)
        step.owners.fill_(-1)
        row = 0
        for b, run in enumerate(runs):
            rows = 1 + drafted[b] if run >= 0 else 0
            if rows:
                prefix = int(step.prefix_lengths[b])
                text = [*self._text(step, b, ends[b], prefix), roots[b]]
                tokens = [roots[b], *(text[k % len(text)] for k in range(rows - 1))]
                keys = torch.arange(prefix, prefix + rows, device=step.slots.device)
                step.token_ids[row : row + rows] = torch.tensor(tokens, dtype=torch.int32)
                step.positions[row : row + rows] = keys.clamp(max=self.last_position).int()
                step.slots[row : row + rows] = self._slots(step, b, keys)
                step.owners[row : row + rows] = b
                step.parameters[b * RECORD + FIRST_ROW], step.parameters[b * RECORD + ROWS] = row, rows
            row += rows
            step.query_starts[b + 1] = row

    def _slots(self, step: StepIntegers, b: int, keys: Tensor) -> Tensor:
        pages = step.page_table[int(step.page_starts[b]) :]
        return (pages[keys // self.page_size] * self.page_size + keys % self.page_size).int()

    def _text(self, step: StepIntegers, b: int, begin: int, end: int) -> list[int]:
        """The tokens fed as these keys."""
        keys = torch.arange(begin, end, device=self.tokens.device)
        text: list[int] = self.tokens[self._slots(step, b, keys).long()].tolist()
        return text


def longest_run(text: list[int]) -> Run:
    """The longest run, up to `LONGEST`, that ends the text and stood in its last `WINDOW` tokens before; of equally
    long ones the last. What followed it is drafted; where that runs into the end it goes on with itself, so that a loop
    stays one."""
    end = len(text) - 1
    best = Run(0, end)
    for j in range(max(0, end - WINDOW), end):
        run = 0
        while run < LONGEST and run <= j and text[j - run] == text[end - run]:
            run += 1
        if run and run >= best.length:
            best = Run(run, j + 1)
    return best


def _chains(step: StepIntegers) -> list[tuple[int, int, int]]:
    """(sequence, first row, rows) of those that have rows."""
    starts = step.query_starts.tolist()
    return [(b, row, end - row) for b, (row, end) in enumerate(itertools.pairwise(starts)) if end > row]


def _signed(word: int) -> int:
    """32 bit as int32 holds them."""
    return word - 2**32 if word >= 2**31 else word
