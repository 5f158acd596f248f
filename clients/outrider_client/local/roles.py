"""What each role of Outrider needs beside the client, and what to install where it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

# One module of each requirement of an extra that its role cannot begin without; pyproject.toml has the requirements.
_MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "target": ("torch", "transformers", "numba", "prometheus_client"),
        "draft": ("numba", "numpy", "prometheus_client"),
        "gateway": ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client"),
        "train": ("torch", "transformers", "rich"),
        "all": ("torch", "transformers", "numba", "prometheus_client", "opentelemetry.sdk"),
    }
)


def missing_for(extra: str) -> str | None:
    """What to tell a user who lacks part of an extra; None where all of it is there."""
    absent = [name for name in _MODULES[extra] if not _is_there(name)]
    if not absent:
        return None
    return f"{', '.join(absent)} not installed; pip install 'outrider[{extra}]' brings what this command needs"


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # A package around it is not there.
        return False
