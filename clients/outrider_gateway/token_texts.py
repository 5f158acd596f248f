"""What tokens are called in answers, by the texts that come with a target's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.sampling import TokenLogprobs
from outrider.tree import VerifiedTree
from outrider_client.results import Chunk, PromptToken

# What /v1/completions lists of tokens.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TokenTexts:
    """Names of the tokens of one request; `token_id:17` from a target without a tokenizer."""

    def __init__(self) -> None:
        self._texts: dict[int, bytes] = {}
        self._special = set[int]()

    def name(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        return f"token_id:{token_id}" if text is None else text.decode(errors="replace")

    def chat(self, chunk: Chunk, hidden: Iterable[int]) -> list[dict[str, Any]]:
        """The chunk's tokens as /v1/chat/completions lists them, but for those in `hidden`, which have no text."""
        self.note(chunk)
        return [
            {**self._entry(token_id, entry.logprob), "top_logprobs": [self._entry(*top) for top in entry.top]}
            for token_id, entry in _visible(chunk, hidden)
        ]

    def completion(self, chunk: Chunk, hidden: Iterable[int], offset: int) -> dict[str, list[Any]]:
        """The same as /v1/completions lists them; `offset` is how much text stood before the first."""
        self.note(chunk)
        lists: dict[str, list[Any]] = {name: [] for name in _LISTS}
        for token_id, entry in _visible(chunk, hidden):
            name = self.name(token_id)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(entry.logprob)
            lists["top_logprobs"].append(self._alternatives(token_id, entry) if entry.top else {})
            lists["text_offset"].append(offset)
            offset += len(name) if token_id in self._texts else 0
        return lists

    def prompt(self, prompt: Sequence[PromptToken], text: str) -> dict[str, list[Any]]:
        """A prompt's tokens as /v1/completions lists them; `text` is the prompt's, as its caller sent it."""
        lists: dict[str, list[Any]] = {name: [] for name in _LISTS}
        offset = 0
        for token in prompt:
            name, entry = self.name(token.token_id), token.logprobs
            lists["tokens"].append(name)
            lists["text_offset"].append(offset)
            lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._alternatives(token.token_id, entry))
            offset += self._width(token.token_id, text, offset)
        return lists

    def prompt_text(self, prompt: Sequence[PromptToken]) -> str:
        """The text of a prompt of token ids, special tokens by their names."""
        return b"".join([self._texts.get(token.token_id, b"") for token in prompt]).decode(errors="replace")

    def prompt_by_id(self, prompt: Sequence[PromptToken]) -> list[dict[str, Any] | None]:
        """A prompt's tokens as vLLM's `prompt_logprobs` lists them: alternatives by id, the token itself among them."""
        listed: list[dict[str, Any] | None] = []
        for token in prompt:
            entry = token.logprobs
            if entry is None:
                listed.append(None)
                continue
            places = {each: (logprob, rank) for rank, (each, logprob) in enumerate(entry.top, start=1)}
            own: dict[int, tuple[float, int | None]] = {token.token_id: (entry.logprob, None)}
            listed.append(
                {
                    str(each): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.name(each)}
                    for each, (logprob, rank) in {**own, **places}.items()
                }
            )
        return listed

    def _alternatives(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """Alternatives by name, and the token itself as others list it. Of several with one name, as parts of a
        character have, the likeliest counts."""
        named: dict[str, float] = {}
        for each, logprob in (*entry.top, (token_id, entry.logprob)):
            named.setdefault(self.name(each), finite(logprob))
        return named

    def _width(self, token_id: int, text: str, offset: int) -> int:
        """How many characters of `text`, from `offset` on, a token of it is."""
        name = self._texts.get(token_id, b"")
        if token_id in self._special and not text.startswith(name.decode(errors="replace"), offset):
            # The tokenizer's own, as the beginning token is.
            return 0
        # Some tokenizers begin a text with a space of their own.
        own_space = offset == 0 and name.startswith(b" ") and not text.startswith(" ")
        # A character counts where its first byte is.
        return sum([byte & 0xC0 != 0x80 for byte in name]) - own_space

    def tree(self, chunk: Chunk, tree: VerifiedTree) -> dict[str, Any]:
        """What the last step verified, and the model's own token behind it; null where the answer ended before it."""
        self.note(chunk)
        own = bool(chunk.token_ids) and not chunk.drafted[-1]
        return {
            "tokens": [self.name(token_id) for token_id in tree.token_ids],
            "parents": list(tree.parents),
            "accepted": list(tree.accepted_rows),
            "next": self.name(chunk.token_ids[-1]) if own else None,
        }

    def note(self, chunk: Chunk) -> None:
        """Note the texts of a chunk's tokens."""
        self._texts.update({token_id: token.text for token_id, token in chunk.token_texts.items()})
        self._special.update([token_id for token_id, token in chunk.token_texts.items() if token.special])

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._texts.get(token_id)
        return {"token": self.name(token_id), "logprob": logprob, "bytes": None if text is None else list(text)}


def finite(logprob: float) -> float:
    """A log-probability as JSON has it: that of an impossible token as vLLM writes it."""
    return max(logprob, -9999.0)


def merged(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """One set of lists from those of several chunks."""
    return {name: [value for part in parts for value in part[name]] for name in _LISTS}


def _visible(chunk: Chunk, hidden: Iterable[int]) -> list[tuple[int, TokenLogprobs]]:
    entries = zip(chunk.token_ids, chunk.logprobs, strict=False)
    return [(token_id, entry) for token_id, entry in entries if token_id not in hidden]


class PromptEcho:
    """What was read of a prompt so far."""

    def __init__(self, texts: TokenTexts, text: str) -> None:
        """`text` is the prompt's as its caller sent it; empty for token ids, and for a chat."""
        self._texts, self._sent = texts, text
        self._tokens: list[PromptToken] = []

    def add(self, chunk: Chunk) -> bool:
        """Whether a chunk is a piece of the prompt, which is added."""
        if not chunk.prompt:
            return False
        self._texts.note(chunk)
        self._tokens += chunk.prompt
        return True

    @property
    def text(self) -> str:
        return self._sent or self._texts.prompt_text(self._tokens)

    def lists(self) -> dict[str, list[Any]]:
        """The tokens as /v1/completions lists them."""
        return self._texts.prompt(self._tokens, self.text)

    def by_id(self) -> list[dict[str, Any] | None]:
        """The tokens as vLLM's `prompt_logprobs` lists them."""
        return self._texts.prompt_by_id(self._tokens)
