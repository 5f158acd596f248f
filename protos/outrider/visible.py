"""Text from elsewhere, shown instead of obeyed: a terminal takes commands from what is written to it, a log's reader
takes lines."""

from __future__ import annotations

from collections.abc import Iterable

# Control characters of ASCII and of Latin-1. Among them are the beginnings of every escape sequence: ESC, CSI, OSC.
_CONTROLS = frozenset((*range(0x20), *range(0x7F, 0xA0)))
# What writes text in another order than it is read, and ends that: embeddings, overrides, isolates. Marks of direction
# are left, which Arabic and Hebrew texts need.
_BIDIRECTIONAL = frozenset((*range(0x202A, 0x202F), *range(0x2066, 0x206A)))
# Stand for bytes that were no text, in arguments and names of files; no encoding has them.
_NO_TEXT = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def _escapes(characters: Iterable[int]) -> dict[int, str]:
    """Each character with its escape in Python."""
    return {number: repr(chr(number))[1:-1] for number in characters}


_TERMINAL = _escapes((_CONTROLS | _BIDIRECTIONAL) - {ord("\n"), ord("\t")}) | _NO_TEXT
# U+2028 and U+2029: some readers take them for line breaks.
_LINE = _escapes((_CONTROLS | _BIDIRECTIONAL | {ord("\n"), 0x2028, 0x2029}) - {ord("\t")}) | _NO_TEXT


def visible(text: str) -> str:
    """`text` without anything that a terminal obeys but line breaks and tabs."""
    return text.translate(_TERMINAL)


def one_line(text: str) -> str:
    """`visible`, without line breaks too."""
    return text.translate(_LINE)
