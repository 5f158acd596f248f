"""What people name a model by that is neither a folder nor a hub id."""

from __future__ import annotations

from pathlib import Path

from outrider.checkpoints.folder import GGUF
from outrider.checkpoints.refusal import CheckpointRefused


def check_model_name(text: str) -> None:
    """Raise `CheckpointRefused` for a file, and for a name of Ollama's, with what to name instead."""
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        what = GGUF if path.suffix == ".gguf" else "name the folder that it is in"
        raise CheckpointRefused(f"it is a file, and no folder; {what}")
    if text.endswith(".gguf"):
        raise CheckpointRefused(f"there is no such file; {GGUF}")
    if "://" in text:
        raise CheckpointRefused("it is an address: name a hub id, ORG/NAME, or a folder")
    if ":" in text:
        raise CheckpointRefused("it is no hub id: only names of Ollama have a colon; use ORG/NAME, or a folder")
