"""Other weights in the memory of a network that is served.

New weights overwrite the old ones, so that their addresses stay valid in captured graphs, compiled layers and parts of
fused layers. Packed layouts of a CPU are made again; nothing holds their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from target_service.model.network import TargetNetwork
from target_service.model.weights.host_memory import copy_in_pieces
from tree_models.slots import WeightSlot


def weight_slots(network: TargetNetwork) -> list[WeightSlot]:
    """Slots of all tensors of the network, by their names in checkpoints."""
    return network.slots(copy_in_pieces)


def write_weights(
    slots: Sequence[WeightSlot], weights: Mapping[str, Tensor], device: torch.device, beat: Callable[[], None]
) -> None:
    """Write `weights`, which `read_weights` has checked, and wait once for the device at the end. Between two steps;
    `beat` is called after each slot."""
    try:
        with torch.inference_mode():
            for slot in slots:
                slot.write([weights[name] for name in slot.specs])
                beat()
    finally:
        # Also when one fails: copies in flight read memory that is given back next.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
