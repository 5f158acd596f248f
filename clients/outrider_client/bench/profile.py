"""The time of a target's steps by phase, and the share of drafts in time, from its metrics around every block."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from outrider.telemetry.table import PHASES
from outrider_client.bench.samples import BenchMode

# Counters with one label each, and their names here.
_COUNTED = {
    ("outrider_draft_passes_total", "hit"): "hits",
    ("outrider_draft_passes_total", "miss"): "misses",
    ("outrider_device_seconds_total", "busy"): "busy",
    ("outrider_device_seconds_total", "idle"): "idle",
}
STEPS = "steps"
# Counters by name.
Spent = Mapping[str, float]


def _read_page(url: str) -> Spent:
    """Seconds by phase, the number of "steps", and the counters of `_COUNTED`, from a target's metrics page."""
    # Imported here: not part of a client's installation, and needed only for profiles.
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=10.0) as page:
        text = page.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "outrider_step_phase_seconds_sum":
                found[sample.labels["phase"]] = sample.value
            elif sample.name == "outrider_steps_total":
                found[STEPS] = sample.value
            elif name := _COUNTED.get((sample.name, next(iter(sample.labels.values()), ""))):
                found[name] = sample.value
    return found


@dataclass
class StepProfile:
    """Adds up the time that targets spend in each phase, by mode."""

    # The metrics URL of each mode's target; modes without one are not profiled.
    _pages: Mapping[BenchMode, str]
    totals: dict[BenchMode, dict[str, float]] = field(default_factory=dict)

    async def read(self, mode: BenchMode) -> Spent:
        return await asyncio.to_thread(_read_page, self._pages[mode]) if mode in self._pages else {}

    async def add(self, mode: BenchMode, before: Spent) -> None:
        """Add the difference to the counters `before` to this mode's totals."""
        totals = self.totals.setdefault(mode, {})
        for name, value in (await self.read(mode)).items():
            totals[name] = totals.get(name, 0.0) + value - before.get(name, 0.0)

    def per_step(self) -> list[dict[str, object]]:
        """Milliseconds per step by phase; `host` is the sum without waiting and the device."""
        rows: list[dict[str, object]] = []
        for mode, totals in self.totals.items():
            steps = totals.get(STEPS, 0.0)
            if not steps:
                continue
            phases = {phase: 1e3 * totals.get(phase, 0.0) / steps for phase in PHASES}
            host = phases["plan"] + phases["launch"] + phases["verify"] + phases["commit"]
            shares = {"hit_share": _share(totals, "hits", "misses"), "idle_share": _share(totals, "idle", "busy")}
            identity = {"mode": mode.name, "draft_placement": mode.placement or None, "steps": steps}
            rows.append({**identity, **phases, "host": host, **shares})
        return rows


def _share(totals: Spent, part: str, rest: str) -> float | None:
    """`part` of `part` and `rest` together, 0 to 1; None where nothing was counted."""
    whole = totals.get(part, 0.0) + totals.get(rest, 0.0)
    return totals.get(part, 0.0) / whole if whole else None


def profile_table(rows: list[dict[str, object]]) -> Table:
    """Milliseconds per step, one row per mode."""
    table = Table(title="ms per step in the target", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mode", no_wrap=True)
    for name in ("steps", *PHASES, "host", "hits", "idle"):
        table.add_column(name, justify="right")
    for row in rows:
        label = f"{row['mode']} {row['draft_placement'] or ''}".strip()
        shown = (f"{row[name]:.2f}" for name in (*PHASES, "host"))
        shares = ("-" if row[name] is None else f"{row[name]:.0%}" for name in ("hit_share", "idle_share"))
        table.add_row(label, f"{row['steps']:.0f}", *shown, *shares)
    return table
