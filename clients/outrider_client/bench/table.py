"""The figures of a benchmark as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

Cell = Mapping[str, Any]


def figures_table(document: Mapping[str, Any], width: int) -> Table:
    """One row per task, concurrency and mode, for a terminal of this width; `x plain` compares tokens per second.
    `spread` is least to most over repeats, or the quartiles over blocks of requests where there is one repeat."""
    target = document["target"]
    title = f"{target['model']}, {target['dtype']}, {document['prompts']} prompts"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("task", "c", "mode"):
        table.add_column(name, no_wrap=True)
    # Narrower terminals get the most important columns only.
    columns = {name: show for name, show in _COLUMNS.items() if width >= 112 or name not in _WIDE_ONLY}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for (task, concurrency), cells in groupby(document["results"], lambda cell: (cell["task"], cell["concurrency"])):
        table.add_section()
        for number, cell in enumerate(cells):
            shown = ("", "") if number else (task, str(concurrency))
            mode = f"{cell['mode']} {cell['draft_placement'] or ''}".rstrip()
            table.add_row(*shown, mode, *(show(cell) for show in columns.values()))
    return table


def _count(cell: Cell) -> str:
    refused = sum(cell["refused"].values())
    return f"{cell['n']}" + (f" -{refused}" if refused else "")


def _spread(cell: Cell) -> str:
    spread = cell["tokens_per_second_spread"]
    if len(spread["by_repeat"]) > 1:
        return f"{spread['min']:.0f} to {spread['max']:.0f}"
    return f"{_number(spread['by_block']['p25'], 0)} to {_number(spread['by_block']['p75'], 0)}"


def _by_depth(cell: Cell) -> str:
    return " ".join(f"{share or 0:.2f}".lstrip("0") for share in cell["acceptance_by_depth"][:3]) or "-"


def _differing(cell: Cell) -> str | Text:
    if cell["differing_outputs"] is None:
        return "-"
    text = f"{cell['differing_outputs']}/{cell['compared_outputs']}"
    return Text(text, style="red" if cell["differing_outputs"] else "green")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


_COLUMNS: Mapping[str, Callable[[Cell], str | Text]] = {
    "n": _count,
    "tok/s": lambda cell: f"{cell['tokens_per_second']:.1f}",
    "spread": _spread,
    "x plain": lambda cell: _number(cell["speedup_over_plain"], 2),
    "tok/step": lambda cell: _number(cell["mean_accepted_length"], 2),
    "accepted by depth": _by_depth,
    "TTFT ms": lambda cell: _number(cell["ttft_ms"]["p50"], 0),
    "TPOT ms": lambda cell: _number(cell["tpot_ms"]["p50"], 1),
    "differ": _differing,
}
_WIDE_ONLY = ("n", "spread", "accepted by depth")
