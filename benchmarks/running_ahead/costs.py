"""Times of passes, drafts and the link, for `simulate.py`: an 8B target on an H200, one sequence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from benchmarks.running_ahead.walk import Tally, Way

# Rows of a pass, with the root, and milliseconds. Assumed, with the measured ratios of an 8B shape: 16 rows took 1.09
# times as long as one, 64 rows 1.20 times (benchmarks/results/2026-11-22-notes.md).
_PASS = ((1, 4.37), (4, 4.45), (16, 4.75), (32, 4.95), (64, 5.3))
PLAIN_MS = _PASS[0][1]


@dataclass(frozen=True)
class DraftCost:
    """Milliseconds from the commit of a root until its tree arrives: `fixed`, and `level` for each level."""

    fixed: float
    level: float

    def wait(self, levels: int) -> float:
        """Milliseconds that a pass waits for a tree of `levels` levels."""
        return self.fixed + self.level * levels


# A round trip with the work on both sides, and a head's levels of up to 64 rows; a trie's tree takes no time a level.
# A level of an 8B shape's head took 0.21 ms (benchmarks/results/2026-11-22-notes.md); the rest is assumed.
HEAD_COST = DraftCost(1.2, 0.22)
TRIE_COST = DraftCost(1.2, 0.0)
# Of a draft that answers while a pass runs: reading the commit, the round trip, and the time available. Assumed.
_EXTEND, _LINK, _DURING = 0.25, 0.6, 4.5


def fits(levels: int) -> bool:
    """Whether a head's tree of `levels` levels arrives before the next pass is launched."""
    return _EXTEND + _LINK + HEAD_COST.level * levels <= _DURING


def pass_ms(rows: int) -> float:
    """Milliseconds of a pass of `rows` rows with the root, at most 64; linear between known sizes."""
    for (fewer, low), (more, high) in itertools.pairwise(_PASS):
        if rows <= more:
            return low + (high - low) * (rows - fewer) / (more - fewer)
    return _PASS[-1][1]


def ratio(tally: Tally, way: Way, wait: float) -> float:
    """Tokens a second relative to plain decoding: every pass takes the time of its size; held passes, and all in
    lockstep, wait as well."""
    waited = tally.passes if way.behind == 0 else tally.held
    spent = tally.passes * pass_ms(way.rows + 1) + waited * wait
    return tally.tokens * PLAIN_MS / spent
