"""Texts and JSON in the terms of llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from target_service.text.tokenizer import ModelTokenizer


def json_of(schema: Mapping[str, Any]) -> str:
    """JSON that matches a schema."""
    # As forms of output: whitespace that is fixed forces most, and a keyword that is not enforced is refused.
    options = {"x-guidance": {"whitespace_flexible": False, "lenient": False}}
    return f"%json {_json({**options, **schema})}"


def literal(text: str, tokenizer: ModelTokenizer) -> str:
    """A text, in which names of special tokens are those tokens."""
    special = special_tokens(tokenizer)
    # A group keeps what it splits by; the longest come first.
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else _json(part) for part in parts if part)


def special_tokens(tokenizer: ModelTokenizer) -> dict[str, int]:
    """The special tokens by their names."""
    return {name: token for token in tokenizer.special_ids if (name := tokenizer.backend.id_to_token(token))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
