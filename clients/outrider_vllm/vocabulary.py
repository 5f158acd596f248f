"""Which tokenizer vLLM's model has: a draft that was made for another one is refused, as a target refuses it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from outrider.heads import tokenizer_fingerprint

logger = logging.getLogger(__name__)


def model_fingerprint(model_config: Any) -> str:
    """The fingerprint of the tokenizer of vLLM's model, by its files in a folder or in the hub's cache. Empty, which
    refuses no draft, where it cannot be read; that is logged."""
    named = str(getattr(model_config, "tokenizer", None) or "")
    folder = _folder(named, getattr(model_config, "tokenizer_revision", None))
    if folder is None:
        return ""
    try:
        from outrider.checkpoints.tokenizer_files import read_tokenizer

        return tokenizer_fingerprint(read_tokenizer(folder))
    # A tokenizer of vLLM's own kinds, or a library that is not there: it drafts without this check.
    except Exception as error:
        logger.warning("whether drafts are for the tokenizer %s is not checked: %s", named, error)
        return ""


def _folder(named: str, revision: str | None) -> Path | None:
    if not named:
        return None
    if Path(named).is_dir():
        return Path(named)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(named, "tokenizer.json", revision=revision)
    # No name of a hub, say.
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None
