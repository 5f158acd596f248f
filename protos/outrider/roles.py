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

# What else a command may find missing on its way, and the extra that brings it.
_BROUGHT_BY = {
    **{name: "target" for name in ("tokenizers", "huggingface_hub", "safetensors", "msgspec", "gguf", "jinja2")},
    **{name: extra for extra in ("draft", "gateway", "target") for name in _MODULES[extra]},
    "matplotlib": "plot",
}


def missing_for(extra: str) -> str | None:
    """An error message that names the missing modules of an extra; None where all are installed."""
    absent = [name for name in _MODULES[extra] if not _is_installed(name)]
    if not absent:
        return None
    return _missing(", ".join(absent), extra)


def missing_module(error: ModuleNotFoundError) -> str | None:
    """An error message that names the extra with a module that was not found; None for a module of no extra."""
    name = (error.name or "").partition(".")[0]
    return _missing(name, _BROUGHT_BY[name]) if name in _BROUGHT_BY else None


def _missing(names: str, extra: str) -> str:
    return f"{names} not installed; pip install 'outrider[{extra}]' brings what this command needs"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # Its parent package is missing.
        return False
