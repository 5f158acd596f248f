"""Loads weights into a head's module, and writes a head's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.heads import HeadRefused
from tree_models.names import WeightNames
from tree_models.slots import WeightSlot, specs_of
from tree_models.weights.checkpoint import Stored, TensorsInMemory, WeightsRefused
from tree_models.weights.loading import check_names, load_slots

# Layouts name what of a checkpoint is left out.
_NAMES = WeightNames(ignored=(), joining="")


def fill(slots: Sequence[WeightSlot], tensors: Mapping[str, Tensor], names: WeightNames = _NAMES) -> None:
    """Write a head's weights; `names` has those that may be left over. Raises `HeadRefused`, naming the first ten,
    where some are missing, left over, or of another shape."""
    with _refusing():
        load_slots(slots, TensorsInMemory(tensors), names)


def check_weights(slots: Sequence[WeightSlot], stored: Mapping[str, Stored]) -> None:
    """The part of `fill` that reads no values, of what is stored by name."""
    with _refusing():
        check_names(specs_of(slots), stored, _NAMES)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except WeightsRefused as error:
        raise HeadRefused(str(error)) from None


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
