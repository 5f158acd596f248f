"""Command lines of our own modules, for every process that this project starts."""

from __future__ import annotations

import sys


def module_command(module: str, *words: str) -> tuple[str, ...]:
    """The command line that runs a module under this interpreter.

    With -P, since without it `python -m` looks for modules in the current folder first: a model's folder may hold a
    `torch.py`, which would run.
    """
    return (sys.executable, "-P", "-m", module, *words)
