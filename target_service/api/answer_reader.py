"""Reads an answer's tokens, as text or as the parts of an answer to a chat, and makes the responses of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.answer_parts import AnswerPart
from outrider.errors import OutriderError
from outrider.sampling import FinishReason
from target_service.api import replies
from target_service.api.event_queue import joined
from target_service.core.sequence import (
    PromptLogprobs,
    SequenceEvent,
    SequenceFinished,
    SequenceRequest,
    StepVerdict,
)
from target_service.telemetry.tracing import RequestTrace
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
        shows_stop: bool = False,
    ) -> None:
        """`parser` splits the answer into parts; without one the text stays whole. With `shows_stop` a stop of the
        request's stays in the text."""
        self._parser, self._shows_stop = parser, shows_stop
        # Special tokens that mark parts are read as text, whether the reader sees others or not.
        marks = () if parser is None else tokenizer.special_in(parser.answer_format)
        self._text = tokenizer.answer(request.token_ids, request.sampling.stop, show_special=show_special, shown=marks)

    def parts(self, verdict: StepVerdict) -> str | list[AnswerPart]:
        """What is certain with a verdict, all of the rest with the last one: text, or the parts of an answer that is
        told apart."""
        text = self._certain(verdict)
        if self._parser is None:
            return text
        parts = self._parser.push(text)
        if verdict.finish is not None:
            parts += self._parser.finish()
        return parts

    def _certain(self, verdict: StepVerdict) -> str:
        """Text that is certain with a verdict. An end token has no text."""
        finish, token_ids = verdict.finish, verdict.token_ids
        if finish is None:
            return self._text.push(token_ids)
        shown = self._shows_stop and finish.reason is FinishReason.STOP
        if finish.stop_token_id is not None and not shown:
            token_ids = token_ids[:-1]
        text = self._text.push(token_ids) + self._text.finish()
        return text + (finish.stop_string or "") if shown else text


class AnswerReplies:
    """The responses to one `Generate` call, from the events of its sequence. `ended` is set with the last, and `error`
    where the sequence failed behind them."""

    def __init__(
        self,
        request: SequenceRequest,
        reader: AnswerReader | None,
        names: ModelTokenizer | None,
        trace: RequestTrace,
        set_trailers: Callable[[tuple[tuple[str, str], ...]], None],
    ) -> None:
        """Without a `reader` there are token ids alone. With `names` chunks have the texts of tokens."""
        self.ended = False
        self.error: OutriderError | None = None
        self._request, self._reader, self._names = request, reader, names
        self._trace, self._set_trailers = trace, set_trailers

    def serialised(self, events: Sequence[SequenceEvent]) -> list[bytes]:
        """The responses to events that came since the last time, as bytes. Those that waited for a slow reader go in
        one chunk."""
        if len(events) == 1 and type(event := events[0]) is StepVerdict and not self._trace.recording:
            # Nearly always.
            return [self._chunk(event)]
        if self._trace.recording:
            for event in events:
                if isinstance(event, StepVerdict):
                    self._trace.step(event)
        return [response for event in joined(events) if (response := self._response(event)) is not None]

    def _response(self, event: SequenceEvent) -> bytes | None:
        if isinstance(event, StepVerdict):
            return self._chunk(event)
        if isinstance(event, PromptLogprobs):
            return replies.prompt_chunk(event, self._request, self._names).SerializeToString()
        self.ended = True
        if isinstance(event, SequenceFinished):
            self._trace.finished(event.finish, event.totals)
            self._set_trailers(replies.trailers(event.totals.draft_refused))
            return replies.finished(event, self._request).SerializeToString()
        self._set_trailers(replies.trailers(event.draft_refused))
        self.error = event.error
        return None

    def _chunk(self, verdict: StepVerdict) -> bytes:
        parts = "" if self._reader is None else self._reader.parts(verdict)
        if self._names is None and isinstance(parts, str):
            encoded = replies.encoded_chunk(verdict, parts)
            if encoded is not None:
                return encoded
        response = replies.chunk(verdict)
        if isinstance(parts, str):
            response.chunk.text = parts
        else:
            response.chunk.parts.extend(map(replies.part, parts))
        if self._names is not None:
            replies.add_token_texts(response, self._names)
        return response.SerializeToString()
