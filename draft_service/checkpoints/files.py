"""A head's module and its folder: weights brought into the one, and the other written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from draft_service.checkpoints.facts import HeadRefused

RECORD = "training.json"
# Weights that a message names. Chosen: a line still.
_NAMED = 4


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module the weights by its own names.

    Raises:
        HeadRefused: weights are missing, unknown, or of another shape than the module's.
    """
    check_shapes(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    module.load_state_dict(tensors)


def check_shapes(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `HeadRefused` unless weights of these shapes, by the module's own names, are all that `fill` takes.

    The module may be on PyTorch's `meta` device, where it has no weights of its own.
    """
    own = module.state_dict()
    unknown, missing = sorted(shapes.keys() - own.keys()), sorted(own.keys() - shapes.keys())
    if unknown or missing:
        raise HeadRefused(f"weights that do not fit: unknown {_some(unknown)}, missing {_some(missing)}")
    for name, shape in shapes.items():
        if tuple(own[name].shape) != shape:
            raise HeadRefused(f"{name} has shape {list(shape)}, config.json asks for {list(own[name].shape)}")


def _some(names: Sequence[str]) -> str:
    """Names for a message, which a layer of experts has thousands of."""
    rest = len(names) - _NAMED
    return (", ".join(names[:_NAMED]) or "none") + (f" and {rest} more" if rest > 0 else "")


def write_folder(
    folder: Path, config: Mapping[str, Any], file: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None
) -> None:
    """Write config.json, the weights as a safetensors `file`, and a `record` of their training, where there is one, as
    training.json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written, weights = folder / "config.json", folder / file
    written.write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, weights, {"format": "pt"})
    # safetensors lets nobody else read it, and the service that will may run as another user.
    weights.chmod(written.stat().st_mode)
    if record is not None:
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
