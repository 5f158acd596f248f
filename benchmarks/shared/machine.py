"""What the figures of a script were measured on."""

from __future__ import annotations

import os
import platform
import sys

import torch
import transformers
import triton

from outrider.machine import describe_commit


def describe() -> dict[str, str]:
    """Device, versions, commit and command line."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": describe_commit() or "unknown",
        "command": " ".join(sys.argv),
    }
