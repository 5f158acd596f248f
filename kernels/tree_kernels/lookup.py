"""Drafts from a sequence's own text, on the device: what followed the last time that its latest tokens stood in it.

Nobody waits for a draft: what the last pass said, where that leaves every sequence and what is drafted for the next are
found between two passes by one kernel, so that several drafted passes can be launched at once. The tokens lie beside
their keys, one for each slot of the KV cache, so whoever shares or gives back pages shares and gives back the text.

The rule is prompt lookup's (Saxena, "Prompt lookup decoding", 2023): the longest run of tokens up to `LONGEST` that
ends the text and stood in it before, of equally long ones the last.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from tree_kernels.device_verification import Verdicts
from tree_kernels.feeding import StepIntegers
from tree_kernels.verification_records import MODE, POSITION, RECORD, Mode

# Rows of a sequence that are drafted in one pass at most.
MAX_LOOKED_UP = 15
# Tokens of a run that is looked up at most, and how far back it is looked for.
LONGEST = 8
WINDOW = 8192


class DeviceLookup:
    """Moves a step of GREEDY and COUPLED chains on, pass by pass, and drafts for it.

    Symbols: B = `max_sequences`, P = `max_passes`. Nothing is read back, so that the calls can be captured.

    Attributes:
        said: [B, P, 2 + MAX_LOOKED_UP] int32 by sequence and pass: drafted tokens accepted, these tokens, and the
            target's own token after them.
        passes: [B] int32, how many of them were said since `begin`.
        accepted: [B] int32, drafted tokens that were accepted since `begin`.
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
        that the model knows. `backend` None is "triton" on a GPU and "torch" elsewhere.
        """
        device = tokens.device
        self.tokens = tokens
        self.page_size = page_size
        self.last_position = last_position
        self.said = torch.zeros(max_sequences, max_passes, 2 + MAX_LOOKED_UP, dtype=torch.int32, device=device)
        self.passes = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self.accepted = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        # Those of the launch before, while `begin` reads them.
        self._before = torch.zeros_like(self.accepted)
        self._on_triton = (backend or ("triton" if device.type == "cuda" else "torch")) == "triton"

    def warm_up(self, step: StepIntegers) -> None:
        """Have kernels compiled for where `step` lies, whose sequences have no rows yet. What is under way may hang on
        this lookup's own figures, so that others take their place."""
        device, (sequences, passes, _) = self.tokens.device, self.said.shape
        own = DeviceLookup(
            self.tokens,
            self.page_size,
            self.last_position,
            max_sequences=sequences,
            max_passes=passes,
            backend="triton" if self._on_triton else "torch",
        )
        nothing = torch.zeros(2 * sequences + 1, dtype=torch.int32, device=device)
        own.begin(step, nothing)
        own.go_on(step, Verdicts.over(nothing, sequences))

    def begin(self, step: StepIntegers, awaited: Tensor, moves: Tensor | None = None) -> None:
        """Draft for a step that was just laid out, its drafted rows empty, after moving it on. In place.

        Args:
            step: every sequence has a chain of rows, or none; the first feeds a token, or -1 - i for `awaited[i]`. It
                is laid out as if the step before had accepted no drafted row. The pages hold the keys that may come.
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
        for b, row, rows in _chains(step):
            token, moved = int(step.token_ids[row]), 0
            if token < 0:
                token, moved = int(awaited[-1 - token]), int(moves[-1 - token])
            self._place(step, b, row, rows, token, moved)

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
        for b, row, rows in _chains(step):
            count, token = int(verdicts.accepted_counts[b]), int(verdicts.next_tokens[b])
            said = [count, *step.token_ids[row + 1 : row + 1 + count].tolist(), token]
            self.said[b, int(self.passes[b]), : len(said)] = torch.tensor(said, dtype=torch.int32)
            self.passes[b] += 1
            self.accepted[b] += count
            self._place(step, b, row, rows, token, count + 1)

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

    def _place(self, step: StepIntegers, b: int, row: int, rows: int, token: int, moves: int) -> None:
        """Let the chain of `rows` from `row` on feed `token`, so many keys further on, and what is drafted after it."""
        prefix = int(step.prefix_lengths[b]) + moves
        pages = step.page_table[int(step.page_starts[b]) :]
        step.prefix_lengths[b] = prefix
        keys = torch.arange(prefix, prefix + rows, device=pages.device)
        slots = pages[keys // self.page_size] * self.page_size + keys % self.page_size
        step.slots[row : row + rows] = slots.int()
        step.positions[row : row + rows] = keys.clamp(max=self.last_position).int()
        record = step.parameters[b * RECORD : (b + 1) * RECORD]
        if int(record[MODE]) == Mode.COUPLED:
            low = int(record[POSITION]) % 2**32 + moves
            record[POSITION] = _signed(low % 2**32)
            record[POSITION + 1] += low // 2**32
        read = torch.arange(max(0, prefix - WINDOW - LONGEST), prefix, device=pages.device)
        read = pages[read // self.page_size] * self.page_size + read % self.page_size
        text = [*self.tokens[read.long()].tolist(), token]
        step.token_ids[row : row + rows] = torch.tensor(
            [token, *look_up(text, rows - 1)], dtype=torch.int32, device=pages.device
        )


def look_up(text: list[int], count: int) -> list[int]:
    """`count` tokens that may follow `text`: those after the last of the longest runs, up to `LONGEST`, that end the
    text and stood in its last `WINDOW` tokens before. Where they run into the end they go on with themselves, so that a
    loop stays one; without any run, the last token again and again."""
    end = len(text) - 1
    best, begin = 0, end
    for j in range(max(0, end - WINDOW), end):
        run = 0
        while run < LONGEST and run <= j and text[j - run] == text[end - run]:
            run += 1
        if run and run >= best:
            best, begin = run, j + 1
    period = end + 1 - begin
    return [text[begin + k % period] for k in range(count)]


def _chains(step: StepIntegers) -> list[tuple[int, int, int]]:
    """(sequence, first row, rows) of those that have rows."""
    starts = step.query_starts.tolist()
    return [(b, row, end - row) for b, (row, end) in enumerate(itertools.pairwise(starts)) if end > row]


def _signed(word: int) -> int:
    """32 bit as int32 holds them."""
    return word - 2**32 if word >= 2**31 else word
