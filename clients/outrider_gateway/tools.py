"""The tools that an answer may call, by OpenAI's names."""

from __future__ import annotations

from typing import Any

from outrider.admission.tool_limits import MAX_TOOLS
from outrider_client.messages import ToolChoice, ToolOptions
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields, bounded, typed

_CHOICES = {choice.value: choice for choice in ToolChoice}
_NAMED = '{"type": "function", "function": {"name": ...}}'


def tool_options(fields: Fields) -> ToolOptions | None:
    """The body's `tools`, `tool_choice` and `parallel_tool_calls`; None where there is nothing to call. The target
    checks the tools themselves. Raises `Refused`."""
    definitions = bounded(typed(fields.pop("tools", []), list, "tools"), MAX_TOOLS, "tools")
    for index, definition in enumerate(definitions):
        path = f"tools[{index}]"
        if typed(definition, dict, path).get("type") != "function":
            raise BadField(f"{path}.type", "must be function: this server has no tools of its own", "invalid_value")
    given = fields.pop("tool_choice")
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        given, definitions = _allowed(Fields(given, "tool_choice"), definitions)
    choice, name = _choice(given)
    parallel = fields.flag("parallel_tool_calls", True)
    if definitions:
        return ToolOptions(tuple(definitions), choice, name, single_call=not parallel)
    if choice is ToolChoice.REQUIRED:
        raise BadField("tool_choice", "needs tools", "invalid_value")
    return None


def _allowed(chosen: Fields, definitions: list[Any]) -> tuple[Any, list[Any]]:
    """The choice among the tools that are allowed, and their definitions. The prompt has no others."""
    chosen.pop("type")
    allowed = chosen.inner("allowed_tools")
    if allowed is None:
        raise BadField(chosen.path("allowed_tools"), "is missing", "missing_required_parameter")
    chosen.end()
    mode, listed = allowed.text("mode", "auto"), allowed.path("tools")
    if mode not in ("auto", "required"):
        raise BadField(allowed.path("mode"), "must be auto or required", "invalid_value")
    by_name = {(each.get("function") or {}).get("name"): each for each in definitions}
    names = []
    for index, tool in enumerate(bounded(typed(allowed.pop("tools"), list, listed), MAX_TOOLS, listed)):
        _, name = _choice(tool, f"{listed}[{index}]")
        if name not in by_name:
            raise BadField(f"{listed}[{index}]", "is no function of tools", "invalid_value")
        names.append(name)
    allowed.end()
    if not names:
        raise BadField(listed, "must name a tool", "invalid_value")
    return mode, [each for name, each in by_name.items() if name in names]


def _choice(value: Any, path: str = "tool_choice") -> tuple[ToolChoice, str]:
    """Whether tools are called, and the one that is."""
    if value is None:
        return ToolChoice.AUTO, ""
    if isinstance(value, str):
        if value not in _CHOICES:
            raise BadField(path, f"must be {', '.join(_CHOICES)} or {_NAMED}", "invalid_value")
        return _CHOICES[value], ""
    chosen = Fields(typed(value, dict, path), path)
    if chosen.text("type") != "function":
        raise BadField(chosen.path("type"), "must be function", "invalid_value")
    function = chosen.inner("function")
    if function is None or not (name := function.text("name")):
        raise BadField(chosen.path("function.name"), "is missing", "missing_required_parameter")
    function.end()
    chosen.end()
    return ToolChoice.REQUIRED, name
