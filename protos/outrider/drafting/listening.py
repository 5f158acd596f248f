"""How much of the engine's time a draft may take by what it says."""

from __future__ import annotations

import time

# Of one look at what has come. What is left waits for the next look, a step later at most; 64 growths of 64 nodes take
# a tenth of it.
LISTEN_SECONDS = 0.02
# A draft is cut off when so many looks in a row, over so many seconds, have left something: it says more than the
# engine can take in, and will not stop. One long step between two looks is not held against it.
_LOOKS_BEHIND, _SECONDS_BEHIND = 32, 1.0


class ListeningTime:
    """Ends each look in time, and tells when the engine does not keep up with the draft."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._behind_since = 0.0
        self._looks_behind = 0

    def begin(self) -> None:
        """A look begins."""
        self._begun = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the look is to end."""
        return time.monotonic() - self._begun > LISTEN_SECONDS

    def end(self, *, emptied: bool) -> bool:
        """The look has ended, with nothing left or with something. Whether the draft is to be cut off."""
        if emptied:
            self._looks_behind = 0
            return False
        if not self._looks_behind:
            self._behind_since = self._begun
        self._looks_behind += 1
        return self._looks_behind >= _LOOKS_BEHIND and time.monotonic() - self._behind_since >= _SECONDS_BEHIND

    def forget(self) -> None:
        """Another draft, or the same one again."""
        self._looks_behind = 0
