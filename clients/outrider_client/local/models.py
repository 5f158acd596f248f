"""Models on this machine, by way of the target's model store, and their tokenizers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from outrider.errors import UnknownModel
from outrider.model_store import stored_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

# The default of the target's own setting, which cannot be imported here.
DEFAULT_MODEL = "smollm2-135m-instruct"
_TOKENIZER = "tokenizer.json"


class ModelMissing(Exception):
    """The model is not on this machine."""


class Tokenizer(Protocol):
    """The interface used here."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text, without special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""


class _FastTokenizer:
    def __init__(self, path: Path) -> None:
        # Imported here, since it is slow and most commands need no tokenizer.
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(path))

    def encode(self, text: str) -> Sequence[int]:
        token_ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=True)
        return text


def model_path(model: str) -> Path:
    """The folder of a model: a folder itself, or from the model store or the hub's cache. Raises `ModelMissing`."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if "/" in model and "@" not in model:
        return _from_hub_cache(model)
    try:
        return stored_folder(model)
    except UnknownModel as error:
        raise ModelMissing(f"{model} is not on this machine: {error.message}") from None


def _from_hub_cache(hub_id: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, _TOKENIZER)
    if not isinstance(found, str):
        raise ModelMissing(f"{hub_id} is not in the hub's cache on this machine")
    return Path(found).parent


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model or model folder. Raises `ModelMissing`."""
    path = model_path(model) / _TOKENIZER
    if not path.is_file():
        raise ModelMissing(f"{path.parent} has no {_TOKENIZER}")
    return _FastTokenizer(path)


def find_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model or model folder; None where it cannot be loaded."""
    try:
        return load_tokenizer(model)
    except (ModelMissing, OSError, subprocess.SubprocessError):
        return None
