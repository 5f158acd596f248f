"""What an answer to a chat is held to, and split into, by its tools and by the model's format."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidField, NotSupported
from outrider.structured_output import StructuredOutput
from target_service.api.tools import ToolSet
from target_service.core.sequence import TriggeredForm
from target_service.grammars.tool_calls import tool_call_grammar
from target_service.text.answer_format import CALLS, REASONING, AnswerFormat, default_format
from target_service.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from target_service.text.answer_parser import AnswerParser

_FORM_PATH = "chat.tools.definitions"
# Compiles a form, and names where it stands in the request.
Check = Callable[[StructuredOutput, str], Awaitable[None]]
# What imports transformers, which a target whose answers are text alone needs not.
_PARSER = "target_service.text.answer_parser"


@dataclass(frozen=True)
class ChatAnswers:
    """The answers of one model."""

    tokenizer: ModelTokenizer

    def __post_init__(self) -> None:
        if self.tokenizer.answer_format is not None:
            importlib.import_module(_PARSER)

    def form(self, tools: ToolSet | None, prompt: Sequence[int]) -> StructuredOutput | None:
        """The form of an answer that calls tools for certain; None for one that need not. Raises `InvalidField`."""
        if tools is None or not tools.required:
            return None
        forced = self._forced_for(tools)
        return self._calls_of(forced, tools.parameters(), tools, self._reasons(forced, prompt))

    async def triggered_form(self, tools: ToolSet | None, prompt: Sequence[int], check: Check) -> TriggeredForm | None:
        """The form of the calls of an answer that may call tools, for from where it begins to; None where there is
        none: the model's own format of calls has no grammar, or its tokens take none. `check` compiles a form, and
        raises what it does.

        Arguments of a tool whose schema cannot be compiled are held to be an object. Raises `InvalidField` if the tool
        is `strict`."""
        if tools is None or not tools.callable or tools.required:
            return None
        found = self._format_for(tools)
        if found is None or found.call is None:
            return None
        form = await self._compiled_calls(found, tools, check)
        if form is None:
            return None
        marks = found.reasoning_marks
        reasons = marks is not None and self._reasons(found, prompt) is True
        return TriggeredForm(form, found.call.trigger, found.call.only_first, marks, reasons)

    async def _compiled_calls(self, found: AnswerFormat, tools: ToolSet, check: Check) -> StructuredOutput | None:
        parameters = tools.parameters()
        try:
            form = self._calls_of(found, parameters, tools, None)
            await check(form, _FORM_PATH)
        except NotSupported:
            return None
        except InvalidField:
            for place, (name, schema) in enumerate(parameters.items()):
                try:
                    await check(self._calls_of(found, {name: schema}, tools, None), f"{_FORM_PATH}[{place}]")
                except InvalidField:
                    if name in tools.strict:
                        raise
                    parameters[name] = {"type": "object"}
            form = self._calls_of(found, parameters, tools, None)
            try:
                await check(form, _FORM_PATH)
            except InvalidField:
                # Each by itself is not too large.
                if tools.strict:
                    raise
                return None
        return form

    def _reasons(self, answer_format: AnswerFormat, prompt: Sequence[int]) -> bool | None:
        """Whether an answer begins inside of the model's reasoning; None for a format without any."""
        if answer_format.fields.keys().isdisjoint(REASONING):
            return None
        from target_service.text.answer_parser import AnswerParser

        return AnswerParser(answer_format, self._prompt_end(prompt)).reasons

    def _calls_of(
        self,
        answer_format: AnswerFormat,
        parameters: Mapping[str, Mapping[str, Any]],
        tools: ToolSet,
        reasoning: bool | None,
    ) -> StructuredOutput:
        """The form of calls of tools by these parameters. Raises `InvalidField` for one that is too large."""
        assert answer_format.call is not None, "its calls can be held to a form"
        grammar = tool_call_grammar(
            answer_format.call, parameters, self.tokenizer, single=tools.single, reasoning=reasoning
        )
        form = StructuredOutput(grammar=grammar)
        try:
            form.check()
        except InvalidField:
            raise InvalidField(_FORM_PATH, "have schemas that are too large to be held to") from None
        return form

    def parser(self, tools: ToolSet | None, prompt: Sequence[int]) -> AnswerParser | None:
        """What splits an answer into parts; None for an answer that is text alone."""
        answer_format = self._format_for(tools)
        if answer_format is None:
            return None
        from target_service.text.answer_parser import AnswerParser

        definitions = () if tools is None else tools.definitions
        single = tools is not None and tools.single
        return AnswerParser(answer_format, self._prompt_end(prompt), definitions, single=single)

    async def check(self, tools: ToolSet) -> None:
        """Raise `NotSupported` for tools that the model is shown, and whose calls would not be recognised."""
        if not tools.callable:
            return
        # It takes a second, once, for a model that was loaded without it.
        await asyncio.to_thread(importlib.import_module, _PARSER)
        if tools.required:
            return
        found = self.tokenizer.answer_format
        if self.tokenizer.reads_tools and (found is None or not found.calls):
            raise NotSupported(
                "the model's chat template takes tools, and how the model writes their calls is not known: its "
                "tokenizer has no response_template; ask for TOOL_CHOICE_REQUIRED, which needs none"
            )

    def _format_for(self, tools: ToolSet | None) -> AnswerFormat | None:
        if tools is not None and tools.required:
            return self._forced_for(tools)
        found = self.tokenizer.answer_format
        if tools is None or not tools.callable:
            return None if found is None else found.without(CALLS)
        return found if found is not None and found.calls else self._explained

    @cached_property
    def _explained(self) -> AnswerFormat:
        """The format of calls for a model that knows none, with its own reasoning."""
        found, default = self.tokenizer.answer_format, default_format()
        if found is None:
            return default.without(*REASONING) or default
        fields = {**found.fields, CALLS: default.fields[CALLS]}
        return replace(default, response_template={**found.response_template, "fields": fields})

    def _forced_for(self, tools: ToolSet) -> AnswerFormat:
        """The model's own format of calls, if calls of these tools can be held to it."""
        found = self.tokenizer.answer_format
        if found is None or found.call is None:
            return self._explained
        if found.call.argument:
            try:
                self._calls_of(found, tools.parameters(), tools, None)
            except InvalidField:
                return self._explained
        return found

    def _prompt_end(self, prompt: Sequence[int]) -> str:
        # Where the beginning of the answer is looked for. Chosen: templates write some ten tokens.
        return str(self.tokenizer.backend.decode(list(prompt[-256:]), skip_special_tokens=False))
