"""The tools that an answer may call, by OpenAI's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from outrider_client.messages import ToolChoice, ToolOptions
from outrider_gateway.bodies import Object, TemplateFields, Tools
from outrider_gateway.failures import BadField
from outrider_gateway.fields import BodyObject, converted, read_object

_CHOICES = {choice.value: choice for choice in ToolChoice}


class AllowedChoice(BodyObject):
    """`tool_choice` of type allowed_tools."""

    type: str
    allowed_tools: Object


class AllowedTools(BodyObject):
    """The tools that may be called, and whether one has to be."""

    mode: Literal["auto", "required"] = "auto"
    tools: Tools = msgspec.field(default_factory=list)


class NamedFunction(BodyObject):
    """A function by its name."""

    name: Annotated[str, Meta(min_length=1)]


class NamedTool(BodyObject):
    """The tool that is called, or may be."""

    type: Literal["function"]
    function: Object


def tool_options(given: TemplateFields) -> ToolOptions | None:
    """The body's `tools`, `tool_choice` and `parallel_tool_calls`; None where there is nothing to call. The target
    checks the tools themselves. Raises `Refused`."""
    definitions = given.tools
    for index, definition in enumerate(definitions):
        path = f"tools[{index}]"
        if converted(definition, Object, path).get("type") != "function":
            raise BadField(f"{path}.type", "must be function: this server has no tools of its own", "invalid_value")
    chosen = given.tool_choice
    if isinstance(chosen, dict) and chosen.get("type") == "allowed_tools":
        chosen, definitions = _allowed(chosen, definitions)
    choice, name = _choice(chosen)
    if definitions:
        return ToolOptions(tuple(definitions), choice, name, single_call=not given.parallel_tool_calls)
    if choice is ToolChoice.REQUIRED:
        raise BadField("tool_choice", "needs tools", "invalid_value")
    return None


def _allowed(chosen: Object, definitions: list[Any]) -> tuple[str, list[Any]]:
    """The choice among the tools that are allowed, and their definitions. The prompt has no others."""
    path = "tool_choice.allowed_tools"
    allowed = read_object(AllowedTools, read_object(AllowedChoice, chosen, "tool_choice").allowed_tools, path)
    by_name = {(each.get("function") or {}).get("name"): each for each in definitions}
    names = [_function(tool, f"{path}.tools[{index}]") for index, tool in enumerate(allowed.tools)]
    for index, name in enumerate(names):
        if name not in by_name:
            raise BadField(f"{path}.tools[{index}]", "is no function of tools", "invalid_value")
    if not names:
        raise BadField(f"{path}.tools", "must name a tool", "invalid_value")
    return allowed.mode, [each for name, each in by_name.items() if name in names]


def _choice(value: str | Object | None) -> tuple[ToolChoice, str]:
    """Whether tools are called, and the one that is."""
    if isinstance(value, dict):
        return ToolChoice.REQUIRED, _function(value, "tool_choice")
    if value is not None and value not in _CHOICES:
        named = '{"type": "function", "function": {"name": ...}}'
        raise BadField("tool_choice", f"must be {', '.join(_CHOICES)} or {named}", "invalid_value")
    return _CHOICES[value or "auto"], ""


def _function(value: Any, path: str) -> str:
    """The name of a function that is chosen."""
    return read_object(NamedFunction, read_object(NamedTool, value, path).function, f"{path}.function").name
