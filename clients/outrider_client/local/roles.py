"""The modules that each part of Outrider needs beside the client, and the extra that installs them."""

from __future__ import annotations

from importlib.util import find_spec

# One module of each requirement of an extra without which it cannot start; pyproject.toml has the requirements.
_MODULES = {
    "target": ("torch", "transformers", "numba", "prometheus_client"),
    "draft": ("numba", "numpy", "prometheus_client"),
    "gateway": ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client"),
    "train": ("torch", "transformers", "rich"),
    "all": ("torch", "transformers", "numba", "prometheus_client", "opentelemetry.sdk"),
}


def missing_for(extra: str) -> str | None:
    """An error message that names the missing modules of an extra; None where all are installed."""
    absent = [name for name in _MODULES[extra] if not _is_installed(name)]
    if not absent:
        return None
    return f"{', '.join(absent)} not installed; pip install 'outrider[{extra}]' brings what this command needs"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # Its parent package is missing.
        return False
