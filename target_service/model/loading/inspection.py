"""What a model's folder holds, and whether it can be served, from its files' names and its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Inspected:
    """A folder with a model. `refusal` says why it cannot be served, and is empty when it can be as far as its
    configuration tells; loading looks at the weights too."""

    architecture: str
    size: int
    refusal: str

    def __str__(self) -> str:
        verdict = f"cannot be served: {self.refusal}" if self.refusal else "can be served"
        return ", ".join(filter(None, (self.architecture, in_words(self.size), verdict)))


def inspect(folder: Path) -> Inspected:
    """Look at a folder. Nothing is loaded but its configuration."""
    return Inspected(_architecture(folder), size_of(folder), refusal_of(folder) or missing_weights(folder))


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`, of those that links lead to."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def refusal_of(folder: Path) -> str:
    """Why the model that config.json describes cannot be served, in a line; empty when it can."""
    # Here, since it takes seconds to import and most of what is asked of a store needs none of it.
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from target_service.model.support import ModelRefused, check_supported

    if not (folder / "config.json").is_file():
        return "it has no config.json"
    try:
        # Its own code is not run, and nobody is asked whether it should be.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_supported(config)
    except ModelRefused as refused:
        return str(refused)
    # Whatever a stranger's configuration makes it raise is why it cannot be served.
    except Exception as error:
        return _first_sentence(str(error)) or type(error).__name__
    architecture = _architecture(folder)
    if architecture and architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return f"{architecture} is no causal language model that transformers knows"
    return ""


def missing_weights(folder: Path) -> str:
    """What of its weights is not in `folder`, in a line; empty when all are."""
    index = folder / _INDEX
    if not index.is_file():
        return "" if any(folder.glob("*.safetensors")) else "it has no weights as safetensors"
    try:
        wanted = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_INDEX} cannot be read"
    missing = sum(not (folder / name).is_file() for name in wanted)
    return f"{missing} of {len(wanted)} files of weights are missing" if missing else ""


def in_words(size: int) -> str:
    """A number of bytes as people write it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _architecture(folder: Path) -> str:
    """The class that config.json names; empty where it names none."""
    try:
        named = json.loads((folder / "config.json").read_text())["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    return str(named)


def _first_sentence(text: str) -> str:
    return next(iter(text.strip().splitlines()), "").partition(". ")[0]
