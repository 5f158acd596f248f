"""Runs a worker script of the kernel tests in its own process: the interpreter is chosen before Triton is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("kernels")
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def work(script: str, **environment: str) -> dict[str, Any]:
    """What the script wrote to standard output, as JSON."""
    runner = [str(FOLDER.with_name("interpreted.py"))] if environment.get("TRITON_INTERPRET") == "1" else []
    # What workers and tests have in common.
    path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *runner, str(FOLDER / script)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=280,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
