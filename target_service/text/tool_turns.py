"""Conversations with tools as chat templates take them, or as plain turns for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from target_service.text.answer_format import REASONING
from target_service.text.given_json import read_json

# After the chat templates of Hermes 2 Pro and Qwen 2.5, whose form of calls it explains.
_EXPLAINED = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def template_turn(
    role: str, content: str, calls: Sequence[tuple[str, str, str]], *, call_id: str, name: str, reasoning: str
) -> dict[str, Any]:
    """A turn with the fields that it has. `calls` are ids, names and arguments, which templates take as an object."""
    turn: dict[str, Any] = {"role": role, "content": content}
    if calls:
        turn["tool_calls"] = [
            {"id": each_id, "type": "function", "function": {"name": called, "arguments": _object(arguments)}}
            for each_id, called, arguments in calls
        ]
    if reasoning:
        turn |= dict.fromkeys(REASONING, reasoning)
    return turn | {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}


def named_results(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, in which those of tools have the name of what was called: some templates write it."""
    names: dict[str, str] = {}
    named = list[dict[str, Any]]()
    for turn in turns:
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
        missing = turn["role"] == "tool" and "name" not in turn
        name = names.get(turn.get("tool_call_id", "")) if missing else None
        named.append(turn if name is None else {**turn, "name": name})
    return named


def plain_turns(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in turns of text alone: tools are explained in the system's, calls are text, and results
    are the user's."""
    plain = list[dict[str, Any]]()
    for turn in turns:
        if turn["role"] == "tool":
            result = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if plain and plain[-1].get("of_tools"):
                # Of several calls; templates want roles to take turns.
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{result}"}
            else:
                plain.append({"role": "user", "content": result, "of_tools": True})
        else:
            plain.append({"role": turn["role"], "content": _with_calls(turn)})
    made = [{"role": turn["role"], "content": turn["content"]} for turn in plain]
    if not tools:
        return made
    explained = _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if made[0]["role"] == "system":
        return [{"role": "system", "content": f"{made[0]['content']}\n\n{explained}"}, *made[1:]]
    return [{"role": "system", "content": explained}, *made]


def _with_calls(turn: Mapping[str, Any]) -> str:
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ()))
    texts = [turn["content"]] if turn["content"] else []
    return "\n".join((*texts, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)))


def _object(arguments: str) -> Any:
    """Arguments as an object. What is none stays text: a model wrote it, and the template shows it."""
    try:
        found = read_json(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments
