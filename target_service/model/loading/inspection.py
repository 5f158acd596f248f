"""What a model's folder holds and whether it can be served, by its file names and config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# Bytes of an element in the dtype in which models are served by default.
_HALF = 2
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Inspected:
    """A folder with a model."""

    architecture: str  # the class that config.json names
    size: int  # bytes of all files
    refusal: str  # why it cannot be served; empty when it can by its configuration. Loading checks the weights too
    form: str = ""  # what is cached of a model with latents; else empty

    @property
    def verdict(self) -> str:
        """Whether it can be served, and in which form or why not."""
        if self.refusal:
            return f"cannot be served: {self.refusal}"
        return f"can be served, {self.form}" if self.form else "can be served"

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.architecture, in_words(self.size), self.verdict)))


def inspect(folder: Path) -> Inspected:
    """Inspect a folder. Loads only its configuration."""
    refusal = refusal_of(folder) or missing_weights(folder)
    # Links are followed.
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Inspected(_architecture(folder), size, refusal, "" if refusal else _form(folder))


def refusal_of(folder: Path) -> str:
    """Why the model that config.json describes cannot be served, in one line; empty when it can."""
    # Here, since the import takes seconds and most commands of the store do without.
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from target_service.model.support import ModelRefused, check_supported

    if not (folder / "config.json").is_file():
        return "it has no config.json"
    try:
        # The model's own code is not run, and transformers does not prompt for it.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_supported(config)
    except ModelRefused as refused:
        return str(refused)
    # A foreign configuration may make it raise anything, which is the reason.
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "").partition(". ")[0]
        return first or type(error).__name__
    architecture = _architecture(folder)
    if architecture and architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return f"{architecture} is no causal language model of transformers"
    return ""


def _form(folder: Path) -> str:
    """What the KV cache keeps of a model whose attention is over latents; empty for others."""
    from transformers import AutoConfig

    from target_service.model.support import has_latents, kv_bytes

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not has_latents(config):
        return ""
    return f"latents in the cache, {kv_bytes(config, _HALF, latent=True):,} bytes a token in 16 bits"


def missing_weights(folder: Path) -> str:
    """Which weights are missing in `folder`, in one line; empty when none are."""
    index = folder / _INDEX
    if not index.is_file():
        return "" if any(folder.glob("*.safetensors")) else "it has no weights as safetensors"
    try:
        indexed = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_INDEX} cannot be read"
    missing = sum(not (folder / name).is_file() for name in indexed)
    return f"{missing} of {len(indexed)} files of weights are missing" if missing else ""


def in_words(size: int) -> str:
    """A number of bytes in GB or MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _architecture(folder: Path) -> str:
    """The class that config.json names; empty where it names none."""
    try:
        return str(json.loads((folder / "config.json").read_text())["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
