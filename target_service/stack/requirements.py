"""Writes the requirements of the project and of the named extras, for the image's cached layer.

python requirements.py [EXTRA,...] > requirements.txt
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The requirement lines. Raises `KeyError` for an extra that does not exist."""
    project = tomllib.loads(pyproject)["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += _lines_of(extra, project["optional-dependencies"], project["name"])
    return list(dict.fromkeys(found))


def _lines_of(extra: str, optional: dict[str, list[str]], name: str) -> list[str]:
    """Of an extra, and of those that it names."""
    found = []
    for line in optional[extra]:
        if line.startswith(f"{name}["):
            for inner in line[len(name) + 1 : -1].split(","):
                found += _lines_of(inner, optional, name)
        else:
            found.append(line)
    return found


if __name__ == "__main__":
    named = sys.argv[1].split(",") if len(sys.argv) > 1 and sys.argv[1] else []
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml").read_text(), named)) + "\n")
