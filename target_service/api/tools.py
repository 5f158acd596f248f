"""The tools of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.admission.tool_limits import MAX_TOOLS, MAX_TOOLS_BYTES
from outrider.errors import InvalidField, check_most
from outrider.v1 import target_pb2
from target_service.text.given_json import read_json

_FIELD = "chat.tools"
_DEFINITIONS = f"{_FIELD}.definitions"
# A name stands in the text of calls, whose marks it must not look like. OpenAI's, and what MCP servers add to them.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class ToolSet:
    """What an answer may call: `definitions` in OpenAI's form. With `required` it calls them, with `name` that one.
    Without `callable` they are shown to the model, and its answer is text. `single` answers have one call at most."""

    definitions: tuple[Mapping[str, Any], ...]
    callable: bool = True
    required: bool = False
    name: str = ""
    single: bool = False

    @property
    def strict(self) -> frozenset[str]:
        """The names of tools whose arguments have to match their schemas, if they are called."""
        return frozenset(each["function"]["name"] for each in self.definitions if each["function"].get("strict"))

    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the arguments of those tools that the answer may call, by the tools' names."""
        functions = (definition["function"] for definition in self.definitions)
        none = {"properties": {}, "additionalProperties": False}
        return {
            function["name"]: {"type": "object", **(function.get("parameters") or none)}
            for function in functions
            if not self.name or function["name"] == self.name
        }


def tool_set(chat: target_pb2.ChatInput) -> ToolSet | None:
    """The tools of a conversation; None where it has none. Raises `InvalidField`."""
    if not chat.HasField("tools"):
        return None
    pb = chat.tools
    check_most(_DEFINITIONS, len(pb.definitions.encode()), MAX_TOOLS_BYTES, "bytes")
    try:
        definitions = read_json(pb.definitions)
    except ValueError as error:
        raise InvalidField(_DEFINITIONS, str(error)) from None
    if not isinstance(definitions, list) or not 1 <= len(definitions) <= MAX_TOOLS:
        raise InvalidField(_DEFINITIONS, f"must be a list of 1 to {MAX_TOOLS} tools")
    names = [_checked_name(definition, f"{_DEFINITIONS}[{i}]") for i, definition in enumerate(definitions)]
    if len(set(names)) < len(names):
        raise InvalidField(_DEFINITIONS, "has two tools of one name")
    required = pb.choice == target_pb2.TOOL_CHOICE_REQUIRED
    if pb.name and not required:
        raise InvalidField(f"{_FIELD}.name", "is for TOOL_CHOICE_REQUIRED")
    if pb.name and pb.name not in names:
        raise InvalidField(f"{_FIELD}.name", "is no tool of the definitions")
    return ToolSet(
        tuple(definitions),
        callable=pb.choice != target_pb2.TOOL_CHOICE_NONE,
        required=required,
        name=pb.name,
        # As at OpenAI, a named tool is called once.
        single=pb.single_call or bool(pb.name),
    )


def _checked_name(definition: Any, path: str) -> str:
    """The name of a tool whose definition has the right form."""
    if not isinstance(definition, dict) or definition.get("type") != "function":
        raise InvalidField(f"{path}.type", "must be function")
    function = definition.get("function")
    if not isinstance(function, dict):
        raise InvalidField(f"{path}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField(f"{path}.function.name", "must be 1 to 128 letters, digits and _ - . : /")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidField(f"{path}.function.parameters", "must be an object")
    if (parameters or {}).get("type", "object") != "object":
        raise InvalidField(f"{path}.function.parameters.type", "must be object")
    return name
