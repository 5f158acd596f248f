"""`python -m target_service.prefetch MODEL`: fetch what `--model` names, so that a service finds it in the cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from target_service.model.loading.store import resolve

# What the loader reads. Pickled weights and code are neither wanted nor fetched.
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def prefetch(model: str) -> Path:
    """The folder of a known name, of a folder, or of a hub id, fetched if need be.

    Raises `OSError`, or `ValueError` for a name that a hub cannot have, when it is not to be had.
    """
    found = Path(resolve(model))
    if found.is_dir():
        return found
    # Imported here: models that are at hand need no hub.
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=list(PATTERNS)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when the model is in the cache, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m target_service.prefetch", description=__doc__)
    parser.add_argument("model", help="a name from `outrider model list`, a folder, or a hub id")
    model = parser.parse_args(arguments).model
    try:
        sys.stdout.write(f"{prefetch(model)}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{model}: {str(error).strip().splitlines()[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
