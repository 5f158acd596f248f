"""The prompt and the prediction of a request as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from outrider.admission.prompt_limits import MAX_MESSAGES, check_bytes, check_tokens
from outrider.admission.text_pool import TextPool
from outrider.errors import InvalidField, NotSupported, PositionOutOfRange, check_most
from outrider.v1 import target_pb2
from outrider.wire.trees import check_token_ids
from target_service.api.template_arguments import template_arguments
from target_service.api.tools import ToolSet
from target_service.api.turns import check_turn, turns_of
from target_service.text.chat_template import Ending
from target_service.text.jobs import EncodeChat, EncodeText, Job
from target_service.text.processes import TextProcess, TextRefused
from target_service.text.tokenizer import SPECIAL_NAMES, ModelTokenizer
from target_service.text.tool_turns import plain_turns

Value = TypeVar("Value")
# Longer texts and conversations wait in their own line, so that short ones pass them.
_LONG_TEXT, _LONG_CHAT = 2048, 16


@dataclass(frozen=True)
class Lines:
    """Where texts wait for their turn: short ones, which pass the others, and long ones, of which a tenant may have so
    many."""

    short: TextPool
    long: TextPool


@dataclass(frozen=True)
class Prompts:
    """Turns text, conversations and token ids into a prompt of 1 to `max_prompt` token ids."""

    # None where only token ids are taken.
    tokenizer: ModelTokenizer | None
    encoder: TextProcess | None
    vocabulary_size: int
    max_prompt: int
    lines: Lines

    async def token_ids(
        self,
        request: target_pb2.GenerateRequest | target_pb2.TokenizeRequest,
        tenant: str,
        tools: ToolSet | None = None,
    ) -> tuple[int, ...]:
        """The prompt of `request`, whose conversation has `tools`. Lengths and counts are checked first.

        Raises `InvalidField`, `QuotaExceeded` where too many long texts wait, `NotSupported` for text without a
        tokenizer or a chat without a template, and `PositionOutOfRange` without room for one more token.
        """
        kind = request.WhichOneof("input")
        special = _set_or(request, "special_tokens", None)
        if isinstance(request, target_pb2.GenerateRequest) and kind == "tokens":
            return self.checked(request.tokens.token_ids, "tokens.token_ids")
        if kind == "text":
            if not request.text:
                raise InvalidField("text", "is empty")
            check_bytes(len(request.text.encode()), self.max_prompt, "text")
            begin = isinstance(request, target_pb2.GenerateRequest) or _set_or(request, "add_special_tokens", True)
            job = EncodeText(request.text, special, begin)
            encoded = await self._run(tenant, len(request.text) > _LONG_TEXT, job, "text")
            return self._fitting(encoded, "text")
        if kind == "chat":
            encoded = await self._chat(request.chat, special, tenant, tools)
            return self._fitting(encoded, "chat.messages")
        raise InvalidField("input", "one of text, chat and tokens must be set")

    async def text(self, token_ids: Sequence[int], tenant: str) -> str:
        """The text of tokens, special ones by their names. Raises `NotSupported` without a tokenizer, `InvalidField`,
        and `PositionOutOfRange` for more tokens than the context has."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise NotSupported("the model has no tokenizer")
        if not token_ids:
            return ""
        known = self.checked(token_ids, "token_ids")
        pool = self.lines.long if len(known) > _LONG_TEXT else self.lines.short
        return await pool.call(tenant, partial(_decoded, tokenizer, known))

    async def prediction(self, request: target_pb2.GenerateRequest, tenant: str) -> tuple[int, ...]:
        """The prediction of `request`, empty without one; at most as long as the context. Raises `InvalidField`,
        `QuotaExceeded` where too many long texts wait, and `NotSupported` for text without a tokenizer."""
        kind, most = request.prediction.WhichOneof("content"), self.max_prompt + 1
        if kind == "tokens":
            field_path, token_ids = "prediction.tokens.token_ids", tuple(request.prediction.tokens.token_ids[:])
        elif kind == "text" and request.prediction.text:
            field_path, text = "prediction.text", request.prediction.text
            # Most bytes of a predicted text for each token of the context.
            check_most(field_path, len(text.encode()), 16 * most, "bytes")
            job = EncodeText(text, special=True, begin=False)
            token_ids = await self._run(tenant, len(text) > _LONG_TEXT, job, field_path)
        else:
            return ()
        if len(token_ids) > most:
            raise InvalidField(field_path, f"has {len(token_ids)} tokens; at most {most} are allowed")
        check_token_ids(token_ids, self.vocabulary_size, field_path)
        return token_ids

    def checked(self, token_ids: Sequence[int], field_path: str) -> tuple[int, ...]:
        """Token ids of a caller, checked against the vocabulary and the context."""
        check_tokens(len(token_ids), self.max_prompt, field_path)
        # A message's list is read in less time as a slice than one by one.
        prompt = tuple(token_ids[:])
        check_token_ids(prompt, self.vocabulary_size, field_path)
        return prompt

    async def _chat(
        self, chat: target_pb2.ChatInput, special: bool | None, tenant: str, tools: ToolSet | None
    ) -> tuple[int, ...]:
        """The conversation in the model's chat template, up to the beginning of the assistant's answer."""
        field_path, count = "chat.messages", len(chat.messages)
        if not count:
            raise InvalidField(field_path, "is empty")
        check_most(field_path, count, MAX_MESSAGES, "messages")
        for i, message in enumerate(chat.messages):
            check_turn(message, f"{field_path}[{i}]")
        size = sum(message.ByteSize() for message in chat.messages)
        check_bytes(size, self.max_prompt, field_path)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise NotSupported("the model has no tokenizer; send tokens")
        if not tokenizer.chat_template:
            raise NotSupported("the model has no chat template; send text or tokens")
        arguments = template_arguments(chat.template_arguments, SPECIAL_NAMES)
        turns, definitions = turns_of(chat), () if tools is None else tools.definitions
        if not tokenizer.reads_tools:
            turns = plain_turns(turns, definitions if tools is not None and tools.callable else ())
            definitions = ()
        size += len(chat.tools.definitions)
        # A template may repeat what it is given, and write JSON on many lines.
        # What a template may make of a conversation, in characters: four times what it is given, some for each message,
        # and a preamble. Chosen; published ones add at most a page.
        most = 4 * size + 1024 * count + 65536
        long = size > _LONG_TEXT or count > _LONG_CHAT
        job = EncodeChat(turns, special, most, _ending(chat), arguments, [*map(dict, definitions)], tenant)
        return await self._run(tenant, long, job, field_path)

    def _fitting(self, prompt: tuple[int, ...], field_path: str) -> tuple[int, ...]:
        check_tokens(len(prompt), self.max_prompt, field_path)
        # A tokenizer may have more tokens than its model, and an id without an embedding would end the engine.
        if max(prompt) >= self.vocabulary_size:
            raise InvalidField(field_path, "has tokens outside the model's vocabulary")
        return prompt

    async def _run(self, tenant: str, long: bool, job: Job, field_path: str) -> tuple[int, ...]:
        """Run `job` in turn, in the line of the `long` ones or that of the others."""
        encoder = self.encoder
        if encoder is None:
            raise NotSupported("the model has no tokenizer; send tokens")
        pool = self.lines.long if long else self.lines.short
        run: Callable[[], list[int]] = partial(encoder.encode, job)
        try:
            return tuple(await pool.call(tenant, run))
        except TextRefused as refused:
            if not str(refused):
                raise PositionOutOfRange(
                    f"{field_path}: in the model's chat template the conversation is longer than the context"
                ) from None
            raise InvalidField(
                "chat.continue_final_message" if refused.continuing else field_path, str(refused)
            ) from None


def _set_or(request: Message, name: str, default: Value) -> Value:
    """An optional field of a request."""
    return getattr(request, name) if request.HasField(name) else default


def _decoded(tokenizer: ModelTokenizer, token_ids: Sequence[int]) -> str:
    text = tokenizer.answer(show_special=True)
    return text.push(token_ids) + text.finish()


def _ending(chat: target_pb2.ChatInput) -> Ending:
    """How the conversation ends. Raises `InvalidField` where two ways are asked for."""
    goes_on = chat.continue_final_message
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not goes_on
    if goes_on and begins:
        raise InvalidField("chat.add_generation_prompt", "must be false with continue_final_message")
    if goes_on:
        return Ending.CONTINUED
    return Ending.ANSWER if begins else Ending.CLOSED
