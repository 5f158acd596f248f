"""How long a prompt may be before anything is made of it: the model's context bounds its tokens, and so its bytes."""

from __future__ import annotations

from outrider.errors import InvalidField, PositionOutOfRange

# Most bytes of text for each token of the context: several times what any language takes, so that a refused text would
# not have fitted. (Long runs of spaces might have.)
BYTES_PER_TOKEN = 32
# Most tokens of a context: no model has a longer one, and tables by position are allocated for all of it.
MOST_CONTEXT = 2**24
# Most messages of a conversation; a template takes several tokens for each.
MAX_MESSAGES = 4096
# Most bytes of what a caller gives to a chat template, as documented in target.proto. Chosen, not measured: templates
# read switches and short texts.
MAX_TEMPLATE_BYTES = 16 * 1024


def check_tokens(count: int, most: int, field_path: str) -> None:
    """Raise `InvalidField` for a prompt without tokens, `PositionOutOfRange` for one of more than `most`."""
    if not count:
        raise InvalidField(field_path, "holds no token")
    if count > most:
        raise PositionOutOfRange(f"{field_path}: the prompt is longer than the context", tokens=count, limit=most)


def check_bytes(size: int, most_tokens: int, field_path: str) -> None:
    """Raise `PositionOutOfRange` for a text of so many bytes that it has more than `most_tokens`."""
    limit = BYTES_PER_TOKEN * most_tokens
    if size > limit:
        raise PositionOutOfRange(
            f"{field_path}: the text is longer than the context of {most_tokens + 1} tokens: it has {size} bytes, and "
            f"more than {limit} are not read"
        )
