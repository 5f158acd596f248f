"""What an answer to a chat is held to, and told apart into, by its tools and by the model's format."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from outrider.errors import InvalidField, NotSupported
from outrider.structured_output import StructuredOutput
from target_service.api.tools import ToolSet
from target_service.grammars.tool_calls import tool_call_grammar
from target_service.text.answer_format import CALLS, REASONING, AnswerFormat, default_format
from target_service.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from target_service.text.answer_parser import AnswerParser

# Last tokens of a prompt in which the beginning of the answer is looked for. Chosen: templates write some ten.
_PROMPT_END = 256
_FORM_PATH = "chat.tools.definitions"
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
        answer_format = self._forced
        assert answer_format.call is not None
        reasoning = None
        if not answer_format.fields.keys().isdisjoint(REASONING):
            from target_service.text.answer_parser import AnswerParser

            reasoning = AnswerParser(answer_format, self._prompt_end(prompt)).reasons
        grammar = tool_call_grammar(
            answer_format.call, tools.parameters(), self.tokenizer, single=tools.single, reasoning=reasoning
        )
        form = StructuredOutput(grammar=grammar)
        try:
            form.check()
        except InvalidField:
            raise InvalidField(_FORM_PATH, "have schemas that are too large to be held to") from None
        return form

    def parser(self, tools: ToolSet | None, prompt: Sequence[int]) -> AnswerParser | None:
        """What tells an answer's parts apart; None for an answer that is text alone."""
        answer_format = self._format_for(tools)
        if answer_format is None:
            return None
        from target_service.text.answer_parser import AnswerParser

        definitions = () if tools is None else tools.definitions
        single = tools is not None and tools.single
        return AnswerParser(answer_format, self._prompt_end(prompt), definitions, single=single)

    async def check(self, tools: ToolSet) -> None:
        """Raise `NotSupported` for tools that the model is shown, and whose calls nobody would know."""
        if not tools.callable:
            return
        # It takes a second, once, for a model that was loaded without it.
        await asyncio.to_thread(importlib.import_module, _PARSER)
        if tools.required:
            return
        found = self.tokenizer.answer_format
        if self.tokenizer.reads_tools and (found is None or not found.calls):
            raise NotSupported(
                "the model's chat template takes tools, and nobody knows how the model writes their calls: its "
                "tokenizer has no response_template; ask for TOOL_CHOICE_REQUIRED, which needs none"
            )

    def _format_for(self, tools: ToolSet | None) -> AnswerFormat | None:
        if tools is not None and tools.required:
            return self._forced
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

    @cached_property
    def _forced(self) -> AnswerFormat:
        found = self.tokenizer.answer_format
        return found if found is not None and found.call is not None else self._explained

    def _prompt_end(self, prompt: Sequence[int]) -> str:
        return str(self.tokenizer.backend.decode(list(prompt[-_PROMPT_END:]), skip_special_tokens=False))
