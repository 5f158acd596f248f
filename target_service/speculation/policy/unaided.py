"""What a pass that follows a draft would have made without it: by what prompt lookup finds in the sequence's own text.

Speeds of passes with a draft and of others, one after the other, say more of the text than of the draft: a loop makes
16 tokens a pass, and the list behind it one. What the same pass would have made by itself can be found out afterwards,
since lookup hangs on nothing but the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from target_service.core.sequence import Sequence
from tree_kernels.node_table import LONGEST, WINDOW

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of one pass: as it made them, and as it would have without a draft."""

    load: int
    made: int
    unaided: int


@dataclass(frozen=True, slots=True)
class _Pass:
    load: int
    sequence: Sequence
    # Tokens of the sequence before it.
    begun: int
    made: int
    rows: int


@dataclass(slots=True)
class Unaided:
    """One pass of one sequence at a time, since that is enough and each costs the host some time."""

    # Of a chain that the device looks up; 0 where it looks nothing up.
    lookup_tokens: int
    _pending: _Pass | None = None

    def __post_init__(self) -> None:
        if self.lookup_tokens:
            # Compiles what the first comparison would wait for.
            followed_chain(np.zeros(2, np.int32), 1)

    def note(self, load: int, sequence: Sequence, begun: int, made: int, rows: int) -> None:
        """A pass that followed a draft made so many tokens behind the first `begun` of a sequence, and would have had
        so many `rows` of a chain without one. Nothing, while another is looked at."""
        if self._pending is None:
            self._pending = _Pass(load, sequence, begun, made, min(rows, self.lookup_tokens))

    def take(self) -> Compared | None:
        """The comparison under way, once the text has gone on for as long as a chain, or has ended."""
        if self._pending is None:
            return None
        was, token_ids = self._pending, self._pending.sequence.token_ids
        behind = len(token_ids) - was.begun
        if behind <= was.rows and not was.sequence.totals.finished_ns:
            return None
        self._pending = None
        text = np.array(token_ids[max(0, was.begun - WINDOW - LONGEST) : was.begun + was.rows], np.int32)
        known = len(text) - min(behind, was.rows)
        return Compared(was.load, was.made, min(behind, 1 + followed_chain(text, known)))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def followed_chain(text: Ints, known: int) -> int:
    """How many tokens of a text behind its first `known` are those that prompt lookup finds there, by the rule of
    `tree_kernels.node_table.longest_run`. `text` [n], `known` at least 1."""
    end = known - 1
    best, behind = 0, known
    for j in range(max(0, end - WINDOW), end):
        run = 0
        while run < LONGEST and run <= j and text[j - run] == text[end - run]:
            run += 1
        if run and run >= best:
            best, behind = run, j + 1
    if best == 0:
        return 0
    count = 0
    # Where the chain runs into the end it goes on with itself.
    while known + count < len(text) and text[known + count] == text[behind + count % (known - behind)]:
        count += 1
    return count
