"""Runs a worker script of the kernel tests in its own process: the interpreter is chosen before Triton is loaded."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from examples import FULL, is_full
from warm_python import shared_python

FOLDER = Path(__file__).with_name("kernels")
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def work(script: str, *, forked: bool = False, **environment: str) -> dict[str, Any]:
    """What the script wrote to standard output, as JSON. `forked`: from a process that has imported PyTorch and Triton,
    for what no GPU runs."""
    command = [str(shared_python("workers") / "python") if forked else sys.executable, "-Wignore"]
    if environment.get("TRITON_INTERPRET") == "1":
        # Forked from one that has imported Triton with its interpreter.
        command = [str(shared_python("interpreter") / "python"), str(FOLDER.with_name("interpreted.py"))]
    # What workers and tests have in common.
    path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(FOLDER / script)],
        env={**os.environ, "PYTHONPATH": path, FULL: str(int(is_full())), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compiled(script: str) -> dict[str, int]:
    """What a script that compiles kernels wrote; run in this process, which has imported all that it needs, unless
    Triton interprets here."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return work(script, TRITON_INTERPRET="0")
    said = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(said):
        warnings.simplefilter("ignore")
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    found: dict[str, int] = json.loads(said.getvalue())
    return found
