"""What a CUDA graph could not hold, found without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What waits for the device, what makes tensors of a size that it decides, and what brings numbers from the host.
FORBIDDEN = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "lift_fresh_copy", "item", "unique2"}


class Captured(TorchDispatchMode):
    """Raises at what a capture would fail at, and counts what it would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        index = args[1] if name == "index" else ()
        chosen = any(one is not None and one.dtype is torch.bool for one in index)
        assert name not in FORBIDDEN and not chosen, name
        self.launches += 1
        return func(*args, **(kwargs or {}))
