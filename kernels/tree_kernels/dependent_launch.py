"""Launches that are put in place while the one before them ends: programmatic dependent launch, from Hopper on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel's launch: DEPENDENT, whether the kernel has to wait by itself for the launch before, and
    with it the option that starts it so early. They are every caller's: not to be changed."""
    dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}
