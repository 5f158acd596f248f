"""Loads weights into a head's module, and writes a head's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.heads import HeadRefused

# Names in a message. Chosen to fit a line.
_NAMED = 4


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load weights, by the module's own names. Raises `HeadRefused`, see `check_shapes`."""
    check_shapes(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    module.load_state_dict(tensors)


def check_shapes(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `HeadRefused` unless these are the shapes of all weights of a module, which may be on PyTorch's `meta`
    device, by its own names."""
    own = module.state_dict()
    unknown, missing = sorted(shapes.keys() - own.keys()), sorted(own.keys() - shapes.keys())
    if unknown or missing:
        raise HeadRefused(f"weights that do not fit: unknown {_some(unknown)}, missing {_some(missing)}")
    for name, shape in shapes.items():
        if tuple(own[name].shape) != shape:
            raise HeadRefused(f"{name} has shape {list(shape)}, config.json implies {list(own[name].shape)}")


def _some(names: Sequence[str]) -> str:
    """The first few names, for a message: a layer of experts has thousands."""
    rest = len(names) - _NAMED
    return (", ".join(names[:_NAMED]) or "none") + (f" and {rest} more" if rest > 0 else "")


def write_folder(
    path: str | Path,
    config: Mapping[str, Any],
    file: str,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any] | None,
) -> Path:
    """Write config.json, the weights as a safetensors `file`, and training.json if there is a `record`."""
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    written, weights = folder / "config.json", folder / file
    written.write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, weights, {"format": "pt"})
    # safetensors writes files for their owner alone, and the service that reads this one may run as another user.
    weights.chmod(written.stat().st_mode)
    if record is not None:
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return folder
