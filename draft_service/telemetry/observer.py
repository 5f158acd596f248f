"""What the draft service reports to its metrics."""

from __future__ import annotations


class DraftObserver:
    """Receives what the service did, and drops it: the one of a service without metrics. Called on the event loop, so
    what inherits it must not block."""

    def on_stream(self, change: int) -> None:
        """A `Propose` stream began (1) or ended (-1)."""

    def on_opened(self, context_tokens: int) -> None:
        """A sequence was opened with that many tokens."""

    def on_advanced(self, sequences: int, tokens: int) -> None:
        """One advance frame was taken in."""

    def on_growth(self, sequences: int, nodes: int, queue_ns: int, compute_ns: int) -> None:
        """One growth frame was made."""

    def on_closed(self, sequences: int, aborted: bool) -> None:
        """Sequences ended: closed by the target, or aborted with their stream."""

    def on_failed(self, reason: str) -> None:
        """One sequence failed, for the reason of an `OutriderError`."""

    def on_corpus(self, tokens: int) -> None:
        """A corpus, or a piece of it, was learnt."""
