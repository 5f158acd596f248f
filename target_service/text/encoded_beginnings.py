"""Beginnings of conversations as token ids, so that of a next turn only what is new is encoded.

A request repeats all of the conversation before it. To encode 5,500 tokens of it took 7 ms of a CPU
(`benchmarks/results/2026-11-29-cpu-next-turn-host.md`), as long as a GPU takes to read a new turn at 8B size.

A tokenizer cuts a text at added tokens before it does anything else, and encodes what is between them piece by piece.
A piece depends on the others only by whether it begins the text. So ids of a text are those of what stands before such
a token, followed by those of the rest, which that token begins.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Tokenizer

# Shorter texts are encoded as they are. Chosen: that takes half a millisecond.
_SHORT = 2048
# Characters of all texts that are kept. Chosen: with their ids 8 MB of ASCII, 170 conversations of 6,000 tokens.
_MOST_CHARACTERS = 4 << 20


class EncodedBeginnings:
    """Encodes texts, and keeps what each begins with up to its last mark. Belongs to one thread."""

    def __init__(self, encode: Callable[[str], list[int] | None], marks: Iterable[str]) -> None:
        """`encode` is how a text becomes token ids, None where it cannot; `marks` are of `cutting_tokens`."""
        self._encode, self._marks = encode, tuple(marks)
        # By owner and text, the least recently used first.
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._characters = 0

    def encode(self, text: str, owner: str) -> list[int] | None:
        """The ids of a text, of which what the same `owner` had encoded before is not encoded again: nobody can time
        what others have sent. None where `encode` has none for a part of it."""
        if len(text) < _SHORT:
            return self._encode(text)
        cuts, begin, token_ids = self._last_cuts(text), 0, list[int]()
        for cut in cuts:
            kept = self._kept.get((owner, text[:cut]))
            if kept is not None:
                self._kept.move_to_end((owner, text[:cut]))
                begin, token_ids = cut, kept.tolist()
                break
        # A next turn begins with this, and has an answer in place of what follows.
        if cuts and cuts[0] > begin:
            further = self._encode(text[begin : cuts[0]])
            if further is None:
                return None
            begin, token_ids = cuts[0], token_ids + further
            self._keep(owner, text[:begin], token_ids)
        rest = self._encode(text[begin:])
        return None if rest is None else token_ids + rest

    def _last_cuts(self, text: str) -> list[int]:
        """Where the last marks begin, the last one first."""
        found, end = list[int](), len(text)
        # How many of the last marks are looked at. Chosen: a message has two or three, and a turn adds an answer, a
        # message, some results of tools, and the beginning of the next answer.
        while len(found) < 16:
            # Marks do not overlap.
            end = max([text.rfind(mark, 0, end) for mark in self._marks], default=-1)
            if end <= 0:
                break
            found.append(end)
        return found

    def _keep(self, owner: str, text: str, token_ids: list[int]) -> None:
        self._kept[owner, text] = array("i", token_ids)
        self._characters += len(text)
        while self._characters > _MOST_CHARACTERS:
            (_, dropped), _ = self._kept.popitem(last=False)
            self._characters -= len(dropped)


def cutting_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Those of `texts` at whose beginning the tokenizer always cuts: added tokens that it finds in the text as it
    stands, whatever is before them, and whose beginning no other added token can hold behind its own."""
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values() if token.content}
    return [text for text in texts if text in added and _cuts(added[text], added.values())]


def _cuts(mark: AddedToken, added: Iterable[AddedToken]) -> bool:
    text = mark.content
    # What ends before a space may take it, and what ends before a letter may not count as a word.
    if mark.normalized or text[0].isspace() or text[0].isalnum() or text[0] == "_":
        return False
    for token in added:
        other = token.content
        # Found in place of it, with what is before it, or not at all.
        if other.startswith(text) and (token.lstrip or token.single_word):
            return False
        for place in range(1, len(other)):
            if other.startswith(text[: len(other) - place], place):
                return False
    return True
