"""Where a text ends: at the first stop string, which may contain special tokens that the text does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Stand for special tokens inside a text: surrogates, which no decoded text has.
_FIRST_MARK, _MARKS = 0xD800, 0x400


class StopStrings:
    """Cuts a text at its first stop string, and holds back an end that may begin one.

    A special token has no text of its own. It matches where a stop string has it, by itself or between other text, and
    is passed over by stop strings without it.
    """

    def __init__(self, stop: Sequence[str] = (), special: Sequence[tuple[str, int]] = ()) -> None:
        """`special` has texts and ids of special tokens, the longest first."""
        # By the token's id, the character that stands for it.
        self.marks: dict[int, str] = {}
        # Stop strings as they are searched for, and as they were given.
        self._plain = tuple(stop)
        self._marked: dict[str, str] = {}
        for text in stop:
            if (marked := self._with_marks(text, special)) != text:
                self._marked[marked] = text
        self._held = ""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to find."""
        return bool(self._plain)

    def push(self, text: str, *, final: bool = False) -> str:
        """Text that is certain once `text` is added; all of it if `final`. Empty after a stop string. Marks in `text`
        stand for special tokens, and are left out of what is returned."""
        if self.matched is not None:
            return ""
        text, self._held = self._held + text, ""
        shown = self._shown(text)
        found = [(shown.find(stop), stop) for stop in self._plain if stop in shown]
        for marked, stop in self._marked.items():
            if (at := text.find(marked)) >= 0:
                found.append((len(self._shown(text[:at])), stop))
        if found:
            end, self.matched = min(found)
            return shown[:end]
        keep = 0 if final else self._may_begin(text, shown)
        self._held = text[len(text) - keep :]
        return self._shown(text[: len(text) - keep])

    def _with_marks(self, text: str, special: Sequence[tuple[str, int]]) -> str:
        """A stop string in which marks stand for special tokens."""
        for name, token_id in special:
            if name in text and len(self.marks) < _MARKS:
                mark = self.marks.setdefault(token_id, chr(_FIRST_MARK + len(self.marks)))
                text = text.replace(name, mark)
        return text

    def _shown(self, text: str) -> str:
        """A text without marks."""
        if self.marks:
            for mark in self.marks.values():
                text = text.replace(mark, "")
        return text

    def _may_begin(self, text: str, shown: str) -> int:
        """Length of the longest end of `text` that begins a stop string; `shown` is the same without marks."""
        keep = _longest_beginning(text, self._marked)
        plain = _longest_beginning(shown, self._plain)
        if not plain or not self.marks:
            return max(keep, plain)
        # The same end with the marks in it.
        length = plain
        while len(self._shown(text[len(text) - length :])) < plain:
            length += 1
        return max(keep, length)


def _longest_beginning(text: str, stops: Sequence[str] | Mapping[str, str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
