"""The figures of a benchmark as a plot: throughput and acceptance by task and concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.settings import SettingsError
from outrider_client.bench.report import ALL_TASKS
from outrider_client.bench.samples import BenchMode

# By mode and task.
_Cells = Mapping[tuple[str, str], Mapping[str, Any]]
_BAR_SPACE = 0.8


def require_matplotlib() -> None:
    """Raise `SettingsError` when matplotlib is missing, before hours of measuring."""
    try:
        import matplotlib
    except ImportError:
        raise SettingsError("--plot needs matplotlib: pip install 'outrider[plot]'") from None
    # Without a display.
    matplotlib.use("Agg")


def save_plot(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a column per concurrency, throughput above, tokens per step below, a bar per mode."""
    from matplotlib.figure import Figure

    results = document["results"]
    levels = sorted({cell["concurrency"] for cell in results})
    tasks = [*sorted({cell["task"] for cell in results} - {ALL_TASKS}), ALL_TASKS]
    modes = list(dict.fromkeys(_label(cell) for cell in results))
    # Inches. Chosen: names of tasks have room below their bars.
    width = 2 + 1.25 * len(tasks) * len(levels)
    figure = Figure(figsize=(min(width, 40), 8), layout="constrained")
    axes = figure.subplots(2, len(levels), squeeze=False, sharey="row")
    for column, level in enumerate(levels):
        here = {(_label(cell), cell["task"]): cell for cell in results if cell["concurrency"] == level}
        _bars(axes[0][column], here, modes, tasks, "tokens_per_second", spread=True)
        _bars(axes[1][column], here, modes, tasks, "mean_accepted_length", spread=False)
        axes[0][column].set_title(f"{level} at once")
    axes[0][0].set_ylabel("tokens per second")
    axes[1][0].set_ylabel("tokens per step (1 is plain)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(modes), 3), frameon=False)
    figure.supxlabel(_caption(document), x=0.01, ha="left", fontsize=7)
    figure.savefig(path, dpi=120)


def _bars(axis: Any, cells: _Cells, modes: Sequence[str], tasks: Sequence[str], name: str, *, spread: bool) -> None:
    bar = _BAR_SPACE / len(modes)
    for index, mode in enumerate(modes):
        found = [(at, cells[mode, task]) for at, task in enumerate(tasks) if (mode, task) in cells]
        if not found:
            continue
        heights = [cell[name] or 0.0 for _, cell in found]
        errors = list(zip(*(_error(cell) for _, cell in found), strict=True)) if spread else None
        places = [at - _BAR_SPACE / 2 + bar * (index + 0.5) for at, _ in found]
        axis.bar(places, heights, bar, label=mode, color=f"C{index}", yerr=errors, error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(tasks)), [task.replace("_", "\n") for task in tasks], fontsize=8)
    axis.grid(axis="y", linewidth=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _error(cell: Mapping[str, Any]) -> tuple[float, float]:
    rate, spread = cell["tokens_per_second"], cell["tokens_per_second_spread"]
    # Rounding may put the median slightly outside.
    return max(0.0, rate - spread["min"]), max(0.0, spread["max"] - rate)


def _label(cell: Mapping[str, Any]) -> str:
    return BenchMode(cell["mode"], cell["draft_placement"] or "").label


def _caption(document: Mapping[str, Any]) -> str:
    machine, target = document["machine"], document["target"]
    repeats = document["arguments"]["repeats"]
    return (
        f"{target['model']} {target['dtype']}, {machine['cores']} cores {machine['processor']},\n"
        f"{document['prompts']} prompts, median and range of {repeats} repeat(s), "
        f"commit {document['commit'][:10] or 'unknown'}"
    )
