"""What the autoscaler reads of a service: changes of its own metrics since it last asked."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str, float]


class ServiceFigures:
    """Readings of a service's metrics page, each compared with the one before."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = f"http://{address}/metrics"
        self._clock = clock
        self._last: tuple[float, Samples] | None = None

    async def read(self) -> tuple[Samples, Samples]:
        """All samples now, each summed over its labels, and what each grew by per second since the last call; nothing
        grew at the first. Raises `OSError`."""
        samples = summed(await asyncio.to_thread(self._page))
        now, last = self._clock(), self._last
        self._last = now, samples
        if last is None or now <= last[0]:
            return samples, defaultdict(float)
        grown = {name: (value - last[1].get(name, 0.0)) / (now - last[0]) for name, value in samples.items()}
        return samples, defaultdict(float, grown)

    def _page(self) -> str:
        with urllib.request.urlopen(self._url, timeout=5.0) as page:
            text: str = page.read().decode()
        return text


def summed(page: str) -> Samples:
    """Samples of a page in Prometheus' text format: by name, summed over labels, and by NAME{LABEL=VALUE}; 0 for what
    is not there."""
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] += sample.value
            for label, value in sample.labels.items():
                found[f"{sample.name}{{{label}={value}}}"] += sample.value
    return found


def target_figures(now: Samples, grown: Samples) -> dict[str, float]:
    """Of a target: requests that it has, tokens a second that it generates, and of the passes that a draft follows the
    share for which it was late."""
    passes = grown["outrider_draft_passes_total"]
    late = grown["outrider_draft_passes_total{outcome=miss}"]
    if not passes:
        # Where the host chooses the rows, as on a CPU, it waits for drafts.
        late = grown["outrider_fallback_steps_total"]
        passes = grown["outrider_spec_decode_num_drafts_total"] + late
    return {
        "requests": now["outrider_requests_running"] + now["outrider_requests_waiting"],
        "tokens_per_second": grown["outrider_generation_tokens_total"],
        "late_share": late / passes if passes > 0 else 0.0,
    }


def draft_figures(_now: Samples, grown: Samples) -> dict[str, float]:
    """Of a draft: the share of time in which it drafts."""
    return {"busy_share": grown["outrider_draft_propose_seconds_sum"]}
