"""Text that a grammar forces, as the tokens that come one after the other: behind each of them the mask allows the next
one alone, so none has to be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Texts that are kept, of all forms: a form of seven fields forces some ten. Chosen.
_MOST_FOUND = 4096


class ForcedText:
    """Finds the tokens that are forced at a state of a grammar. For use from any thread."""

    def __init__(self, texts: Sequence[bytes], special: frozenset[int], cut: Callable[[bytes], Sequence[int]]) -> None:
        """`texts` are the bytes of every token but those that are `special`; `cut` gives a text's tokens as the grammar
        is given them."""
        self._texts, self._special, self._cut = texts, special, cut
        # By the token before, the text and the first tokens: a form forces the same texts in every output.
        self._found: dict[tuple[int, bytes, tuple[int, ...]], tuple[int, ...]] = {}

    def behind(self, matcher: LLMatcher, last: int) -> tuple[int, ...]:
        """The tokens that come one after the other behind what a matcher has read, the `last` of which is given, -1 for
        none: each is allowed alone. Those of the text that is forced, up to one behind which that is not certain."""
        forced = tuple(matcher.compute_ff_tokens())
        if not self._special.isdisjoint(forced):
            # Such as one of several that end the output.
            return ()
        if len(forced) < 2:
            return forced
        key = last, matcher.compute_ff_bytes(), forced
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            found = self._found[key] = self._certain(*key)
        return found

    def _certain(self, last: int, text: bytes, forced: tuple[int, ...]) -> tuple[int, ...]:
        """How many of these tokens llguidance forces one by one.

        At every state it cuts the rest of the text anew, with the token before it in front, and leaves out tokens at
        the end which the text behind could change. So the second token may be another when the first has been read. It
        is the same if the rest is cut into the same tokens, those at the end included: what is left out depends on them
        and on the state behind the whole text.
        """
        rest = self._rest(last, text)
        if rest is None or rest[: len(forced)] != forced:
            return forced[:1]
        for count in range(1, len(forced)):
            text = text[len(self._texts[forced[count - 1]]) :]
            if self._rest(forced[count - 1], text) != rest[count:]:
                return forced[:count]
        return forced

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
