"""What tokens are called in answers, by the texts that come with a target's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.sampling import TokenLogprobs
from outrider.tree import VerifiedTree
from outrider_client.results import Chunk
from outrider_client.terminal.painting import Painter

# What /v1/completions lists of tokens.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TokenTexts:
    """Names of the tokens of one request; `token_id:17` from a target without a tokenizer."""

    def __init__(self) -> None:
        self._texts: dict[int, bytes] = {}

    def name(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        return f"token_id:{token_id}" if text is None else text.decode(errors="replace")

    def chat(self, chunk: Chunk, hidden: Iterable[int]) -> list[dict[str, Any]]:
        """The chunk's tokens as /v1/chat/completions lists them, but for those in `hidden`, which have no text."""
        self._add(chunk)
        return [
            {**self._entry(token_id, entry.logprob), "top_logprobs": [self._entry(*top) for top in entry.top]}
            for token_id, entry in _visible(chunk, hidden)
        ]

    def completion(self, chunk: Chunk, hidden: Iterable[int], offset: int) -> dict[str, list[Any]]:
        """The same as /v1/completions lists them; `offset` is how much text stood before the first."""
        self._add(chunk)
        lists: dict[str, list[Any]] = {name: [] for name in _LISTS}
        for token_id, entry in _visible(chunk, hidden):
            name = self.name(token_id)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(entry.logprob)
            lists["top_logprobs"].append({self.name(top): logprob for top, logprob in entry.top})
            lists["text_offset"].append(offset)
            offset += len(name) if token_id in self._texts else 0
        return lists

    def tree(self, chunk: Chunk, tree: VerifiedTree) -> dict[str, Any]:
        """What the last step verified, and the model's own token behind it; null where the answer ended before it."""
        self._add(chunk)
        own = bool(chunk.token_ids) and not chunk.drafted[-1]
        return {
            "tokens": [self.name(token_id) for token_id in tree.token_ids],
            "parents": list(tree.parents),
            "accepted": list(tree.accepted_rows),
            "next": self.name(chunk.token_ids[-1]) if own else None,
        }

    def pieces(self) -> Painter:
        """For telling drafted text from the model's own, in one answer."""
        return Painter()

    def _add(self, chunk: Chunk) -> None:
        self._texts.update({token_id: token.text for token_id, token in chunk.token_texts.items()})

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._texts.get(token_id)
        return {"token": self.name(token_id), "logprob": logprob, "bytes": None if text is None else list(text)}


def merged(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """One set of lists from those of several chunks."""
    return {name: [value for part in parts for value in part[name]] for name in _LISTS}


def _visible(chunk: Chunk, hidden: Iterable[int]) -> list[tuple[int, TokenLogprobs]]:
    entries = zip(chunk.token_ids, chunk.logprobs, strict=False)
    return [(token_id, entry) for token_id, entry in entries if token_id not in hidden]
