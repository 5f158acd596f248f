"""Where an output ends, and how its tokens become text, independent of how they were grouped into steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.sampling import FinishReason, SamplingParams
from target_service.core.sequence import Finish

# What a byte-level tokenizer shows for bytes that do not make a character yet.
_INCOMPLETE = "\ufffd"
# Most tokens held back. A character takes at most four bytes; an output of bytes that never make one must not be held
# back for ever, nor decoded from its start with every token.
_LONGEST_PENDING = 32


class StopStrings:
    """Cuts a text at its first stop string, and holds back an end that may begin one."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, final: bool = False) -> str:
        """Text that is certain once `text` is added; all of it if `final`. Empty after a stop string."""
        if self.matched is not None:
            return ""
        text, self._held = self._held + text, ""
        found = min(((text.find(stop), stop) for stop in self._stop if stop in text), default=None)
        if found is not None:
            self.matched = found[1]
            return text[: found[0]]
        keep = 0 if final else self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """Decodes tokens as they come, and holds back incomplete characters and ends that may begin a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, special: bool = False) -> None:
        """`special` is whether the text has special tokens too."""
        self._tokenizer = tokenizer
        self._special = special
        self._stops = StopStrings(stop)
        self._ids: list[int] = []
        # Tokens before `_prefix` are no longer needed; those up to `_read` are decoded.
        self._prefix = self._read = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now. Empty after a stop string."""
        return "".join([self._push(token) for token in ids])

    def finish(self) -> str:
        """The text still held back, at the end of the output."""
        if self.matched is not None:
            return ""
        text = self._decode(self._prefix)[len(self._decode(self._prefix, self._read)) :]
        self._prefix = self._read = len(self._ids)
        return self._stops.push(text, final=True)

    def _push(self, token: int) -> str:
        if self.matched is not None:
            return ""
        self._ids.append(token)
        whole, known = self._decode(self._prefix), self._decode(self._prefix, self._read)
        uncertain = len(whole) <= len(known) or whole.endswith(_INCOMPLETE)
        if uncertain and len(self._ids) - self._read < _LONGEST_PENDING:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._stops.push(whole[len(known) :])

    def _decode(self, start: int, stop: int | None = None) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=not self._special))


class StopChecker:
    """Decides token by token where one output ends."""

    def __init__(
        self, params: SamplingParams, end_token_ids: Sequence[int], max_tokens: int, tokenizer: Any | None
    ) -> None:
        self._ends = frozenset(() if params.ignore_eos else end_token_ids)
        self._stops = frozenset(params.stop_token_ids)
        self._either = self._ends | self._stops
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._text = Detokenizer(tokenizer, params.stop) if params.stop and tokenizer is not None else None

    def cut(self, length: int, new_ids: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of `new_ids`, which follow `length` others, are kept, and why the output ends there, if it does.
        Call once per commit."""
        goes_on = length + len(new_ids) < self._max_tokens and self._either.isdisjoint(new_ids)
        if goes_on and self._text is None:
            # Nearly all commits.
            return len(new_ids), None
        for count, token in enumerate(new_ids, start=1):
            if length + count > self._min_tokens:
                if token in self._stops:
                    return count, Finish(FinishReason.STOP, stop_token_id=token)
                if token in self._ends:
                    return count, Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=token)
            if self._text is not None:
                self._text.push((token,))
                if self._text.matched is not None:
                    return count, Finish(FinishReason.STOP, stop_string=self._text.matched)
            if length + count >= self._max_tokens:
                return count, Finish(FinishReason.LENGTH)
        return len(new_ids), None
