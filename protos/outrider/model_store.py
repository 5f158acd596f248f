"""Models by name, for packages that may not import the target service's model store: it runs in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outrider.errors import UnknownModel

MODEL_STORE = "target_service.model.loading.store"
_LOOKUP_SECONDS = 60.0


def stored_folder(name: str) -> Path:
    """The folder of a pulled model. Raises `UnknownModel` with the store's reason."""
    command = [sys.executable, "-m", MODEL_STORE, "path", name]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_LOOKUP_SECONDS)
    lines = found.stdout.strip().splitlines()
    if found.returncode != 0 or not lines:
        reason = found.stderr.strip().splitlines()
        raise UnknownModel(reason[-1] if reason else f"{name} is not in the model store", model=name)
    return Path(lines[-1])


def model_source(model: str) -> str:
    """Where to load a model from: the folder of a known name or of a hub id's revision; folders and other hub ids are
    returned unchanged. Raises `UnknownModel`, with the known names, for one that is neither or not pulled."""
    # Known names have no slash, hub ids have one; only the store finds one at a revision.
    if ("/" in model and "@" not in model) or Path(model).is_dir():
        return model
    return str(stored_folder(model))
