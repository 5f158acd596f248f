"""Figures of a run from the target's metrics page, whose counters and histograms are read before and after it."""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Series(NamedTuple):
    """A metric by its name on the page and labels of its samples; its value is a sum over all other labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


# Sources of the figures. A figure is null where the page does not have its source.
HITS = Series("outrider_draft_passes_total", (("outcome", "hit"),))
MISSES = Series("outrider_draft_passes_total", (("outcome", "miss"),))
IDLE_SECONDS = Series("outrider_device_seconds_total", (("state", "idle"),))
DEVICE_SECONDS = Series("outrider_device_seconds_total")
STEPS = Series("outrider_steps_total")
CONNECTED = Series("outrider_draft_connected")
SPECULATING = Series("outrider_speculation_active")
# Rows and tokens of a run, by their names in the document.
COUNTED = {
    "drafted_rows": Series("outrider_spec_decode_num_draft_tokens_total"),
    "accepted_tokens": Series("outrider_spec_decode_num_accepted_tokens_total"),
    "fallback_steps": Series("outrider_fallback_steps_total"),
    "promised_tokens": Series("outrider_draft_tokens_promised_total"),
    "draft_rows": Series("outrider_draft_rows_total", (("source", "draft"),)),
    "lookup_rows": Series("outrider_draft_rows_total", (("source", "lookup"),)),
    "draft_rows_accepted": Series("outrider_draft_rows_accepted_total", (("source", "draft"),)),
    "lookup_rows_accepted": Series("outrider_draft_rows_accepted_total", (("source", "lookup"),)),
}
ROUND_TRIP = "outrider_draft_round_trip_seconds"
PHASE = "outrider_step_phase_seconds"
PHASES = ("wait", "plan", "launch", "forward", "verify", "commit")

_READ_SECONDS = 10.0
# (name, labels in order) of a sample.
Key = tuple[str, tuple[tuple[str, str], ...]]
Page = Mapping[Key, float]


def read_page(text: str) -> dict[Key, float]:
    """Every sample of a metrics page."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(url: str) -> dict[Key, float]:
    """The current page. Raises `OSError` if it is not served."""
    with urllib.request.urlopen(url, timeout=_READ_SECONDS) as page:
        return read_page(page.read().decode())


def difference(before: Page, after: Page) -> dict[Key, float]:
    """Increases between two pages; only for counters and histograms."""
    return {key: now - before.get(key, 0.0) for key, now in after.items()}


def total(pages: Iterable[Page]) -> dict[Key, float]:
    """The sum of the increases of several runs."""
    summed: dict[Key, float] = {}
    for page in pages:
        for key, added in page.items():
            summed[key] = summed.get(key, 0.0) + added
    return summed


def value(page: Page, series: Series) -> float | None:
    """The sum of a series' samples; None where the page has none."""
    labels = set(series.labels)
    found = [one for (name, its), one in page.items() if name == series.name and labels <= set(its)]
    return sum(found) if found else None


def share(part: float | None, whole: float | None) -> float | None:
    """part / whole; None if one is not known or the whole is 0."""
    return round(part / whole, 4) if part is not None and whole else None


def buckets(page: Page, name: str, **labels: str) -> list[tuple[float, float]]:
    """(upper bound, count up to it) of a histogram, by rising bound; empty if the page has none."""
    chosen = set(labels.items())
    return sorted(
        (float(dict(its)["le"]), count)
        for (known, its), count in page.items()
        if known == f"{name}_bucket" and chosen <= set(its)
    )


def quantile(counted: Sequence[tuple[float, float]], part: float) -> float | None:
    """The value that `part` of a histogram's observations do not exceed, linear within a bucket; None without any.

    For `part` 1 it is the upper bound of the last bucket that is not empty. It is at most the last finite bound.
    """
    if not counted or counted[-1][1] <= 0:
        return None
    rank = part * counted[-1][1]
    lower, below = 0.0, 0.0
    for upper, up_to in counted:
        if up_to >= rank and up_to > below:
            if math.isinf(upper):
                return lower
            return lower + (upper - lower) * (rank - below) / (up_to - below)
        lower, below = upper, max(below, up_to)
    return lower


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)


def step_figures(spent: Page) -> dict[str, Any]:
    """Figures of the steps of one or several runs; None where the target does not export them.

    Percentiles of waiting are over steps, and as fine as the histogram's buckets.
    """
    waits, steps = buckets(spent, PHASE, phase="wait"), value(spent, STEPS)
    phases = {phase: spent.get((f"{PHASE}_sum", (("phase", phase),))) for phase in PHASES}
    hits, misses = value(spent, HITS), value(spent, MISSES)
    hit_share = None if hits is None or misses is None else share(hits, hits + misses)
    trips = buckets(spent, ROUND_TRIP)
    return {
        "wait_ms": {
            "p50": _milliseconds(quantile(waits, 0.5)),
            "p90": _milliseconds(quantile(waits, 0.9)),
            "p99": _milliseconds(quantile(waits, 0.99)),
            "worst": _milliseconds(quantile(waits, 1.0)),
        },
        "hit_share": hit_share,
        "device_idle_share": share(value(spent, IDLE_SECONDS), value(spent, DEVICE_SECONDS)),
        "steps": steps,
        "step_ms": {
            phase: _milliseconds(seconds / steps) if seconds is not None and steps else None
            for phase, seconds in phases.items()
        },
        "draft_round_trip_ms": {
            "p50": _milliseconds(quantile(trips, 0.5)),
            "p99": _milliseconds(quantile(trips, 0.99)),
        },
        "counted": {name: value(spent, series) for name, series in COUNTED.items()},
    }
