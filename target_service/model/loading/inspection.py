"""What a model's folder holds and whether it can be served, by config.json and the headers of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.checkpoints.folder import Checkpoint, read_config
from outrider.checkpoints.formats import DEQUANTISED_FORMATS
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.checkpoints.regular_files import read_json_object


@dataclass(frozen=True, slots=True)
class Inspected:
    """A folder with a model."""

    architecture: str  # the class that config.json names
    size: int  # bytes of all files
    refusal: str  # why it cannot be served; empty when it can by its configuration and headers. Loading checks more
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
    """Inspect a folder. No tensor is read."""
    refusal = refusal_of(folder) or _refusal_of_weights(folder)
    # Links are followed.
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Inspected(_architecture(folder), size, refusal, "" if refusal else _form(folder))


def refusal_of(folder: Path) -> str:
    """Why the model that config.json describes cannot be served, in one line; empty when it can."""
    # Here, since the import takes seconds and most commands of the store do without.
    from outrider.checkpoints.causal_lm import read_configuration
    from outrider.checkpoints.causal_lm_names import causal_lm_names
    from target_service.model.support import check_supported, text_part

    try:
        read_config(folder, DEQUANTISED_FORMATS)
        config = read_configuration(folder)
        check_supported(config)
    # Of both kinds: not whole, or not served.
    except ValueError as refused:
        return str(refused)
    if text_part(config) is not config:
        # Named after all that it takes; its part for text is one of our layers' families.
        return ""
    architecture = _architecture(folder)
    if config.model_type not in causal_lm_names():
        return f"{architecture or config.model_type} is no causal language model of transformers"
    return ""


def _refusal_of_weights(folder: Path) -> str:
    try:
        Checkpoint.of_folder(folder, DEQUANTISED_FORMATS)
    except CheckpointRefused as refused:
        return str(refused)
    return ""


def _form(folder: Path) -> str:
    """What the KV cache keeps of a model whose attention is over latents; empty for others."""
    from outrider.checkpoints.causal_lm import read_configuration
    from target_service.model.support import has_latents, kv_bytes

    config = read_configuration(folder)
    if not has_latents(config):
        return ""
    # Bytes of an element in the dtype in which models are served by default.
    return f"latents in the cache, {kv_bytes(config, 2, latent=True):,} bytes a token in 16 bits"


def in_words(size: int) -> str:
    """A number of bytes in GB or MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _architecture(folder: Path) -> str:
    """The class that config.json names; empty where it names none."""
    try:
        return str(read_json_object(folder / "config.json")["architectures"][0])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
