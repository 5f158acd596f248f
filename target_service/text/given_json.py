"""JSON that callers and models have written, read so that every template and process can write it again."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.structured_output import TOO_DEEP, is_too_deep


def read_json(text: str) -> Any:
    """The value. Raises `ValueError` for what is no JSON, for characters that UTF-8 does not have, as half of a
    surrogate pair is, and for more levels than a schema may have: whatever writes it calls itself for each."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value
