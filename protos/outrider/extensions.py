"""Entry points: what one package offers to another by name, so that neither imports the other."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import outrider

# In a checkout, from which Outrider may run without being installed; a wheel has no such file.
_DECLARED = Path(outrider.__file__).parents[2] / "pyproject.toml"


def find_extension(group: str, name: str) -> Any | None:
    """The loaded object of the entry point with this group and name; None if there is none. Installed packages come
    first. A checkout that is only on the path has no metadata; its pyproject.toml is read."""
    found = list(entry_points(group=group, name=name)) or _declared(_DECLARED, group, name)
    return found[0].load() if found else None


def _declared(path: Path, group: str, name: str) -> list[EntryPoint]:
    """The entry point that this pyproject.toml declares, if it is Outrider's."""
    if not path.is_file():
        return []
    project = tomllib.loads(path.read_text()).get("project", {})
    value = project.get("entry-points", {}).get(group, {}).get(name)
    return [EntryPoint(name, value, group)] if project.get("name") == "outrider" and value else []
