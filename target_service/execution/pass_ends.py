"""The earliest time at which a running pass can end, so that its host may do something else until then."""

from __future__ import annotations


class PassEnds:
    """Estimates by the number of sequences and rows of a pass.

    Means of observed times would not do: a host that was away for longer than a pass observes its end late, expects the
    next to take longer, and is away for longer still.
    """

    def __init__(self) -> None:
        self._earliest: dict[tuple[int, int], float] = {}

    def earliest(self, sequences: int, rows: int) -> float:
        """Seconds that a pass takes at least; 0 where none was observed yet."""
        return self._earliest.get((sequences, rows), 0.0)

    def observe_end(self, sequences: int, rows: int, seconds: float, *, running: bool) -> None:
        """A pass was observed to end after `seconds`, or had ended by then; if `running`, it still ran at its earliest
        end."""
        earliest = self._earliest.get((sequences, rows), seconds)
        # Factors of the next estimate where a pass still ran at its estimated end, and where it had ended by then.
        # Passes take longer as contexts grow; growth of less than a hundredth a pass is followed. Chosen, not measured.
        self._earliest[sequences, rows] = min(seconds, (1.01 if running else 0.98) * earliest)
