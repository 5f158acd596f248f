"""What a figure must stand beside."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import torch
import transformers
import triton


def describe() -> dict[str, str]:
    """Device, versions, commit and command line."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "command": " ".join(sys.argv),
    }
