"""The draft service's Prometheus metrics, with the drafter's own figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from outrider.telemetry.registry import MetricSet, Reading
from outrider.telemetry.table import DRAFT

# Seconds in a nanosecond: clocks count those, Prometheus' histograms of time are in seconds.
_NS = 1e-9


class DraftMetrics:
    """Counts what the service does. Called on the event loop."""

    def __init__(self, drafter: str, version: str, stats: Callable[[], Mapping[str, float]]) -> None:
        """`stats` is `Drafter.stats`; it is called in the scraping thread."""
        self.families = MetricSet(DRAFT)
        count, histogram = self.families.counter, self.families.histogram
        self._streams = 0
        self._sequences = 0
        self._opened = count("outrider_draft_sequences_opened")
        self._closed = count("outrider_draft_sequences_closed", "closed")
        self._aborted = count("outrider_draft_sequences_closed", "aborted")
        self._context_tokens = count("outrider_draft_context_tokens")
        self._committed_tokens = count("outrider_draft_committed_tokens")
        self._advances = count("outrider_draft_advances")
        self._growths = count("outrider_draft_growths")
        self._nodes = count("outrider_draft_nodes")
        self._corpus_tokens = count("outrider_draft_corpus_tokens")
        self._propose = histogram("outrider_draft_propose_seconds")
        self._queue = histogram("outrider_draft_queue_seconds")

        def read() -> Iterator[Reading]:
            yield "outrider_draft_info", (drafter, version), 1.0
            yield "outrider_draft_streams", (), self._streams
            yield "outrider_draft_sequences", (), self._sequences
            for figure, value in stats().items():
                yield "outrider_draft_figure", (figure,), value

        self.families.gauges(read)

    def on_stream(self, change: int) -> None:
        """A `Propose` stream began (1) or ended (-1)."""
        self._streams += change

    def on_opened(self, context_tokens: int) -> None:
        """A sequence was opened with this many tokens."""
        self._sequences += 1
        self._opened.value += 1
        self._context_tokens.value += context_tokens

    def on_advanced(self, sequences: int, tokens: int) -> None:
        self._advances.value += sequences
        self._committed_tokens.value += tokens

    def on_growth(self, sequences: int, nodes: int, queue_ns: int, compute_ns: int) -> None:
        self._growths.value += sequences
        self._nodes.value += nodes
        self._queue.observe(queue_ns * _NS)
        self._propose.observe(compute_ns * _NS)

    def on_closed(self, sequences: int, aborted: bool) -> None:
        """Sequences ended: closed by the target, or aborted with their stream."""
        self._sequences -= sequences
        (self._aborted if aborted else self._closed).value += sequences

    def on_failed(self, reason: str) -> None:
        """One sequence failed, for the reason of an `OutriderError`."""
        self.families.counter("outrider_draft_sequences_failed", reason).add()

    def on_corpus(self, tokens: int) -> None:
        """A corpus, or a piece of it, was inserted."""
        self._corpus_tokens.value += tokens
