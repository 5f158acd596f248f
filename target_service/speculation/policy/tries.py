"""When something that seems slower is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from target_service.speculation.policy.launch_mode import TRYING


@dataclass(slots=True)
class Tries:
    """When something that seems slower is tried: so that tries cost `TRYING` of the time."""

    length: int
    longest: int
    since: int = 0
    left: int = 0
    pause: float = 0.0

    def due(self, loss: float) -> bool:
        """Whether the next launch is a try. Called once for each launch; a try loses `loss` of its time."""
        if self.left:
            self.left -= 1
            return True
        self.since += 1
        self.pause = min(self.longest, max(self.length, self.length * loss / TRYING))
        if self.since <= self.pause:
            return False
        self.since, self.left = 0, self.length - 1
        return True

    def is_near(self, launches: int) -> bool:
        """Whether a try is under way, or comes in less than so many launches."""
        return bool(self.left) or self.since + launches > self.pause

    def end(self) -> None:
        """What was tried is used from now on."""
        self.since = self.left = 0

    def hasten(self) -> None:
        """Have a try soon, since something has changed."""
        self.since = max(self.since, self.longest - self.length)
