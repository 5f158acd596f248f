"""The prompt of one answer, as it comes back: its text, and its tokens with their log-probabilities."""

from __future__ import annotations

from typing import Any

from outrider_client.results import Chunk, PromptToken
from outrider_gateway.token_texts import TokenTexts


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
