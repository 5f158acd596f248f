"""When a pass that runs will end at the earliest, so that its host may do something else until then."""

from __future__ import annotations

# What a pass that still ran at its earliest end, or had ended by then, makes of the next one's. Passes grow with their
# contexts, and whatever grows slower than a hundredth a pass is followed; chosen, not measured.
_LATER, _SOONER = 1.01, 0.98


class PassEnds:
    """Knows passes by the sequences and rows that they have.

    Their mean would not do, nor what they were seen to take: a host that was away for longer than a pass sees it end
    late, takes the next to be longer, and is away for longer still.
    """

    def __init__(self) -> None:
        self._earliest: dict[tuple[int, int], float] = {}

    def earliest(self, sequences: int, rows: int) -> float:
        """Seconds that a pass takes at least; 0 where nobody knows yet."""
        return self._earliest.get((sequences, rows), 0.0)

    def observe(self, sequences: int, rows: int, seconds: float, *, running: bool) -> None:
        """A pass that only decoded was seen to end after so long; `running`, it was seen to run until then, and at its
        earliest end too."""
        known = self._earliest.get((sequences, rows))
        if known is None:
            self._earliest[sequences, rows] = seconds
        else:
            self._earliest[sequences, rows] = min(seconds, _LATER * known) if running else _SOONER * known
