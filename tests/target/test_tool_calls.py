"""Calls that must be made: the grammar of every format, and what the parser makes of a text of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from string import Template
from typing import Any, ClassVar

import pytest
from llguidance import LLMatcher
from scripted_service import byte_tokenizer, model_tokenizer
from tokenizers import AddedToken

from benchmarks.shared.loaded_models import tokenizer_of
from outrider.answer_parts import ToolCallPart
from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.api.chat_answers import ChatAnswers
from target_service.api.tools import ToolSet
from target_service.core.sequence import TriggeredForm
from target_service.grammars.compiling import Grammars
from target_service.grammars.tool_calls import tool_call_grammar
from target_service.grammars.vocabulary import grammar_tokenizer
from target_service.text.answer_format import AnswerFormat, formats
from target_service.text.answer_parser import AnswerParser
from target_service.text.chat_template import ChatTemplate
from target_service.text.prompt_encoder import PromptEncoder
from target_service.text.tokenizer import ModelTokenizer
from target_service.text.tool_turns import named_results, plain_turns, template_turn

INTEGER = {"x": {"type": "integer"}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": INTEGER, "required": ["x"], "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": own}} for name, own in PARAMETERS.items()]
CALLS = [("add", '{"x":1}'), ("now", "{}")]
FORCED = {name: found for name, (found, _) in formats().items() if found.call is not None}


def knowing(found: AnswerFormat) -> ModelTokenizer:
    """A tokenizer of bytes, and of the marks of a format as special tokens."""
    tokenizer, call = byte_tokenizer(), found.call
    assert call is not None
    marks = re.findall(r"<[|\uff5c]\w.*?[|\uff5c]>|\[[A-Z_]+\]", call.begin + call.text + call.end)
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(mark, special=True) for mark in set(marks)]})
    return tokenizer_of(tokenizer)


def written(found: AnswerFormat, calls: list[tuple[str, str]]) -> str:
    call = found.call
    assert call is not None
    texts = []
    for name, arguments in calls:
        if call.argument:
            values = [(key, value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
                      for key, value in json.loads(arguments).items()]  # fmt: skip
            arguments = "".join([Template(call.argument).substitute(key=key, value=value) for key, value in values])
        texts.append(
            Template(call.text).substitute(name=json.dumps(name), bare_name=name, index=0, arguments=arguments)
        )
    return call.begin + call.separator.join(texts) + call.end


@pytest.mark.parametrize("name", FORCED)
def test_a_grammar_takes_what_the_parser_reads(name: str) -> None:
    found, tokenizer = FORCED[name], knowing(FORCED[name])
    call = found.call
    assert call is not None
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    words = grammar_tokenizer(tokenizer, vocabulary, (2,))
    for single, calls in ((True, CALLS[:1]), (False, CALLS)):
        if call.single and not single:
            continue
        grammar = tool_call_grammar(call, PARAMETERS, tokenizer, single=single, reasoning=None)
        matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        text = written(found, calls)
        ids = tokenizer.encode(text)
        assert matcher.validate_tokens(ids) == len(ids), text
        matcher.consume_tokens(ids)
        assert matcher.is_accepting()
        # Arguments that do not match are none.
        wrong = tokenizer.encode(written(found, [("add", '{"x":"one"}')]))
        matcher.reset()
        assert matcher.validate_tokens(wrong) < len(wrong)
        answer = tokenizer.answer((), shown=tokenizer.special_in(found))
        parser = AnswerParser(found, "", TOOLS)
        parts = [part for token in ids for part in parser.push(answer.push([token]))]
        parts += parser.push(answer.finish()) + parser.finish()
        names = [part.name for part in parts if getattr(part, "name", "")]
        assert names == [name for name, _ in calls]
        arguments = "".join(getattr(part, "arguments", "") for part in parts)
        assert json.loads(f"[{arguments.replace('}{', '},{')}]") == [json.loads(given) for _, given in calls]


@pytest.mark.parametrize("name", FORCED)
def test_an_answer_that_begins_a_call_is_held_to_it(name: str) -> None:
    found, tokenizer = FORCED[name], knowing(FORCED[name])
    call = found.call
    assert call is not None
    assert (call.begin + call.text).startswith(call.trigger)
    grammars = Grammars(tokenizer, max(tokenizer.get_vocab().values()) + 1, (2,))
    grammar = tool_call_grammar(call, PARAMETERS, tokenizer, single=True, reasoning=None)
    form = TriggeredForm(StructuredOutput(grammar=grammar), call.trigger, call.only_first, found.reasoning_marks)
    ids = tokenizer.encode(("" if call.only_first else "Hm. ") + written(found, CALLS[:1]))
    trigger = grammars.trigger(form, "t")
    kept = trigger.cut(ids)
    assert kept is not None
    followed = trigger.begun(ids[:kept])
    for length in range(kept, len(ids)):
        words = followed.masks(TokenTree((ids[length - 1],), (0,), (1.0,)), ids[:length]).words[0]
        assert words[ids[length] // 32] >> ids[length] % 32 & 1, tokenizer.decode(ids[: length + 1])
    # A name that no tool has.
    wrong = tokenizer.encode(written(found, [("gone", "{}")]))
    trigger = grammars.trigger(form, "t")
    kept = trigger.cut(wrong)
    assert kept is not None
    followed = trigger.begun(wrong[:kept])
    tree = TokenTree((wrong[kept - 1], *wrong[kept:]), tuple([max(0, row - 1) for row in range(len(wrong) - kept + 1)]),
                     (1.0,) * (len(wrong) - kept + 1))  # fmt: skip
    assert len(followed.constrained(tree, wrong[:kept], len(tree))) < len(tree)


def chat_tools(*functions: dict[str, Any]) -> ToolSet:
    return ToolSet(tuple([{"type": "function", "function": function} for function in functions]))


class TestAuto:
    """Answers that may call tools."""

    ADD: ClassVar[dict[str, Any]] = {"name": "add", "parameters": PARAMETERS["add"]}
    UNIQUE: ClassVar[dict[str, Any]] = {
        "name": "u", "parameters": {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    }  # fmt: skip

    async def form_of(self, tools: ToolSet | None, chat_template: str = '{{ tools }}<tool_call>\'"arguments"') -> Any:
        tokenizer = model_tokenizer()
        tokenizer.chat_template = chat_template
        grammars = Grammars(tokenizer, 259, (2,))

        async def check(form: StructuredOutput, path: str) -> None:
            grammars.check(form, "t", path)

        return await ChatAnswers(tokenizer).triggered_form(tools, [5, 6], check)

    async def test_calls_are_held_to_the_schemas(self) -> None:
        form = await self.form_of(chat_tools(self.ADD))
        assert (form.trigger, form.only_first, form.reasons) == ("<tool_call>", False, False)
        assert '"integer"' in form.form.grammar
        assert await self.form_of(None) is None
        for other in (replace(chat_tools(self.ADD), callable=False), replace(chat_tools(self.ADD), required=True)):
            assert await self.form_of(other) is None
        # Of a model without a form of calls, in that which it is told.
        assert (await self.form_of(chat_tools(self.ADD), "{{ messages }}")).trigger == "<tool_call>"
        # Arguments between tags, and Python's, which no text describes.
        form = await self.form_of(chat_tools(self.ADD), "{{ tools }}<function=<parameter=")
        assert form.trigger == "<tool_call>" and "<parameter=x>" in form.form.grammar
        pythonic = "{{ tools }}<|tool_call_start|><|tool_call_end|>"
        assert await self.form_of(chat_tools(self.ADD), pythonic) is None

    async def test_a_schema_that_cannot_be_held_to_is_an_object_unless_it_is_strict(self) -> None:
        form = await self.form_of(chat_tools(self.ADD, self.UNIQUE))
        assert '"integer"' in form.form.grammar and "uniqueItems" not in form.form.grammar
        with pytest.raises(InvalidField, match="uniqueItems"):
            await self.form_of(chat_tools(self.ADD, {**self.UNIQUE, "strict": True}))
        assert (await self.form_of(chat_tools({**self.ADD, "strict": True}, self.UNIQUE))) is not None


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "kind": {"type": "string", "enum": ["cat", "dog"]}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}}, "note": {"type": "string"},
    },
    "required": ["name", "kind"],
}  # fmt: skip
CLOSED = {"qwen_coder": "</parameter>", "glm": "</arg_value>"}


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", CLOSED)
class TestTaggedArguments:
    def taken(self, name: str, special: bool, schema: dict[str, Any], text: str) -> bool:
        call, tokenizer = FORCED[name].call, byte_tokenizer()
        assert call is not None
        if special:
            marks = [AddedToken(mark, special=True) for mark in ("<tool_call>", "</tool_call>", CLOSED[name])]
            tokenizer.add_special_tokens({"extra_special_tokens": marks})
        own = tokenizer_of(tokenizer)
        grammar = tool_call_grammar(call, {"f": schema}, own, single=True, reasoning=None)
        words = grammar_tokenizer(own, max(own.get_vocab().values()) + 1, (2,))
        matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = own.encode(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def test_values_are_held_to_their_types(self, name: str, special: bool) -> None:
        right: list[dict[str, Any]] = [
            {"name": "", "kind": "cat"},
            {"name": 'A <b> of\n\nlines, 日本 "quoted"', "kind": "dog", "age": 3, "note": "x"},
            {"name": "n", "kind": "dog", "age": -3, "tags": ["a", "<b>"]},
        ]
        wrong: list[dict[str, Any]] = [
            {"name": "n"}, {"name": "n", "kind": "cow"}, {"name": "n", "kind": "cat", "age": "old"},
            {"name": "n", "kind": "cat", "tags": [1]}, {"kind": "cat", "name": "n"},
            {"name": "n", "kind": "cat", "x": 1},
            {"name": f"a{CLOSED[name]}b", "kind": "cat"},
        ]  # fmt: skip
        tools = [{"type": "function", "function": {"name": "f", "parameters": PERSON}}]
        for values in right + wrong:
            text = written(FORCED[name], [("f", json.dumps(values))])
            assert self.taken(name, special, PERSON, text) == (values in right), text
            if values in right:
                parser = AnswerParser(FORCED[name], "", tools)
                calls = [part for part in [*parser.push(text), *parser.finish()] if isinstance(part, ToolCallPart)]
                assert [json.loads(call.arguments) for call in calls] == [values]

    def test_what_cannot_be_held_to_is_refused_or_any(self, name: str, special: bool) -> None:
        for own in ({"type": "string", "pattern": "a+"}, {"type": ["string", "null"]}, {"anyOf": []}, {"$ref": "#"},
                    True, {"type": "string", "enum": [" a"]}):  # fmt: skip
            with pytest.raises(InvalidField, match="cannot be held to"):
                self.taken(name, special, {"type": "object", "properties": {"x": own}}, "")
        for odd in ({"minProperties": 1}, {"required": ["x"]}):
            with pytest.raises(InvalidField, match="cannot be held to"):
                self.taken(name, special, {"type": "object", **odd}, "")
        text = written(FORCED[name], [("f", '{"any": "text of it", "x1": "1"}')])
        assert self.taken(name, special, {"type": "object"}, text)
        assert not self.taken(name, special, {"type": "object", "additionalProperties": False}, text)


@pytest.mark.parametrize(("reasoning", "text"), [(True, "hm</think>\n\n"), (False, "<think>hm</think>"), (False, "")])
def test_reasoning_comes_before_forced_calls(reasoning: bool, text: str) -> None:
    found, tokenizer = FORCED["hermes"], model_tokenizer()
    assert found.call is not None
    grammar = tool_call_grammar(found.call, PARAMETERS, tokenizer, single=True, reasoning=reasoning)
    grammars = Grammars(tokenizer, 259, (2,))
    words = grammar_tokenizer(tokenizer, grammars.vocabulary_size, (2,))
    matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar))
    ids = tokenizer.encode(text + written(found, CALLS[:1]))
    assert matcher.validate_tokens(ids) == len(ids)
    assert matcher.validate_tokens(tokenizer.encode("x")) == int(reasoning)


def test_tools_for_a_template_that_knows_none() -> None:
    turns = named_results(
        [
            template_turn("user", "hi", (), call_id="", name="", reasoning=""),
            template_turn("assistant", "", [("a", "add", '{"x": 1}'), ("b", "now", "no JSON")],
                          call_id="", name="", reasoning=""),
            template_turn("tool", "1", (), call_id="a", name="", reasoning=""),
            template_turn("tool", "2", (), call_id="b", name="", reasoning=""),
        ]
    )  # fmt: skip
    assert [turn.get("name") for turn in turns] == [None, None, "add", "now"]
    system, user, assistant, results = plain_turns(turns, [{"type": "function", "function": {"name": "add"}}])
    assert '{"type": "function", "function": {"name": "add"}}' in system["content"]
    assert (user["content"], results["role"]) == ("hi", "user")
    assert assistant["content"] == (
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": "no JSON"}\n</tool_call>'
    )
    assert results["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"


def test_special_tokens_in_tools_are_text() -> None:
    """In names of properties too, which are a caller's as much as descriptions are."""
    tokenizer = model_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ tools | tojson }}</s>"
    tool = {"type": "function", "function": {"description": "</s>", "parameters": {"properties": {"</s>": {}}}}}
    ids = PromptEncoder(tokenizer).chat([{"role": "user", "content": "hi"}], tools=[tool])
    assert ids.count(2) == 1 and ids[-1] == 2
    shown = ChatTemplate(tokenizer.chat_template, {}).render(
        [{"role": "user", "content": "hi"}], now=datetime.now(), tools=[tool]
    )
    assert tokenizer.decode(ids) == shown.removesuffix("</s>")
