"""EAGLE heads that come with Outrider: a name is the same folder for the draft that runs it and for its target.

They are in the draft service's package, which is located here but not imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import NotSupported

if TYPE_CHECKING:
    from torch import Tensor

# Medusa heads may lie beside their target's checkpoint. A file of heads alone is preferred.
MEDUSA_FILES = ("medusa_lm_head.safetensors", "model.safetensors")


class HeadRefused(NotSupported):
    """The head cannot be loaded, or does not fit its target."""


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A head that comes with Outrider. `target` is its model's name in the model store."""

    name: str
    folder: Path
    target: str

    @property
    def megabytes(self) -> float:
        return sum(file.stat().st_size for file in self.folder.iterdir()) / 1e6

    @property
    def accepted_length(self) -> float | None:
        """Tokens per step with chains on its target's own greedy text, from its training record; None without one."""
        record = self.folder / "training.json"
        measured = json.loads(record.read_text()).get("acceptance") if record.is_file() else None
        return float(measured["mean_length"]) if measured else None


def shipped_heads() -> tuple[ShippedHead, ...]:
    """Every installed head, by name. Empty if the draft service is not installed."""
    spec = importlib.util.find_spec("draft_service")
    found = []
    for package in (spec.submodule_search_locations or ()) if spec is not None else ():
        for config in sorted(Path(package).glob("heads/*/config.json")):
            target = json.loads(config.read_text()).get("outrider", {}).get("target", "")
            found.append(ShippedHead(config.parent.name, config.parent, str(target)))
    return tuple(found)


def head_made_for(model: str) -> ShippedHead | None:
    """The head for a model of the model store, if there is one."""
    return next((head for head in shipped_heads() if model and head.target == model), None)


def weight_fingerprint(weight: Tensor) -> str:
    """SHA-256, in hex, of a weight's elements as bfloat16. Both services identify a head by that of its projection."""
    # Imported here: clients list heads without torch.
    import torch

    return hashlib.sha256(weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, over the vocabulary that a tokenizer's `get_vocab` returns: each token's id and text, by id."""
    digest = hashlib.sha256()
    for text, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}\t{text}\n".encode())
    return digest.hexdigest()


def head_source(head: str) -> str:
    """Where to load a head from: the folder of a known name; folders and hub ids are returned unchanged. Raises
    `NotSupported` for anything else, with a list of the known names."""
    if Path(head).is_dir():
        return head
    heads = {shipped.name: shipped for shipped in shipped_heads()}
    if head in heads:
        return str(heads[head].folder)
    # A path that does not exist would otherwise be looked up on the hub.
    if "/" in head and not head.startswith((".", "/", "~")):
        return head
    names = ", ".join(heads) or "none in this installation"
    raise NotSupported(f"{head}: no such folder, no hub id, and no head that comes with Outrider (there: {names})")
