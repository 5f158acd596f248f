"""EAGLE heads that come with Outrider: a name means the same folder to the draft that runs it and to its target.

They lie in the draft service's package, which is looked up here and not imported.
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

_HOLDER, _FOLDER = "draft_service", "heads"
_CONFIG, _RECORD = "config.json", "training.json"


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A head by its name. `target` is the model that it was made for, as the model store names it."""

    name: str
    folder: Path
    target: str

    @property
    def megabytes(self) -> float:
        """Of all its files."""
        return sum(file.stat().st_size for file in self.folder.iterdir()) / 1e6

    @property
    def accepted_length(self) -> float | None:
        """Tokens a step with chains on its target's own greedy text, by its training record; None without one."""
        record = self.folder / _RECORD
        measured = json.loads(record.read_text()).get("acceptance") if record.is_file() else None
        return float(measured["mean_length"]) if measured else None


def shipped_heads() -> tuple[ShippedHead, ...]:
    """Every head that is there, by rising name. Empty where the draft service is not installed."""
    spec = importlib.util.find_spec(_HOLDER)
    found = []
    for package in (spec.submodule_search_locations or ()) if spec is not None else ():
        for config in sorted((Path(package) / _FOLDER).glob(f"*/{_CONFIG}")):
            target = json.loads(config.read_text()).get("outrider", {}).get("target", "")
            found.append(ShippedHead(config.parent.name, config.parent, str(target)))
    return tuple(found)


def head_made_for(model: str) -> ShippedHead | None:
    """The head that comes with Outrider for a model of the model store."""
    return next((head for head in shipped_heads() if model and head.target == model), None)


def weight_fingerprint(weight: Tensor) -> str:
    """SHA-256, in hex, of a weight's elements as bfloat16: by that of its projection both services know a head."""
    # Only here: clients look for heads too, and do without torch.
    import torch

    return hashlib.sha256(weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, over the vocabulary of transformers' tokenizer: each token's id and text, by rising id."""
    digest = hashlib.sha256()
    for text, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}\t{text}\n".encode())
    return digest.hexdigest()


def head_source(head: str) -> str:
    """Where to read a head from: the folder of a name, and folders and hub ids as they are.

    Raises:
        NotSupported: it is none of them; the message says which names there are.
    """
    if Path(head).is_dir():
        return head
    heads = {shipped.name: shipped for shipped in shipped_heads()}
    if head in heads:
        return str(heads[head].folder)
    # A path that leads nowhere would otherwise be looked for on the hub.
    if "/" in head and not head.startswith((".", "/", "~")):
        return head
    names = ", ".join(heads) or "none in this installation"
    raise NotSupported(f"{head}: no such folder, no hub id, and no head that comes with Outrider (there: {names})")
