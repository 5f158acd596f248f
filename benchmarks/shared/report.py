"""What every script takes and writes: a `--json` flag, the file behind it, and how values are summed up in it."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json FILE`, whose help is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def write_json(path: Path | None, document: Any) -> None:
    """Write the figures; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median of two values or more, and the distance of their quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, high - low


def settings_of(options: argparse.Namespace, but: Sequence[str] = ()) -> dict[str, Any]:
    """What a script was asked for, less where it writes to."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "markdown", *but)}
