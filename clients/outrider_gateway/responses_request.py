"""The body of /v1/responses as a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.admission.prompt_limits import MOST_CONTEXT, check_bytes
from outrider.admission.tool_limits import MAX_TOOLS
from outrider.sampling import MAX_LOGPROBS
from outrider_client.messages import ChatTurn
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, bounded, json_bytes, typed
from outrider_gateway.generation_request import CHAT_NAMES, GenerationRequest, Prompt
from outrider_gateway.request_fields import RESPONSES_FIELDS
from outrider_gateway.responses_input import input_turns, joined_turns
from outrider_gateway.structured import json_form, structured_output
from outrider_gateway.translation import MAX_UINT32, chat_options, completed, fitting, sampling_params

# What this endpoint calls the contract's fields.
RESPONSES_NAMES = {
    **CHAT_NAMES,
    "input": "input",
    "chat.messages": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}
# Of OpenAI's: a conversation has no more.
_MOST_INCLUDED, _MOST_METADATA = 32, 16
# Characters of an entry's name and its value, of OpenAI's too.
_MOST_NAME, _MOST_VALUE = 64, 512


@dataclass(frozen=True, slots=True)
class ResponsesRequest(GenerationRequest):
    """A request whose answer is a response. `instructions` stand before the conversation, of which `turns` are new and
    the others those of the response `previous`; `store` is whether the response is kept for such requests. `shown` are
    the settings that the response repeats."""

    instructions: str = ""
    turns: tuple[ChatTurn, ...] = ()
    previous: str = ""
    store: bool = True
    shown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> Mapping[str, str]:
        form = self.sampling.structured_output
        return RESPONSES_NAMES if form is None else {**RESPONSES_NAMES, **self.form_names(form)}

    def continuing(self, before: tuple[ChatTurn, ...]) -> ResponsesRequest:
        """The request behind an earlier conversation."""
        return self._with(joined_turns(before, self.turns))

    def _with(self, turns: tuple[ChatTurn, ...]) -> ResponsesRequest:
        system = (ChatTurn("system", self.instructions),) if self.instructions else ()
        return replace(self, turns=turns, prompts=(Prompt(messages=joined_turns(system, turns)),))


def responses_request(body: Mapping[str, Any], max_choices: int, max_prompt: int = MOST_CONTEXT) -> ResponsesRequest:
    """The body of /v1/responses. Raises `Refused`, also for a text that cannot have as few as `max_prompt` tokens."""
    del max_choices
    fields = Fields(body)
    # What the readers of chats would take.
    fields.refuse(RESPONSES_FIELDS, ("n", "prompt_logprobs", "response_format"))
    turns = input_turns(fields.pop("input"))
    instructions = fields.text("instructions")
    size = sum(len(turn.content.encode()) for turn in turns) + len(instructions.encode())
    fitting(check_bytes, size, max_prompt, "input")
    text = fields.inner("text") or Fields({}, "text")
    form, verbosity = json_form(text, "format"), text.pop("verbosity")
    text.end()
    other = structured_output(fields)
    if form is not None and other is not None:
        raise BadField(other[1], f"is one form too many beside {form[1]}", "invalid_value")
    reasoning = fields.inner("reasoning") or Fields({}, "reasoning")
    effort = reasoning.pop("effort")
    # Reasoning is shown as it is.
    reasoning.ignore(("summary", "generate_summary"))
    reasoning.end()
    options = chat_options(_chat_fields(fields, verbosity, effort))
    include = bounded(typed(fields.pop("include", []), list, "include"), _MOST_INCLUDED, "include")
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    # Other things that may be included are of tools that are not here.
    logprobs = (top or 0) if "message.output_text.logprobs" in include or top else None
    sampling = sampling_params(fields, fields.whole("max_output_tokens", 1, MAX_UINT32), logprobs)
    request = ResponsesRequest(
        True,
        (Prompt(messages=turns),),
        sampling,
        logprobs=logprobs is not None,
        chat_options=options,
        instructions=instructions,
        turns=turns,
        previous=fields.short_text("previous_response_id"),
        store=fields.flag("store", True),
        shown=_shown(fields, body),
    )
    return completed(request, fields, 1, "max_output_tokens", RESPONSES_FIELDS, form or other)._with(turns)


def _chat_fields(fields: Fields, verbosity: Any, effort: Any) -> Fields:
    """What shapes the prompt, under the names that /v1/chat/completions has for it."""
    given = bounded(typed(fields.pop("tools", []), list, "tools"), MAX_TOOLS, "tools")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    choice = fields.pop("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        allowed = {name: value for name, value in choice.items() if name != "type"}
        if isinstance(tools_of := allowed.get("tools"), list):
            allowed["tools"] = [_named(tool) for tool in bounded(tools_of, MAX_TOOLS, "tool_choice.tools")]
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    choice = _named(choice)
    moved = ("chat_template_kwargs", "parallel_tool_calls", "enable_thinking")
    return Fields(
        {name: fields.pop(name) for name in moved}
        | {"tools": tools, "tool_choice": choice, "verbosity": verbosity, "reasoning_effort": effort}
    )


def _named(choice: Any) -> Any:
    """A function that is chosen, as chats have it."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {name: each for name, each in choice.items() if name != "type"}}
    return choice


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """A tool as chats have it: there the function is an object of its own."""
    definition = dict(typed(tool, dict, path))
    kind = definition.pop("type", None)
    return {"type": kind, "function": {name: value for name, value in definition.items() if value is not None}}


def _metadata(value: Any) -> dict[str, str]:
    """What comes back with a response, and is kept with it."""
    metadata: dict[str, str] = bounded(typed(value, dict, "metadata"), _MOST_METADATA, "metadata")
    for name, text in metadata.items():
        path = f"metadata.{name[:_MOST_NAME]}"
        if len(name) > _MOST_NAME or len(typed(text, str, path)) > _MOST_VALUE:
            raise BadField(
                path,
                f"has more than {_MOST_NAME} characters in its name or {_MOST_VALUE} in its value",
                "invalid_value",
            )
    return metadata


def _shown(fields: Fields, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that a response repeats, with the values that are in force."""
    metadata = _metadata(fields.pop("metadata", {}))
    if fields.text("truncation", "disabled") not in ("disabled", "auto"):
        raise BadField("truncation", "must be auto or disabled", "invalid_value")
    # They stand deeper in a response and its events than in the body, and JSON is written to a limited depth.
    json_bytes([[[[body.get("tools")]]]], "tools")
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    given = {name: value for name, value in body.items() if value is not None}
    return {
        "instructions": given.get("instructions"),
        "tools": given.get("tools", []),
        "tool_choice": given.get("tool_choice", "auto"),
        "truncation": "disabled",
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "top_p": given.get("top_p", 1.0),
        "presence_penalty": given.get("presence_penalty", 0.0),
        "frequency_penalty": given.get("frequency_penalty", 0.0),
        "top_logprobs": given.get("top_logprobs", 0),
        "temperature": given.get("temperature", 1.0),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": None,
        "store": given.get("store", True),
        "background": False,
        "service_tier": "default",
        "metadata": metadata,
        "safety_identifier": given.get("safety_identifier"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "user": given.get("user"),
    }
