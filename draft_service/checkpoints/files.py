"""A head's module and its folder: weights brought into the one, and the other written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from draft_service.checkpoints.facts import HeadRefused

RECORD = "training.json"


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module the weights by its own names.

    Raises:
        HeadRefused: weights are missing, unknown, or of another shape than the module's.
    """
    own = module.state_dict()
    unknown, missing = sorted(tensors.keys() - own.keys()), sorted(own.keys() - tensors.keys())
    if unknown or missing:
        raise HeadRefused(f"weights that do not fit: unknown {unknown or 'none'}, missing {missing or 'none'}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise HeadRefused(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(own[name].shape)}")
    module.load_state_dict(tensors)


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
