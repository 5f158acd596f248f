"""Models on this machine, by way of the target's model store, and their tokenizers."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import UnknownModel
from outrider.model_store import model_source

# The default of the target's own setting, which cannot be imported here.
DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelMissing(Exception):
    """The model is not on this machine."""


class Tokenizer:
    """A model's tokenizer, from its file. It adds no special tokens."""

    def __init__(self, path: Path) -> None:
        # Imported here, since it is slow and most commands need no tokenizer.
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return token_ids


def model_path(model: str) -> Path:
    """The folder of a model: a folder itself, or from the model store or the hub's cache. Raises `ModelMissing`."""
    try:
        folder = Path(model_source(model))
    except UnknownModel as error:
        raise ModelMissing(f"{model} is not on this machine: {error.message}") from None
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "tokenizer.json")
    if not isinstance(found, str):
        raise ModelMissing(f"{model} is not in the hub's cache on this machine")
    return Path(found).parent


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model or model folder. Raises `ModelMissing`."""
    path = model_path(model) / "tokenizer.json"
    if not path.is_file():
        raise ModelMissing(f"{path.parent} has no {path.name}")
    return Tokenizer(path)
