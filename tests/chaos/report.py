"""What a proof writes: figures with the machine, the versions, the commit and the command that they came from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.machine import describe_machine

_ROOT = Path(__file__).parents[2]


def say(line: str) -> None:
    """A line of progress, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write(path: Path | None, module: str, figures: Mapping[str, Any]) -> None:
    """Write figures to a file, if one is given, under where they come from."""
    if path is None:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True)
    command = ["python", "-m", module, *_without_paths(sys.argv[1:])]
    origin = {"machine": describe_machine(), "commit": commit.stdout.strip(), "command": " ".join(command)}
    path.write_text(json.dumps(origin | dict(figures), indent=1) + "\n")


def _without_paths(words: list[str]) -> list[str]:
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if word not in ("--json", "--folder") and before not in ("--json", "--folder"):
            kept.append(word)
    return kept
