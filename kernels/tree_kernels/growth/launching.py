"""How the launches that grow trees follow each other."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def order_of(device: torch.device) -> dict[str, Any]:
    """Options of kernels that wait for the launch before by themselves (programmatic dependent launch, from Hopper
    on): they are put in place while it ends."""
    dependent = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}
