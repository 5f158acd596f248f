"""Where each tensor of a served model is in memory: joined with others, packed, or as it was loaded.

New weights overwrite the old ones, so that their addresses stay valid in captured graphs, compiled layers and parts of
fused layers. Packed layouts of a CPU are made again; nothing holds their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from target_service.model.fused.joined_linears import JointLinear
from target_service.model.fused.layers import FusedLayer, FusedNorm, RowsHead
from target_service.model.fused.packed_linears import JoinedLinear, PackedLinear
from target_service.model.weights.room import copy_in_pieces
from tree_models.slots import TensorSpec, WeightSlot


def weight_slots(model: PreTrainedModel) -> list[WeightSlot]:
    """Slots of all tensors of the model, by the names that they had before its layers were prepared for serving."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return list(_slots(model, "", ties))


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


def _slots(module: nn.Module, path: str, ties: Mapping[str, str]) -> Iterator[WeightSlot]:
    if isinstance(module, FusedLayer | FusedNorm | RowsHead):
        # The fused layer's parts are the same memory.
        yield from _slots(module.plain, path, ties)
    elif isinstance(module, JointLinear):
        rows = slice(module.start, module.stop)
        yield _in_place(f"{path}weight", module.joint_weight[rows], ties)
        if module.joint_bias is not None:
            yield _in_place(f"{path}bias", module.joint_bias[rows], ties)
    elif isinstance(module, PackedLinear):
        yield _packed([path], module, module.pack, [module.out_features], ties)
    else:
        yield from _plain(module, path, ties)
        yield from _joined(module, path, ties)
        for name, child in module.named_children():
            if not isinstance(child, JoinedLinear):
                yield from _slots(child, f"{path}{name}.", ties)


def _plain(module: nn.Module, path: str, ties: Mapping[str, str]) -> Iterator[WeightSlot]:
    """Parameters and persistent buffers of the module, without those of its children."""
    for name, parameter in module.named_parameters(recurse=False):
        yield _in_place(f"{path}{name}", parameter.detach(), ties)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
            yield _in_place(f"{path}{name}", buffer, ties)


def _joined(module: nn.Module, path: str, ties: Mapping[str, str]) -> Iterator[WeightSlot]:
    """Child layers that are computed together."""
    names = [name for name, child in module.named_children() if isinstance(child, JoinedLinear)]
    if names:
        joint: Any = getattr(module, names[0]).joint
        by_place = sorted(names, key=lambda name: getattr(module, name).index)
        yield _packed([f"{path}{name}." for name in by_place], joint.packed, joint.pack, joint.widths, ties)


def _in_place(name: str, memory: Tensor, ties: Mapping[str, str]) -> WeightSlot:
    spec = TensorSpec(tuple(memory.shape), memory.dtype, ties.get(name, ""))
    return WeightSlot({name: spec}, lambda tensors: copy_in_pieces(memory, tensors[0]))


def _packed(
    paths: Sequence[str], kept: PackedLinear, pack: Callable[..., None], widths: Sequence[int], ties: Mapping[str, str]
) -> WeightSlot:
    """Linear layers packed as one: their weights, then their biases if they have any."""
    specs = {
        f"{path}weight": TensorSpec((width, kept.in_features), torch.bfloat16, ties.get(f"{path}weight", ""))
        for path, width in zip(paths, widths, strict=True)
    }
    if kept.has_bias:
        specs |= {f"{path}bias": TensorSpec((w,), torch.bfloat16) for path, w in zip(paths, widths, strict=True)}
    count = len(paths)
    return WeightSlot(specs, lambda tensors: pack(tensors[:count], tensors[count:]))
