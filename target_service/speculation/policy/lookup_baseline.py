"""Computes what prompt lookup alone would have made of a pass, in the sequence's own text.

Later passes without a draft are no measure of one with it: a loop makes 16 tokens a pass, the list after it
one. But lookup depends on the text only, so what the same pass would have made can be computed afterwards. How much
more passes without a draft make than that, by recycled tokens, is found from such passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from target_service.compiling import compiled
from target_service.core.sequence import Sequence
from tree_kernels.node_table.layout import LONGEST, WINDOW

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _ComparedPass:
    load: int
    sequence: Sequence
    # The sequence's length before it.
    start: int
    made: int
    rows: int
    with_draft: bool


@dataclass(slots=True)
class LookupBaseline:
    """Compares one pass of one sequence at a time: that is enough, and each costs some host time."""

    # Tokens that the device looks up at most; 0 for none.
    lookup_tokens: int
    _pending: _ComparedPass | None = None

    def __post_init__(self) -> None:
        if self.lookup_tokens:
            # Compile now, not at the first comparison.
            predicted_tokens(np.zeros(2, np.int32), 1)

    def start_comparison(
        self, load: int, sequence: Sequence, start: int, made: int, rows: int, *, with_draft: bool = True
    ) -> None:
        """Start to compare a pass that `with_draft` a draft or did not, and made `made` tokens after the first `start`
        of a sequence; by lookup it would have had `rows` rows of a chain. Ignored while another pass is compared."""
        if self._pending is None:
            self._pending = _ComparedPass(load, sequence, start, made, min(rows, self.lookup_tokens), with_draft)

    def finished_comparison(self) -> tuple[int, int, int, bool] | None:
        """(load, tokens that the pass made, tokens that it would have made by lookup, whether it had a draft) of
        the running comparison, once the text is longer by a chain, or has ended; else None."""
        if self._pending is None:
            return None
        was, token_ids = self._pending, self._pending.sequence.token_ids
        behind = len(token_ids) - was.start
        if behind <= was.rows and not was.sequence.totals.finished_ns:
            return None
        self._pending = None
        text = np.array(token_ids[max(0, was.start - WINDOW - LONGEST) : was.start + was.rows], np.int32)
        known = len(text) - min(behind, was.rows)
        return was.load, was.made, min(behind, 1 + predicted_tokens(text, known)), was.with_draft


@compiled
def predicted_tokens(text: Ints, known: int) -> int:
    """How many tokens of `text` [n] after its first `known` (at least 1) prompt lookup predicts, by the rule of
    `tree_kernels.node_table.longest_run`."""
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
    # A chain that reaches the end of the known text continues with itself.
    while known + count < len(text) and text[known + count] == text[behind + count % (known - behind)]:
        count += 1
    return count
