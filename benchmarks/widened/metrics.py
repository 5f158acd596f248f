"""Figures of a run from the target's metrics page: counters and histograms, read before and after it."""

from __future__ import annotations

import math
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Series(NamedTuple):
    """A metric by its name on the page, and the labels that its samples must have; sums over the others."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


# Figures by what they are read from. What a page does not have is null.
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
    """The page as it is now. Raises `OSError` where nobody serves it."""
    with urllib.request.urlopen(url, timeout=_READ_SECONDS) as page:
        return read_page(page.read().decode())


def difference(before: Page, after: Page) -> dict[Key, float]:
    """What was added between the two; of gauges this means nothing."""
    return {key: now - before.get(key, 0.0) for key, now in after.items()}


def total(pages: Iterable[Page]) -> dict[Key, float]:
    """The sum of what several runs added."""
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
    """part / whole, where both are known and there is a whole."""
    return round(part / whole, 4) if part is not None and whole else None


def buckets(page: Page, name: str, **labels: str) -> list[tuple[float, float]]:
    """(upper bound, how many up to it) of a histogram, by rising bound; empty where there is none."""
    wanted = set(labels.items())
    return sorted(
        (float(dict(its)["le"]), count)
        for (known, its), count in page.items()
        if known == f"{name}_bucket" and wanted <= set(its)
    )


def quantile(counted: Sequence[tuple[float, float]], part: float) -> float | None:
    """The value that `part` of a histogram's observations do not exceed, linear within a bucket; None of none.

    `part` 1 is the upper bound of the last bucket with anything in it; past the last finite bound it is that bound.
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
    """What the steps of one or several runs came to; None where the target does not export it.

    Percentiles of waiting are over steps, and no finer than the histogram's buckets.
    """
    waits, steps = buckets(spent, PHASE, phase="wait"), value(spent, STEPS)
    phases = {phase: spent.get((f"{PHASE}_sum", (("phase", phase),))) for phase in PHASES}
    hits, misses = value(spent, HITS), value(spent, MISSES)
    met = None if hits is None or misses is None else share(hits, hits + misses)
    trips = buckets(spent, ROUND_TRIP)
    return {
        "wait_ms": {
            "p50": _milliseconds(quantile(waits, 0.5)),
            "p90": _milliseconds(quantile(waits, 0.9)),
            "p99": _milliseconds(quantile(waits, 0.99)),
            "worst": _milliseconds(quantile(waits, 1.0)),
        },
        "hit_share": met,
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
