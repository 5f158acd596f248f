"""What a request wants continued, and what it expects, as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from outrider.errors import InvalidField, NotSupported, PositionOutOfRange
from outrider.v1 import target_pb2
from outrider.wire.trees import check_token_ids

ROLES = ("system", "user", "assistant")
# Longer texts are tokenised in a thread, so that they do not hold up the streams of others.
_LONG_TEXT = 8192
# Bytes of a predicted text for each token of the context: what is longer is not tokenised.
_BYTES_A_TOKEN = 16


class Prompts:
    """Turns text, conversations and token ids into a prompt of 1 to `max_prompt` token ids."""

    def __init__(self, tokenizer: Any | None, vocabulary_size: int, max_prompt: int) -> None:
        """`tokenizer` is a transformers tokenizer, or None where only token ids are taken."""
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._max_prompt = max_prompt

    async def token_ids(self, request: target_pb2.GenerateRequest) -> tuple[int, ...]:
        """The prompt of `request`.

        Raises:
            InvalidField: nothing to continue, an id outside the vocabulary, a role that does not exist.
            NotSupported: text without a tokenizer, a chat without a chat template.
            PositionOutOfRange: longer than the context leaves room for one more token.
        """
        kind = request.WhichOneof("input")
        if kind == "tokens":
            return self.checked(request.tokens.token_ids, "tokens.token_ids")
        if kind == "text":
            if not request.text:
                raise InvalidField("text", "is empty")
            return self._fitting(await self._encode(request.text, special=True), "text")
        if kind == "chat":
            text = self._render(request.chat)
            return self._fitting(await self._encode(text, special=False), "chat.messages")
        raise InvalidField("input", "one of text, chat and tokens must be set")

    async def prediction(self, request: target_pb2.GenerateRequest) -> tuple[int, ...]:
        """The prediction of `request`, empty without one. No longer than the context, which no answer can be.

        Raises:
            InvalidField: too long, or an id outside the vocabulary.
            NotSupported: text without a tokenizer.
        """
        kind, most = request.prediction.WhichOneof("content"), self._max_prompt + 1
        if kind == "tokens":
            field_path, token_ids = "prediction.tokens.token_ids", tuple(request.prediction.tokens.token_ids)
        elif kind == "text" and request.prediction.text:
            field_path, text = "prediction.text", request.prediction.text
            if len(text.encode()) > _BYTES_A_TOKEN * most:
                raise InvalidField(field_path, f"has more than {_BYTES_A_TOKEN * most} bytes")
            token_ids = await self._encode(text, special=False)
        else:
            return ()
        if len(token_ids) > most:
            raise InvalidField(field_path, f"has {len(token_ids)} tokens; at most {most} are allowed")
        check_token_ids(token_ids, self._vocabulary_size, field_path)
        return token_ids

    def checked(self, token_ids: Sequence[int], field_path: str) -> tuple[int, ...]:
        """Token ids from outside, held against the vocabulary and the context."""
        prompt = self._fitting(tuple(token_ids), field_path)
        check_token_ids(prompt, self._vocabulary_size, field_path)
        return prompt

    def _fitting(self, prompt: tuple[int, ...], field_path: str) -> tuple[int, ...]:
        if not prompt:
            raise InvalidField(field_path, "holds no token")
        if len(prompt) > self._max_prompt:
            raise PositionOutOfRange(
                f"{field_path}: the prompt is longer than the context", tokens=len(prompt), limit=self._max_prompt
            )
        return prompt

    async def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self._encode_now, text, special)
        return self._encode_now(text, special)

    def _encode_now(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._need_tokenizer().encode(text, add_special_tokens=special))

    def _render(self, chat: target_pb2.ChatInput) -> str:
        """The conversation through the model's chat template, up to where the assistant begins to speak."""
        if not chat.messages:
            raise InvalidField("chat.messages", "is empty")
        for i, message in enumerate(chat.messages):
            if message.role not in ROLES:
                raise InvalidField(f"chat.messages[{i}].role", f"is not one of {', '.join(ROLES)}")
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise NotSupported("the model has no chat template; send text or tokens")
        turns = [{"role": message.role, "content": message.content} for message in chat.messages]
        try:
            rendered: str = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except TemplateError:
            # What the template says of the turns may quote them.
            raise InvalidField("chat.messages", "the model's chat template does not take these turns") from None
        return rendered

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise NotSupported("the model has no tokenizer; send tokens")
        return self._tokenizer
