"""Kernels in Gluon, Triton's language below Triton, for what Hopper's own instructions make faster.

Each computes what a kernel in Triton does, which every other device runs; only compiled, never interpreted.
"""

from __future__ import annotations

import torch
import triton

# Versions of Triton with which these kernels were compiled. Gluon is experimental; others may lack names.
_FIRST_TRITON, _LAST_TRITON = (3, 6), (3, 9)


def runs_on(device: torch.device) -> bool:
    """Whether a device and the installed Triton run these kernels, which cannot be imported elsewhere."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return _FIRST_TRITON <= tuple(map(int, triton.__version__.split(".")[:2])) <= _LAST_TRITON
