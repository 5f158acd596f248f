"""The parts of answers in every format: the same however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.answer_parts import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from outrider_client.answers import Answer
from target_service.text.answer_format import AnswerFormat, answer_format, formats
from target_service.text.answer_parser import AnswerParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "s": {"type": "string"}, "on": {"type": "boolean"}},
            },
        },
    }
]
Summary = tuple[str, str, list[tuple[str, Any]]]
TWO = [("add", {"x": 1, "s": "a}b"}), ("now", {})]


def _deepseek(text: str) -> str:
    """With the characters of its tokens."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


# For each format: a template's words that choose it, an answer with all that it may have, and what its parts are.
ANSWERS: dict[str, tuple[str, str, Summary]] = {
    "hermes": (
        '<tool_call> "arguments" </think>',
        '<think>\nh<m\n</think>\n\nSo <b>:\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "s": "a}b"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        ("So <b>:", "h<m", TWO),
    ),
    "llama_json": (
        '<|eot_id|> "parameters"',
        '<|python_tag|>{"name": "add", "parameters": {"x": 1, "s": "a}b"}}',
        ("", "", TWO[:1]),
    ),
    "mistral_list": (
        '[TOOL_CALLS] [AVAILABLE_TOOLS] "arguments"',
        'So[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1, "s": "a}b"}}, {"name": "now", "arguments": {}}]',
        ("So", "", TWO),
    ),
    "mistral_args": (
        "[TOOL_CALLS] [ARGS]",
        '[THINK]hm[/THINK]So[TOOL_CALLS]add[ARGS]{"x": 1, "s": "a}b"}[TOOL_CALLS]now[ARGS]{}',
        ("So", "hm", TWO),
    ),
    "harmony": (
        "<|channel|> <|message|> <|constrain|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1, "s": "a}b"}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        ("So", "hm", TWO),
    ),
    "deepseek_fenced": (
        _deepseek("<|tool_call_begin|> ```json"),
        _deepseek(
            'So<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n{"x": 1, "s": "a}b"}\n```'
            "<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>now\n```json\n{}\n```<|tool_call_end|>"
            "<|tool_calls_end|>"
        ),
        ("So", "", TWO),
    ),
    "deepseek": (
        _deepseek("<|tool_call_begin|> <|tool_sep|>"),
        _deepseek(
            'So<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"x": 1, "s": "a}b"}<|tool_call_end|>'
            "<|tool_call_begin|>now<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"
        ),
        ("So", "", TWO),
    ),
    "qwen_coder": (
        "<function= <parameter= </think>",
        "<think>hm</think>So\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\na}b\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("So", "hm", TWO),
    ),
    "glm": (
        "<arg_key> <arg_value>",
        "So\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>a}b</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        ("So", "", TWO),
    ),
    "gemma": (
        "<|tool_call> call:",
        '<|channel>thought\nhm<channel|>So<|tool_call>call:add{x:1,s:<|"|>a}b<|"|>}<tool_call|><|tool_call>call:now{}'
        "<tool_call|>",
        ("So", "hm", TWO),
    ),
    "kimi": (
        "<|tool_call_begin|> <|tool_call_argument_begin|>",
        "So<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"x": 1, "s": "a}b"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        ("So", "", TWO),
    ),
    "pythonic": (
        "<|tool_call_start|> <|tool_call_end|>",
        'So f(a), g(b):<|tool_call_start|>[add(x=1, s="a}b", on=True), now()]<|tool_call_end|>',
        ("So f(a), g(b):", "", [("add", {"x": 1, "s": "a}b", "on": True}), ("now", {})]),
    ),
}  # fmt: skip


def format_of(name: str) -> AnswerFormat:
    found = answer_format(ANSWERS[name][0])
    assert found is not None
    return found


def parts_of(found: AnswerFormat, pieces: Iterable[str], **options: Any) -> list[AnswerPart]:
    parser = AnswerParser(found, tools=TOOLS, **options)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.finish()


def summary(parts: Sequence[AnswerPart]) -> Summary:
    answer = Answer()
    answer.add(parts)
    return answer.text, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


def raw(parts: Sequence[AnswerPart]) -> tuple[str, str, list[tuple[str, str]]]:
    answer = Answer()
    answer.add(parts)
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


def test_every_format_has_an_answer() -> None:
    assert ANSWERS.keys() == formats().keys()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_same_parts_at_every_split(name: str) -> None:
    found, (_, text, expected) = format_of(name), ANSWERS[name]
    assert summary(parts_of(found, [text])) == expected
    assert summary(parts_of(found, text)) == expected
    whole = raw(parts_of(found, [text]))
    for at in range(1, len(text)):
        assert raw(parts_of(found, [text[:at], text[at:]])) == whole, (text[:at], text[at:])
    # An answer may also end anywhere.
    for end in range(len(text)):
        cut = text[:end]
        assert raw(parts_of(found, cut)) == raw(parts_of(found, [cut])), cut


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_model_writes_has_the_same_parts_in_any_pieces(name: str, data: st.DataObject) -> None:
    found, (_, text, _) = format_of(name), ANSWERS[name]
    # Pieces of an answer in any order, and text of no meaning.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bits = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    written = "".join(data.draw(st.permutations([*bits, data.draw(st.text('<|>{}[]\n" ab', max_size=8))])))
    places = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *places], [*places, len(written)], strict=True)]
    assert raw(parts_of(found, pieces)) == raw(parts_of(found, [written]))


def test_a_long_answer_is_not_kept() -> None:
    """Neither its text, which is copied with every piece, nor that of its reasoning."""
    parser, length = AnswerParser(formats()["hermes"][0]), 0
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    pieces = ["<think>", *["x" * 1000] * 400, "</think>", *["y" * 1000] * 400, call]
    parts = []
    for piece in pieces:
        parts += parser.push(piece)
        length = max(length, len(parser._parser._buffer) + len(parser._parser._body))
    parts += parser.finish()
    assert length < 200_000
    text = {
        kind: "".join(part.text for part in parts if isinstance(part, kind)) for kind in (ReasoningPart, ContentPart)
    }
    assert text == {ReasoningPart: "x" * 400_000, ContentPart: "y" * 400_000}
    assert [part.name for part in parts if isinstance(part, ToolCallPart) and part.name] == ["add"]


def test_what_only_begins_an_answer_begins_no_later_part_of_it() -> None:
    parser = AnswerParser(formats()["llama_json"][0])
    pieces = ["y" * 1000] * 300 + ['{"name": "add", "parameters": {}}']
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(isinstance(part, ContentPart) for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, ContentPart)) == "".join(pieces)
