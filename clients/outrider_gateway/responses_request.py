"""The body of /v1/responses as a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from outrider.admission.prompt_limits import MOST_CONTEXT, check_bytes
from outrider_client.messages import ChatTurn
from outrider_gateway.bodies import GenerationFields, Object, ResponsesFields, TemplateFields, Tools
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, Fields, converted, json_bytes, read_object
from outrider_gateway.generation_request import CHAT_NAMES, GenerationRequest, Prompt
from outrider_gateway.request_fields import RESPONSES_FIELDS
from outrider_gateway.responses_input import input_turns, joined_turns
from outrider_gateway.structured import json_form, structured_output
from outrider_gateway.translation import chat_options, completed, fitting, sampling_params

# What this endpoint calls the contract's fields.
RESPONSES_NAMES = {
    **CHAT_NAMES,
    "input": "input",
    "chat.messages": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}
# Characters of the name and the value of an entry of metadata, as at OpenAI.
_MOST_NAME, _MOST_VALUE = 64, 512


class TextOptions(BodyObject):
    """`text`."""

    format: Any = None
    verbosity: Any = None


class ReasoningOptions(BodyObject):
    """`reasoning`, which is shown as it is."""

    ignored: ClassVar[tuple[str, ...]] = ("summary", "generate_summary")
    effort: Any = None


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
    fields.refuse(RESPONSES_FIELDS, GenerationFields)
    asked, given = fields.read(ResponsesFields), fields.read(GenerationFields)
    turns = input_turns(asked.input)
    size = sum(len(turn.content.encode()) for turn in turns) + len(asked.instructions.encode())
    fitting(check_bytes, size, max_prompt, "input")
    text = read_object(TextOptions, asked.text, "text")
    form, other = json_form(text.format, "text.format"), structured_output(given)
    if form is not None and other is not None:
        raise BadField(other[1], f"is one form too many beside {form[1]}", "invalid_value")
    template = TemplateFields(
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools)],
        tool_choice=_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        chat_template_kwargs=asked.chat_template_kwargs,
        enable_thinking=asked.enable_thinking,
        reasoning_effort=read_object(ReasoningOptions, asked.reasoning, "reasoning").effort,
        verbosity=text.verbosity,
    )
    # Other things that may be included are of tools that are not here.
    listed = bool(asked.top_logprobs) or "message.output_text.logprobs" in asked.include
    request = ResponsesRequest(
        True,
        (Prompt(messages=turns),),
        sampling_params(given, asked.max_output_tokens, asked.top_logprobs if listed else None),
        logprobs=listed,
        chat_options=chat_options(template),
        instructions=asked.instructions,
        turns=turns,
        previous=asked.previous_response_id,
        store=asked.store,
        shown=_shown(_metadata(asked.metadata), body),
        fields=RESPONSES_NAMES,
    )
    return completed(request, given, fields, 1, "max_output_tokens", RESPONSES_FIELDS, form or other)._with(turns)


def _tool_choice(choice: str | Object | None) -> str | Object | None:
    """The choice as chats have it."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        allowed = {name: value for name, value in choice.items() if name != "type"}
        if "tools" in allowed:
            allowed["tools"] = [_named(tool) for tool in converted(allowed["tools"], Tools, "tool_choice.tools")]
        return {"type": "allowed_tools", "allowed_tools": allowed}
    found: str | Object | None = _named(choice)
    return found


def _named(choice: Any) -> Any:
    """A function that is chosen, as chats have it."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {name: each for name, each in choice.items() if name != "type"}}
    return choice


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """A tool as chats have it: there the function is an object of its own."""
    definition = dict(converted(tool, Object, path))
    kind = definition.pop("type", None)
    return {"type": kind, "function": {name: value for name, value in definition.items() if value is not None}}


def _metadata(metadata: Object) -> dict[str, str]:
    """What comes back with a response, and is kept with it."""
    for name, text in metadata.items():
        path = f"metadata.{name[:_MOST_NAME]}"
        if len(name) > _MOST_NAME or len(converted(text, str, path)) > _MOST_VALUE:
            raise BadField(
                path,
                f"has more than {_MOST_NAME} characters in its name or {_MOST_VALUE} in its value",
                "invalid_value",
            )
    return metadata


def _shown(metadata: Mapping[str, str], body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that a response repeats, with the values that are in force."""
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
