"""The figures of a benchmark as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from outrider_client.bench.report import ALL_TASKS

_COLUMNS = ("n", "tok/s", "spread", "x plain", "per step", "by depth", "TTFT ms", "TPOT ms", "differ")


def figures_table(document: Mapping[str, Any]) -> Table:
    """One row per task, concurrency and mode; x plain is the ratio of tokens per second."""
    target = document["target"]
    table = Table(title=f"{target['model']}, {target['dtype']}, {document['prompts']} prompts", title_justify="left")
    for name in ("task", "c", "mode"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(
        enumerate(document["results"]),
        key=lambda pair: (pair[1]["task"] == ALL_TASKS, pair[1]["task"], pair[1]["concurrency"], pair[0]),
    )
    last: tuple[str, int] | None = None
    for _, cell in order:
        place = (cell["task"], cell["concurrency"])
        if last is not None and place != last:
            table.add_section()
        shown = ("", "") if place == last else (cell["task"], str(cell["concurrency"]))
        table.add_row(*shown, *_row(cell))
        last = place
    return table


def _row(cell: Mapping[str, Any]) -> list[Text | str]:
    placement = f" ({cell['draft_placement']})" if cell["draft_placement"] else ""
    spread = cell["tokens_per_second_spread"]
    repeated = len(spread["by_repeat"]) > 1
    low, high = (
        (spread["min"], spread["max"]) if repeated else (spread["by_request"]["p25"], spread["by_request"]["p75"])
    )
    refused = sum(cell["refused"].values())
    return [
        cell["mode"] + placement,
        f"{cell['n']}" + (f" (-{refused})" if refused else ""),
        f"{cell['tokens_per_second']:.1f}",
        f"{_number(low, 0)} to {_number(high, 0)}",
        _number(cell["speedup_over_plain"], 2),
        _number(cell["mean_accepted_length"], 2),
        " ".join(f"{share:.2f}".lstrip("0") if share else "0" for share in cell["acceptance_by_depth"][:4]) or "-",
        _pair(cell["ttft_ms"], 0),
        _pair(cell["tpot_ms"], 1),
        _differing(cell),
    ]


def _differing(cell: Mapping[str, Any]) -> Text | str:
    if cell["differing_outputs"] is None:
        return "-"
    text = f"{cell['differing_outputs']}/{cell['compared_outputs']}"
    return Text(text, style="red" if cell["differing_outputs"] else "green")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(values: Mapping[str, float | None], digits: int) -> str:
    return f"{_number(values['p50'], digits)} / {_number(values['p95'], digits)}"
