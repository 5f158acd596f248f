"""When the engine drafts."""

from __future__ import annotations

from dataclasses import dataclass

# Drafting comes back at this share of the load that stopped it, so that it does not flap.
_RESUME_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class DraftingConfig:
    """When to draft and how long to wait; the defaults live in `TargetConfig`."""

    enabled: bool
    disable_above: int
    wait_seconds: float
    failures_to_open: int
    # Vectors of each sequence that are kept for a draft that connects late.
    feature_window: int = 0

    def too_many(self, running: int) -> bool:
        """Whether this many running sequences stop drafting."""
        return running > self.disable_above

    @property
    def resumes_at(self) -> int:
        """Running sequences at which drafting resumes."""
        return max(1, int(self.disable_above * _RESUME_SHARE))
