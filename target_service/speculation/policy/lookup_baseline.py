"""Computes in how many passes prompt lookup alone would have made a stretch of a sequence's own text.

Later passes without a draft are no measure of those with it: a loop makes 16 tokens a pass, the list after it one. But
lookup depends on the text only, so what it would have made of the same text can be computed afterwards. Passes are
compared and not the tokens of each: of an answer half of which is copied, a draft that needs half the passes for the
other half saves a third of its time or more, but adds a tenth to the tokens of a pass that copies 16. How much sooner
passes without a draft are through than lookup alone, by recycled tokens, is found from such passes.

A chain has all its rows: where there are fewer for each sequence, the surest of all get them, as those in a copy are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from target_service.compiling import compiled
from target_service.core.sequence import Sequence
from target_service.speculation.policy.launch_mode import load_size
from tree_kernels.node_table.layout import LONGEST, LOOKUP, WINDOW

Ints = npt.NDArray[np.int32]


class LookupComparison(NamedTuple):
    """Passes that made a stretch of text at a load, and those that lookup alone would have needed for it."""

    load: int
    passes: float
    by_lookup: float
    with_draft: bool


@dataclass(slots=True)
class _ComparedText:
    """A sequence's text from now on."""

    sequence: Sequence
    start: int = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.steps = len(self.sequence.token_ids), self.sequence.totals.steps

    @property
    def has_ended(self) -> bool:
        return bool(self.sequence.totals.finished_ns)

    @property
    def is_known(self) -> bool:
        """Whether the stretch is long enough, or the text has ended."""
        # Tokens of a stretch, at least: a whole chain and the token behind it.
        return self.has_ended or len(self.sequence.token_ids) - self.start > LOOKUP

    def passes(self) -> int:
        """Passes since the start."""
        return self.sequence.totals.steps - self.steps

    def by_lookup(self, rows: int) -> float:
        """Passes that lookup would have needed since the start, with `rows` of a chain at most."""
        first = max(0, self.start - WINDOW - LONGEST)
        text = np.array(self.sequence.token_ids[first:], np.int32)
        return float(lookup_passes(text, self.start - first, rows, self.has_ended))


@dataclass(slots=True)
class LookupBaseline:
    """Compares stretches of a few sequences at a time: that is enough, and each costs some host time."""

    # Tokens that the device looks up at most; 0 for none.
    lookup_tokens: int
    _load: int = 1
    _with_draft: bool = True
    _texts: list[_ComparedText] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.lookup_tokens:
            compile_loops()

    @property
    def is_busy(self) -> bool:
        """Whether stretches are being compared."""
        return bool(self._texts)

    def start_comparison(self, load: int, sequences: Iterable[Sequence], *, with_draft: bool = True) -> None:
        """Start to compare some sequences of passes of `load`, which are made `with_draft` or without. Ignored while
        others are compared."""
        if not self._texts:
            self._load, self._with_draft, self._texts = load, with_draft, [_ComparedText(one) for one in sequences]

    def follow(self, load: int, *, with_draft: bool) -> list[LookupComparison]:
        """Observe a pass with a draft or without; returns the running comparisons once all their stretches are made.
        Passes of another kind, or at another load as `load_size` has it, end them without a result."""
        if (load_size(load), with_draft) != (load_size(self._load), self._with_draft):
            self._texts = []
        if not all([one.is_known for one in self._texts]):
            return []
        texts, self._texts = self._texts, []
        made = [(one.passes(), one.by_lookup(self.lookup_tokens)) for one in texts]
        return [LookupComparison(self._load, passes, other, with_draft) for passes, other in made if passes]


def compile_loops() -> None:
    """Compile now, not at the first comparison."""
    lookup_passes(np.zeros(2, np.int32), 1, 1, True)


@compiled
def lookup_passes(text: Ints, known: int, rows: int, has_ended: bool) -> float:
    """Passes in which prompt lookup, with `rows` of a chain at most, makes the tokens of `text` [n] behind its first
    `known` (at least 1). Of the last one only the share that is known counts, unless the text `has_ended` there."""
    passes = 0.0
    while known < len(text):
        made = 1 + predicted_tokens(text[: known + rows], known) if rows else 1
        left = len(text) - known
        passes += 1.0 if has_ended or made <= left else left / made
        known += made
    return passes


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
