"""Computes what prompt lookup alone would have made of a pass, in the sequence's own text.

Later passes without a draft are no measure of one with it: a loop makes 16 tokens a pass, the list after it
one. But lookup depends on the text only, so what the same pass would have made can be computed afterwards. How much
more passes without a draft make than that, by recycled tokens, is found from such passes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from target_service.compiling import compiled
from target_service.core.sequence import Sequence
from tree_kernels.node_table.layout import LONGEST, WINDOW

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ComparedSequence:
    """One sequence of a pass: its length before it, the tokens that the pass made of it, and the rows of a chain that
    it would have had by lookup."""

    sequence: Sequence
    start: int
    made: int
    rows: int

    @property
    def is_known(self) -> bool:
        """Whether its text is longer by a chain, or has ended."""
        return self.behind() > self.rows or bool(self.sequence.totals.finished_ns)

    def behind(self) -> int:
        """Tokens that the sequence has by now since the pass began."""
        return len(self.sequence.token_ids) - self.start

    def by_lookup(self) -> int:
        """Tokens that the pass would have made by lookup."""
        token_ids, behind = self.sequence.token_ids, self.behind()
        text = np.array(token_ids[max(0, self.start - WINDOW - LONGEST) : self.start + self.rows], np.int32)
        return min(behind, 1 + predicted_tokens(text, len(text) - min(behind, self.rows)))


class LookupComparison(NamedTuple):
    """What a pass of `load` sequences made, and what it would have made by lookup alone, in tokens of a sequence."""

    load: int
    made: float
    by_lookup: float
    with_draft: bool


@dataclass(frozen=True, slots=True)
class _ComparedPass:
    load: int
    sequences: SequenceOf[ComparedSequence]
    with_draft: bool


@dataclass(slots=True)
class LookupBaseline:
    """Compares one pass of a few sequences at a time: that is enough, and each costs some host time."""

    # Tokens that the device looks up at most; 0 for none.
    lookup_tokens: int
    _pending: _ComparedPass | None = None

    def __post_init__(self) -> None:
        if self.lookup_tokens:
            compile_loops()

    @property
    def is_busy(self) -> bool:
        """Whether a pass is being compared."""
        return self._pending is not None

    def start_comparison(self, load: int, sequences: SequenceOf[ComparedSequence], *, with_draft: bool = True) -> None:
        """Start to compare a pass that `with_draft` a draft or did not. Ignored while another pass is compared."""
        if self._pending is None and sequences:
            bounded = [replace(one, rows=min(one.rows, self.lookup_tokens)) for one in sequences]
            self._pending = _ComparedPass(load, bounded, with_draft)

    def finished_comparison(self) -> LookupComparison | None:
        """The running comparison, once all its texts are longer by a chain, or have ended; else None."""
        was = self._pending
        if was is None or not all([one.is_known for one in was.sequences]):
            return None
        self._pending = None
        count = len(was.sequences)
        made = sum([one.made for one in was.sequences]) / count
        by_lookup = sum([one.by_lookup() for one in was.sequences]) / count
        return LookupComparison(was.load, made, by_lookup, was.with_draft)


def compile_loops() -> None:
    """Compile now, not at the first comparison."""
    predicted_tokens(np.zeros(2, np.int32), 1)


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
