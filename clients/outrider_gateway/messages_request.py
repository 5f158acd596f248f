"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens as requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.admission.prompt_limits import MOST_CONTEXT, check_bytes
from outrider.admission.tool_limits import MAX_TOOLS
from outrider_client.client import Client
from outrider_client.messages import ChatOptions, ChatTurn
from outrider_client.results import TargetInfo
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, bounded, typed
from outrider_gateway.generation_request import CHAT_NAMES, GenerationRequest, Prompt
from outrider_gateway.messages_input import message_turns
from outrider_gateway.request_fields import MESSAGES_FIELDS
from outrider_gateway.structured import json_form
from outrider_gateway.translation import MAX_UINT32, chat_options, completed, fitting, sampling_params

MESSAGES_NAMES = {**CHAT_NAMES, "stop": "stop_sequences"}
# Of a tool.
_OF_TOOLS = ("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class MessagesRequest(GenerationRequest):
    """A request whose answer is one of Anthropic's messages."""

    @property
    def fields(self) -> Mapping[str, str]:
        form = self.sampling.structured_output
        return MESSAGES_NAMES if form is None else {**MESSAGES_NAMES, **self.form_names(form)}


def messages_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> MessagesRequest:
    """The body of /v1/messages. Raises `Refused`, also for a text that cannot have as few as `max_prompt` tokens."""
    del max_choices
    fields = Fields(body)
    # What the readers of chats would take.
    fields.refuse(MESSAGES_FIELDS, ("n", "prompt_logprobs", "stop", "user", "stream_options"))
    turns, options = _prompt(fields, max_prompt)
    output = fields.inner("output_config") or Fields({}, "output_config")
    form = json_form(output, "format") or json_form(fields, "output_format")
    output.ignore(("effort", "task_budget"))
    output.end()
    longest = fields.whole("max_tokens", 1, MAX_UINT32)
    if longest is None:
        raise BadField("max_tokens", "is missing", "missing_required_parameter")
    metadata = fields.inner("metadata") or Fields({}, "metadata")
    user = metadata.short_text("user_id")
    metadata.end()
    renamed = Fields({"stop": fields.pop("stop_sequences"), "user": user} | fields.rest())
    request = MessagesRequest(True, (Prompt(messages=turns),), sampling_params(renamed, longest, None))
    request = completed(request, renamed, 1, "max_tokens", MESSAGES_FIELDS, form)
    return replace(request, chat_options=options)


@dataclass(frozen=True, slots=True)
class CountCall:
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: tuple[ChatTurn, ...]
    chat_options: ChatOptions
    names: Mapping[str, str] = field(default_factory=lambda: MESSAGES_NAMES)

    async def ask(self, client: Client, info: TargetInfo | None, seconds: float | None) -> dict[str, Any]:
        """See `TargetCall.ask`."""
        del info
        found = await client.tokenize(
            messages=self.messages, chat_options=self.chat_options, model=self.model, timeout=seconds
        )
        return {"input_tokens": len(found.token_ids)}


def count_call(body: Mapping[str, Any], max_prompt: int) -> CountCall:
    """The body of /v1/messages/count_tokens. Raises `Refused`."""
    fields = Fields(body)
    turns, options = _prompt(fields, max_prompt)
    call = CountCall(fields.short_text("model"), turns, options)
    fields.ignore(("output_config",))
    fields.end(MESSAGES_FIELDS)
    return call


def _prompt(fields: Fields, max_prompt: int) -> tuple[tuple[ChatTurn, ...], ChatOptions]:
    """The conversation, and how it is rendered."""
    turns = message_turns(fields.pop("messages"), fields.pop("system"))
    fitting(check_bytes, sum(len(turn.content.encode()) for turn in turns), max_prompt, "messages")
    given = bounded(typed(fields.pop("tools", []), list, "tools"), MAX_TOOLS, "tools")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    choice, single = _choice(fields)
    chat = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": not single}
    chat |= {name: fields.pop(name) for name in ("chat_template_kwargs", "enable_thinking", "thinking")}
    return turns, chat_options(Fields(chat))


def _choice(fields: Fields) -> tuple[Any, bool]:
    """`tool_choice` as chats have it, and whether there may be one call only."""
    chosen = fields.inner("tool_choice")
    if chosen is None:
        return None, False
    kind, name, single = chosen.text("type"), chosen.text("name"), chosen.flag("disable_parallel_tool_use")
    chosen.end()
    if kind == "tool":
        return {"type": "function", "function": {"name": name}}, single
    if kind not in _CHOICES:
        raise BadField(chosen.path("type"), f"must be {', '.join(_CHOICES)} or tool", "invalid_value")
    return _CHOICES[kind], single


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """A tool as chats have it."""
    fields = Fields(typed(tool, dict, path), path)
    if fields.text("type", "custom") != "custom":
        raise BadField(fields.path("type"), "must be custom: this server has no tools of its own", "invalid_value")
    function: dict[str, Any] = {"name": fields.text("name")}
    if description := fields.text("description"):
        function["description"] = description
    if (schema := fields.pop("input_schema")) is not None:
        function["parameters"] = typed(schema, dict, fields.path("input_schema"))
    if fields.flag("strict"):
        function["strict"] = True
    fields.ignore(_OF_TOOLS)
    fields.end()
    return {"type": "function", "function": function}
