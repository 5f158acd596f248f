"""Models by name, for those who may not import the target service's store: it is asked in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outrider.errors import UnknownModel

MODEL_STORE = "target_service.model.loading.store"
_LOOKUP_SECONDS = 60.0


def stored_folder(name: str) -> Path:
    """The folder of a model that was pulled. Raises `UnknownModel` with the store's reason."""
    command = [sys.executable, "-m", MODEL_STORE, "path", name]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_LOOKUP_SECONDS)
    lines = found.stdout.strip().splitlines()
    if found.returncode != 0 or not lines:
        reason = found.stderr.strip().splitlines()
        raise UnknownModel(reason[-1] if reason else f"{name} is not in the model store", model=name)
    return Path(lines[-1])


def model_source(model: str) -> str:
    """What to load a model from: the folder of a known name or of a hub id's revision, and folders and
    other hub ids as they are.

    Raises:
        UnknownModel: it is none of them, or is known and was not pulled; the message says which names there are.
    """
    # Known names have no slash, hub ids have one, and one at a revision only the store finds.
    if ("/" in model and "@" not in model) or Path(model).is_dir():
        return model
    return str(stored_folder(model))
