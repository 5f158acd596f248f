"""Protobuf's wire format by hand, for messages that are made thousands of times a second: a message as an object costs
several times as much as its bytes."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.descriptor import Descriptor

# Of wire types, that of numbers and that of texts, bytes and messages.
_NUMBER, _SIZED = 0, 2


# Numbers whose encodings are kept: those of tokens and steps come again and again.
@lru_cache(1 << 16)
def varint(number: int) -> bytes:
    """A number that is not negative."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


def sized(tag: bytes, content: bytes) -> bytes:
    """A field of a text, of bytes, of a message or of packed numbers."""
    return tag + varint(len(content)) + content


def number_tag(message: Descriptor, field: str) -> bytes:
    """What begins a field of a number that is not repeated."""
    return varint(message.fields_by_name[field].number << 3 | _NUMBER)


def sized_tag(message: Descriptor, field: str) -> bytes:
    """What begins a field of a text, of bytes, of a message, or of numbers that are repeated."""
    return varint(message.fields_by_name[field].number << 3 | _SIZED)
