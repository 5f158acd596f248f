"""Text that a grammar forces, as the tokens that come one after the other: behind each of them the mask allows the next
one alone, so none has to be computed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class ForcedText:
    """Finds the tokens that are forced at a state of a grammar. For use from any thread.

    At every state llguidance cuts the text that is forced into tokens, with the token before it in front, and leaves
    out those at the end which the text behind could change, as their last bytes begin a longer token that may come. So
    the tokens are the same wherever the same text follows the same token, but for those at the end; and the second one
    may be another when the first has been read, as the rest is then cut anew.
    """

    def __init__(self, texts: Sequence[bytes], special: frozenset[int], cut: Callable[[bytes], Sequence[int]]) -> None:
        """`texts` are the bytes of every token but those that are `special`; `cut` gives a text's tokens as the grammar
        is given them."""
        self._texts, self._special, self._cut = texts, special, cut
        self._sorted = sorted({text for token, text in enumerate(texts) if token not in special})
        # By the token before and the text.
        self._found: dict[tuple[int, bytes], tuple[int, ...]] = {}

    def behind(self, matcher: LLMatcher, last: int) -> tuple[int, ...] | None:
        """The tokens that come one after the other behind what a matcher has read, the `last` of which is given, -1 for
        none: each is allowed alone. Those of the text that is forced, up to one of which that depends on more; None
        where no text is forced."""
        text = matcher.compute_ff_bytes()
        if not text:
            return None
        found = self._found.get((last, text))
        if found is None:
            # Of all forms: one of seven fields forces some ten texts. Chosen.
            if len(self._found) >= 4096:
                self._found.clear()
            found = self._found[last, text] = self._certain(last, text, tuple(matcher.compute_ff_tokens()))
        return found

    def _certain(self, last: int, text: bytes, forced: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the tokens that are `forced` at one state which are so, one by one, wherever this text follows the
        last token."""
        rest = self._rest(last, text)
        if rest is None or rest[: len(forced)] != forced or not self._special.isdisjoint(rest):
            return ()
        # Bytes that no text behind can change.
        sure = next((place for place in range(len(text)) if self._begins_longer_token(text[place:])), len(text))
        end = 0
        for count, token in enumerate(rest):
            before = end
            end += len(self._texts[token])
            if end > sure or (count and self._rest(rest[count - 1], text[before:]) != rest[count:]):
                return forced[:count]
        return forced

    def _begins_longer_token(self, text: bytes) -> bool:
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def _rest(self, last: int, text: bytes) -> tuple[int, ...] | None:
        """A text's tokens behind a token; None where a character is cut, which llguidance does otherwise."""
        before = self._texts[last] if last >= 0 else b""
        try:
            (before + text).decode()
            text.decode()
        except UnicodeDecodeError:
            return None
        tokens = tuple(self._cut(before + text))
        return tokens[1:] if before and tokens[:1] == (last,) else tuple(self._cut(text))
