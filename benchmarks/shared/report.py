"""What every script shares: options, lines of progress, Markdown tables, statistics, and a JSON file of figures."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outrider.machine import describe_commit, describe_machine, describe_versions

Value = TypeVar("Value")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json FILE`, whose help is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def comma_separated(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """The type of an option that takes several values, with commas between them."""

    def values(text: str) -> list[Value]:
        return [kind(word.strip()) for word in text.split(",") if word.strip()]

    return values


def settings_of(options: argparse.Namespace, but: Sequence[str] = ()) -> dict[str, Any]:
    """The options of a script, without the names of its output files and those in `but`."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "markdown", *but)}


def provenance(script: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions (of `packages` too), commit and command of a run of the module `benchmarks.<script>`."""
    return {
        "machine": describe_machine(),
        "versions": describe_versions(packages),
        "commit": describe_commit(),
        "command": shlex.join(["python", "-m", f"benchmarks.{script}", *sys.argv[1:]]),
    }


def show(text: str) -> None:
    """Write a line to the standard output at once, whether or not it is a terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_json(path: Path | None, document: Any) -> None:
    """Replace the file in one move, so that it is whole at any moment; without a path do nothing."""
    if path is None:
        return
    text = json.dumps(document, indent=1, default=str) + "\n"
    if path.exists() and not path.is_file():
        # Such as /dev/stdout.
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with its first column to the left and the others, numbers as a rule, to the right."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(head) - 1))
    return "\n".join(lines) + "\n"


def record_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same fields as a Markdown table."""
    return markdown_table([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median of two values or more, and the distance between their quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, high - low


def percentile(values: Sequence[float], share: float) -> float:
    """The lowest value with this share of them before it; the highest, where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval_95(values: Sequence[float]) -> list[float]:
    """The interval of 95 % of a bootstrap's values."""
    ordered = sorted(values)
    return [round(ordered[int(share * (len(ordered) - 1))], 4) for share in (0.025, 0.975)]
