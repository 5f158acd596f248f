"""How much wall time a run may take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Budget:
    """Time since the run began; `seconds` of 0 is unbounded."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the end, below zero after it."""
        return self.seconds - self.elapsed if self.seconds else math.inf

    def part(self, share: float) -> float:
        """Seconds until a share of the whole is over."""
        return self.seconds * share - self.elapsed if self.seconds else math.inf
