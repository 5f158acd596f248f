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
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    named = sys.argv[1].split(",") if len(sys.argv) > 1 and sys.argv[1] else []
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml").read_text(), named)) + "\n")
