"""The prompt and the prediction of a request as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from outrider.admission.prompt_limits import check_bytes, check_messages, check_tokens
from outrider.admission.text_pool import TextPool
from outrider.errors import InvalidField, NotSupported
from outrider.v1 import target_pb2
from outrider.wire.trees import check_token_ids
from target_service.api.template_arguments import template_arguments

ROLES = ("system", "user", "assistant")
# Longer texts and conversations are tokenized in a thread, so that they do not block other streams.
_LONG_TEXT, _LONG_CHAT = 2048, 16
# Most bytes of a predicted text for each token of the context.
_PREDICTED_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class Prompts:
    """Turns text, conversations and token ids into a prompt of 1 to `max_prompt` token ids."""

    # Of transformers, or None where only token ids are taken.
    tokenizer: Any | None
    vocabulary_size: int
    max_prompt: int
    pool: TextPool

    async def token_ids(self, request: target_pb2.GenerateRequest, tenant: str) -> tuple[int, ...]:
        """The prompt of `request`. Lengths and counts are checked first.

        Raises `InvalidField`, `QuotaExceeded` where too many long texts wait, `NotSupported` for text without a
        tokenizer or a chat without a template, and `PositionOutOfRange` without room for one more token.
        """
        kind = request.WhichOneof("input")
        if kind == "tokens":
            return self.checked(request.tokens.token_ids, "tokens.token_ids")
        if kind == "text":
            if not request.text:
                raise InvalidField("text", "is empty")
            check_bytes(len(request.text.encode()), self.max_prompt, "text")
            encoded = await self._run(tenant, len(request.text) > _LONG_TEXT, lambda: self._encode(request.text))
            return self._fitting(encoded, "text")
        if kind == "chat":
            count = len(request.chat.messages)
            check_messages(count, "chat.messages")
            size = sum(len(message.content.encode()) for message in request.chat.messages)
            check_bytes(size, self.max_prompt, "chat.messages")
            long = size > _LONG_TEXT or count > _LONG_CHAT
            encoded = await self._run(tenant, long, lambda: self._encode(self._render(request.chat), special=False))
            return self._fitting(encoded, "chat.messages")
        raise InvalidField("input", "one of text, chat and tokens must be set")

    async def prediction(self, request: target_pb2.GenerateRequest, tenant: str) -> tuple[int, ...]:
        """The prediction of `request`, empty without one; at most as long as the context. Raises `InvalidField`,
        `QuotaExceeded` where too many long texts wait, and `NotSupported` for text without a tokenizer."""
        kind, most = request.prediction.WhichOneof("content"), self.max_prompt + 1
        if kind == "tokens":
            field_path, token_ids = "prediction.tokens.token_ids", tuple(request.prediction.tokens.token_ids)
        elif kind == "text" and request.prediction.text:
            field_path, text = "prediction.text", request.prediction.text
            if len(text.encode()) > _PREDICTED_BYTES_PER_TOKEN * most:
                raise InvalidField(field_path, f"has more than {_PREDICTED_BYTES_PER_TOKEN * most} bytes")
            token_ids = await self._run(tenant, len(text) > _LONG_TEXT, lambda: self._encode(text, special=False))
        else:
            return ()
        if len(token_ids) > most:
            raise InvalidField(field_path, f"has {len(token_ids)} tokens; at most {most} are allowed")
        check_token_ids(token_ids, self.vocabulary_size, field_path)
        return token_ids

    def checked(self, token_ids: Sequence[int], field_path: str) -> tuple[int, ...]:
        """Token ids of a caller, checked against the vocabulary and the context."""
        check_tokens(len(token_ids), self.max_prompt, field_path)
        prompt = tuple(token_ids)
        check_token_ids(prompt, self.vocabulary_size, field_path)
        return prompt

    def _fitting(self, prompt: tuple[int, ...], field_path: str) -> tuple[int, ...]:
        check_tokens(len(prompt), self.max_prompt, field_path)
        # A tokenizer may have more tokens than its model, and an id without an embedding would end the engine.
        if max(prompt) >= self.vocabulary_size:
            raise InvalidField(field_path, "has tokens outside the model's vocabulary")
        return prompt

    async def _run(self, tenant: str, long: bool, work: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Run `work` in a thread if the text is `long`, else here, which is faster."""
        self._need_tokenizer()
        return await self.pool.call(tenant, work) if long else work()

    def _encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return tuple(self._need_tokenizer().encode(text, add_special_tokens=special))

    def _render(self, chat: target_pb2.ChatInput) -> str:
        """The conversation in the model's chat template, up to where the answer begins."""
        if not chat.messages:
            raise InvalidField("chat.messages", "is empty")
        for i, message in enumerate(chat.messages):
            if message.role not in ROLES:
                raise InvalidField(f"chat.messages[{i}].role", f"is not one of {', '.join(ROLES)}")
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise NotSupported("the model has no chat template; send text or tokens")
        turns = [{"role": message.role, "content": message.content} for message in chat.messages]
        goes_on = chat.continue_final_message
        begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not goes_on
        if goes_on and begins:
            raise InvalidField("chat.add_generation_prompt", "must be false with continue_final_message")
        arguments = template_arguments(chat.template_arguments, tokenizer)
        try:
            rendered: str = tokenizer.apply_chat_template(
                turns, add_generation_prompt=begins, continue_final_message=goes_on, tokenize=False, **arguments
            )
        except TemplateError:
            # The template's message may quote the turns.
            raise InvalidField("chat.messages", "the model's chat template does not take these turns") from None
        except ValueError:
            if not goes_on:
                raise
            problem = "the model's chat template does not show the last message as it is"
            raise InvalidField("chat.continue_final_message", problem) from None
        return rendered

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise NotSupported("the model has no tokenizer; send tokens")
        return self.tokenizer
