"""Models by name, for packages that may not import the target service's model store: it runs in its own process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from outrider.errors import UnknownModel
from outrider.processes.python import module_command

MODEL_STORE = "target_service.model.loading.store"


def model_source(model: str) -> str:
    """Where to load a model from: the folder of a known name or of a hub id's revision; folders and other hub ids are
    returned unchanged. Raises `UnknownModel` for one that is neither or not pulled, with the store's reason."""
    # Known names have no slash, hub ids have one; only the store finds one at a revision.
    if ("/" in model and "@" not in model) or Path(model).is_dir():
        return model
    command = module_command(MODEL_STORE, "path", model)
    found = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    lines = found.stdout.strip().splitlines()
    if found.returncode != 0 or not lines:
        reason = found.stderr.strip().splitlines()
        raise UnknownModel(reason[-1] if reason else f"{model} is not in the model store", model=model)
    return lines[-1]
