"""Where a text ends: at the first stop string, which may contain special tokens, whether the text shows them or not."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Sequence

# Stand for special tokens inside a text: surrogates, which no decoded text has. The last one for those that are in no
# stop string.
_MARK = re.compile("[\ud800-\udfff]")
_FIRST_MARK, _MARKS = 0xD800, 0x400
_OTHER = "\udfff"


class StopStrings:
    """Cuts a text at its first stop string, and holds back an end that may begin one.

    A special token has no text of its own. It matches where a stop string has it, by itself or between other text, and
    is passed over by stop strings without it. So a text ends at the same place whether it shows special tokens or not.
    """

    def __init__(
        self, stop: Sequence[str] = (), special: Sequence[tuple[str, int]] = (), *, shown: Collection[int] = ()
    ) -> None:
        """`special` has texts and ids of special tokens, the longest first; those in `shown` are part of the text."""
        self._names = {token_id: name for name, token_id in special if token_id in shown}
        # By the token's id, the character that stands for it.
        self._marks: dict[int, str] = {}
        # Stop strings as they are searched for, and as they were given.
        self._plain = tuple(stop)
        self._marked: dict[str, str] = {}
        for text in stop:
            if (marked := self._with_marks(text, special)) != text:
                self._marked[marked] = text
        self._written = {mark: self._names.get(token_id, "") for token_id, mark in self._marks.items()}
        # What `_OTHER` stands for, in order, as far as it is not returned yet.
        self._others: deque[str] = deque()
        self._held = ""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to find or to show."""
        return bool(self._plain or self._names)

    def mark(self, token_id: int) -> str:
        """What stands for a token in the text that is pushed next; empty for one that counts for nothing here."""
        if (mark := self._marks.get(token_id)) is not None:
            return mark
        if (name := self._names.get(token_id)) is None:
            return ""
        self._others.append(name)
        return _OTHER

    def push(self, text: str, *, final: bool = False) -> str:
        """Text that is certain once `text`, in which marks stand for special tokens, is added; all of it if `final`.
        Empty after a stop string."""
        if self.matched is not None:
            return ""
        text, self._held = self._held + text, ""
        plain = self._without_marks(text)
        # Where each begins in the text without marks, and in that with them: the first one counts.
        found = [(at, _place(text, at), stop) for stop in self._plain if (at := plain.find(stop)) >= 0]
        for marked, stop in self._marked.items():
            if (at := text.find(marked)) >= 0:
                found.append((len(self._without_marks(text[:at])), at, stop))
        if found:
            _, end, self.matched = min(found)
            return self._shown(text[:end])
        keep = 0 if final else self._may_begin(text, plain)
        self._held = text[len(text) - keep :]
        return self._shown(text[: len(text) - keep])

    def _with_marks(self, text: str, special: Sequence[tuple[str, int]]) -> str:
        """A stop string in which marks stand for special tokens."""
        for name, token_id in special:
            if name in text and len(self._marks) < _MARKS:
                mark = self._marks.setdefault(token_id, chr(_FIRST_MARK + len(self._marks)))
                text = text.replace(name, mark)
        return text

    def _without_marks(self, text: str) -> str:
        return _MARK.sub("", text) if self._marks or self._names else text

    def _shown(self, text: str) -> str:
        """A text with what its marks stand for, where that is shown. Each part of an answer comes here once."""
        if not self._names:
            return self._without_marks(text)
        return _MARK.sub(lambda mark: self._others.popleft() if mark[0] == _OTHER else self._written[mark[0]], text)

    def _may_begin(self, text: str, plain: str) -> int:
        """Length of the longest end of `text` that begins a stop string; `plain` is the same without marks."""
        keep = _longest_beginning(text, self._marked)
        if length := _longest_beginning(plain, self._plain):
            # The same end with the marks in it.
            keep = max(keep, len(text) - _place(text, len(plain) - length))
        return keep


def _place(text: str, at: int) -> int:
    """Where the character stands in `text` that is the one at `at` without marks."""
    for place, character in enumerate(text):
        if not _MARK.match(character):
            if not at:
                return place
            at -= 1
    return len(text)


def _longest_beginning(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
