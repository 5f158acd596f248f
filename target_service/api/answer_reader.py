"""Reads an answer's tokens: as text, or as the parts of an answer to a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.v1 import target_pb2
from target_service.api import replies
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from target_service.text.answer_parser import AnswerParser


class AnswerReader:
    """The text of one answer, as its steps come."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        request: SequenceRequest,
        parser: AnswerParser | None,
        *,
        show_special: bool,
    ) -> None:
        """`parser` tells the answer's parts apart; without one the text stays whole."""
        self._parser = parser
        # Special tokens that mark parts are read as text, whether the reader sees others or not.
        marks = () if parser is None else tokenizer.special_in(parser.answer_format)
        self._text = tokenizer.answer(request.token_ids, request.sampling.stop, show_special=show_special, shown=marks)

    def add_text(self, chunk: target_pb2.GenerateChunk, verdict: StepVerdict) -> None:
        """Add to a chunk what is certain with its verdict; all of it with the last one."""
        text = self._certain(verdict)
        if self._parser is None:
            chunk.text = text
            return
        parts = self._parser.push(text)
        if verdict.finish is not None:
            parts += self._parser.finish()
        chunk.parts.extend(map(replies.part, parts))

    def _certain(self, verdict: StepVerdict) -> str:
        """Text that is certain with a verdict. A stop or end token has no text."""
        finish, token_ids = verdict.finish, verdict.token_ids
        if finish is None:
            return self._text.push(token_ids)
        if finish.stop_token_id is not None:
            token_ids = token_ids[:-1]
        return self._text.push(token_ids) + self._text.finish()
