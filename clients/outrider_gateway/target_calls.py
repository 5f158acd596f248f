"""Endpoints that ask a target something else than to generate: /tokenize and /detokenize, by vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from outrider.admission.prompt_limits import check_bytes, check_tokens
from outrider.errors import OutriderError
from outrider_client.client import Client
from outrider_client.failures import AWAY, ServiceUnreachable
from outrider_client.messages import ChatOptions, ChatTurn
from outrider_client.results import TargetInfo
from outrider_gateway.bodies import DetokenizeFields, TemplateFields, TokenId, TokenizeFields
from outrider_gateway.chat_messages import chat_turns
from outrider_gateway.dispatch import seconds_left
from outrider_gateway.endpoint import Endpoint, HttpCall
from outrider_gateway.failures import BadField, refusal
from outrider_gateway.fields import Fields, converted
from outrider_gateway.generation_request import CHAT_NAMES, COMPLETION_NAMES
from outrider_gateway.http import while_connected
from outrider_gateway.request_fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from outrider_gateway.targets import Target
from outrider_gateway.translation import chat_options, fitting, unsplit


class TargetCall(Protocol):
    """What a target is asked."""

    @property
    def model(self) -> str:
        """A served name, or nothing for any."""

    @property
    def names(self) -> Mapping[str, str]:
        """The body's names of the contract's fields."""

    async def ask(self, client: Client, info: TargetInfo | None, seconds: float | None) -> dict[str, Any]:
        """The answer as JSON. Raises what the client's calls do."""


@dataclass
class CallEndpoint(Endpoint):
    """An endpoint whose answer is one call to a target. `translate` makes the call from a body, for so many token ids
    in a prompt."""

    _translate: Callable[[Mapping[str, Any], int], TargetCall]

    async def _serve(self, call: HttpCall) -> None:
        most = self._models.longest_prompt
        asked, _ = await self._read(call, lambda body: self._translate(body, most))
        with self._admission.answers(call.holder, 1):
            async with while_connected(call.receive):
                try:
                    answer = await self._ask(call, asked)
                except (OutriderError, ServiceUnreachable) as error:
                    raise refusal(error, asked.names) from error
        await call.writer.whole(answer)

    async def _ask(self, call: HttpCall, asked: TargetCall) -> dict[str, Any]:
        """The answer of the first target that gives one."""
        tried = list[Target]()
        while True:
            target = self._targets.pick(call.caller.key(""), asked.model, tried)
            client = target.client.acting_for(token=call.caller.token, tenant=call.caller.tenant)
            try:
                return await asked.ask(client, target.info, seconds_left(call.arrived, self._config.request_seconds))
            except AWAY as error:
                target.leave_out(error)
                tried.append(target)
                if len(tried) == len(self._targets.all):
                    raise


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """The body of /tokenize: a text, or messages."""

    model: str
    text: str = ""
    messages: tuple[ChatTurn, ...] = ()
    chat_options: ChatOptions = field(default_factory=ChatOptions)
    add_special_tokens: bool = True
    special_tokens: bool | None = None
    strings: bool = False

    @property
    def names(self) -> Mapping[str, str]:
        return COMPLETION_NAMES if self.text else CHAT_NAMES

    async def ask(self, client: Client, info: TargetInfo | None, seconds: float | None) -> dict[str, Any]:
        found = await client.tokenize(
            self.text,
            messages=self.messages,
            chat_options=self.chat_options,
            add_special_tokens=self.add_special_tokens,
            special_tokens=self.special_tokens,
            token_texts=self.strings,
            model=self.model,
            timeout=seconds,
        )
        texts = {token_id: text.text.decode(errors="replace") for token_id, text in found.token_texts.items()}
        return {
            "count": len(found.token_ids),
            "max_model_len": None if info is None else info.max_context,
            "tokens": found.token_ids,
            "token_strs": [texts.get(token_id, "") for token_id in found.token_ids] if self.strings else None,
        }


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    """The body of /detokenize."""

    model: str
    token_ids: tuple[int, ...]

    @property
    def names(self) -> Mapping[str, str]:
        return {"input": "tokens", "token_ids": "tokens"}

    async def ask(self, client: Client, info: TargetInfo | None, seconds: float | None) -> dict[str, Any]:
        del info
        return {"prompt": await client.detokenize(self.token_ids, model=self.model, timeout=seconds)}


def tokenize_call(body: Mapping[str, Any], max_prompt: int) -> TokenizeCall:
    """The body of /tokenize. Raises `Refused`."""
    fields = Fields(body)
    asked = fields.read(TokenizeFields)
    if (asked.prompt is None) is (asked.messages is None):
        raise BadField("prompt", "is needed, or else messages", "missing_required_parameter")
    common = partial(
        TokenizeCall, asked.model, strings=asked.return_token_strs, special_tokens=unsplit(asked.split_special_tokens)
    )
    if asked.prompt is not None:
        if not asked.prompt:
            raise BadField("prompt", "is empty", "invalid_value")
        fitting(check_bytes, len(asked.prompt.encode()), max_prompt, "prompt")
        call = common(text=asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    else:
        if asked.add_special_tokens:
            raise BadField("add_special_tokens", "is for prompt: the chat template decides", "unsupported_parameter")
        turns = chat_turns(asked.messages)
        fitting(check_bytes, sum(len(turn.content.encode()) for turn in turns), max_prompt, "messages")
        call = common(messages=turns, chat_options=chat_options(fields.read(TemplateFields)))
    fields.end(TOKENIZE_FIELDS)
    return call


def detokenize_call(body: Mapping[str, Any], max_prompt: int) -> DetokenizeCall:
    """The body of /detokenize. Raises `Refused`."""
    fields = Fields(body)
    asked = fields.read(DetokenizeFields)
    if asked.tokens:
        fitting(check_tokens, len(asked.tokens), max_prompt, "tokens")
    call = DetokenizeCall(asked.model, converted(asked.tokens, tuple[TokenId, ...], "tokens"))
    fields.end(DETOKENIZE_FIELDS)
    return call
