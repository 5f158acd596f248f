"""The context of a measurement: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_PACKAGES = ("outrider", "torch", "transformers", "numba", "numpy", "grpcio", "protobuf", "tokenizers")


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory and load of this machine; unknown texts are empty."""
    return {
        "platform": "-".join((platform.system(), _release(), platform.machine(), *platform.libc_ver())),
        "processor": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_kib": _first_match("/proc/meminfo", r"MemTotal:\s*(\d+)"),
        "load_average": os.getloadavg(),
    }


def _release() -> str:
    """The kernel's version number, without its build name."""
    found = re.match(r"[\d.]+", platform.release())
    return found[0].rstrip(".") if found else ""


def describe_versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python and of the installed packages that matter, `more` among them."""
    versions = {"python": platform.python_version()}
    for name in (*_PACKAGES, *more):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_commit() -> str:
    """The commit of this checkout, with "+changes" if it is not clean; empty outside a checkout."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if commit and changed else "")


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _first_match(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return found.group(1).strip() if found else ""
