"""The responses to one request, from the events of its sequences, of which each is one output."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from outrider.errors import OutriderError
from outrider.openengine import openengine_pb2 as pb
from outrider.sampling import FinishReason
from target_service.api.answer_reader import AnswerReader
from target_service.core.sequence import (
    Finish,
    PromptLogprobs,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    SequenceTotals,
    StepVerdict,
)
from target_service.openengine.errors import engine_error
from target_service.openengine.requests import WantedOutputs
from target_service.text.tokenizer import ModelTokenizer


class OutputReader:
    """The text of one output, and how many tokens it has."""

    def __init__(self, request: SequenceRequest, tokenizer: ModelTokenizer | None, *, shows_stop: bool) -> None:
        self.completion_tokens = 0
        self.totals: SequenceTotals | None = None
        self._text = None
        if tokenizer is not None:
            self._text = AnswerReader(tokenizer, request, None, show_special=False, shows_stop=shows_stop)

    def text(self, verdict: StepVerdict) -> str:
        """What is certain with a verdict; all of the rest with the last one."""
        self.completion_tokens += len(verdict.token_ids)
        text = "" if self._text is None else self._text.parts(verdict)
        assert isinstance(text, str), "nothing splits it into parts"
        return text


class RequestAnswer:
    """The responses of one stream. `unfinished` are the indices of outputs that go on."""

    def __init__(
        self,
        request_id: str,
        wanted: WantedOutputs,
        requests: Sequence[SequenceRequest],
        tokenizer: ModelTokenizer | None,
    ) -> None:
        self.unfinished = set(range(len(requests)))
        self._request_id, self._wanted = request_id, wanted
        self._prompt = requests[0].token_ids
        self._outputs = [OutputReader(one, tokenizer, shows_stop=wanted.shows_stop) for one in requests]
        # Tokens have texts of their own beside log-probabilities alone.
        self._tokenizer = tokenizer
        self._prompt_tokens: list[pb.TokenInfo] = []

    def responses(self, index: int, event: SequenceEvent) -> Iterator[pb.GenerateResponse]:
        """The responses to an event of one output. Raises the error of one that failed."""
        if isinstance(event, StepVerdict):
            if self._prompt_tokens:
                yield self._response(prompt=pb.PromptOutput(tokens=self._prompt_tokens))
                self._prompt_tokens = []
            text = self._outputs[index].text(event)
            if event.token_ids or text:
                yield self._response(token=pb.TokenOutput(output_index=index, tokens=self._tokens(event), text=text))
        elif isinstance(event, PromptLogprobs):
            self._prompt_tokens += self._scored(event)
        elif isinstance(event, SequenceFailed):
            raise event.error
        elif isinstance(event, SequenceFinished):
            self._outputs[index].totals = event.totals
            yield self._finished(index, _finished(event.finish))

    def cancelled(self) -> Iterator[pb.GenerateResponse]:
        """The ends of all outputs that go on."""
        for index in sorted(self.unfinished):
            finished = pb.GenerationFinished(reason=pb.FINISH_REASON_CANCELLED, message="the request was aborted")
            yield self._finished(index, finished)

    def failed(self, error: OutriderError) -> pb.GenerateResponse:
        """The end of the request by an error."""
        return self._response(error=engine_error(error), usage=self._usage())

    def _finished(self, index: int, finished: pb.GenerationFinished) -> pb.GenerateResponse:
        finished.output_index = index
        self.unfinished.discard(index)
        return self._response(finished=finished, usage=None if self.unfinished else self._usage())

    def _response(self, **fields: object) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._request_id, **fields)  # type: ignore[arg-type]

    def _usage(self) -> pb.Usage:
        prompt, completion = len(self._prompt), sum(output.completion_tokens for output in self._outputs)
        usage = pb.Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        # Those of the first: the others begin with its pages.
        if (totals := self._outputs[0].totals) is not None:
            usage.cached_prompt_tokens = totals.cached_tokens
        return usage

    def _tokens(self, verdict: StepVerdict) -> list[pb.TokenInfo]:
        if not verdict.logprobs:
            return [pb.TokenInfo(token_id=token) for token in verdict.token_ids]
        scored = zip(verdict.token_ids, verdict.logprobs, strict=True)
        return [self._token(token, entry.logprob, entry.top) for token, entry in scored]

    def _scored(self, event: PromptLogprobs) -> Iterator[pb.TokenInfo]:
        """The next tokens of the prompt."""
        logprobs, most = array("f", event.logprobs), event.alternatives
        ids, values = array("i", event.top_ids), array("f", event.top_logprobs)
        for place in range(event.first, event.first + event.count):
            # A prompt's first token has no log-probability.
            row = place - max(event.first, 1)
            if row < 0 or place < self._wanted.scored_from:
                yield pb.TokenInfo(token_id=self._prompt[place], token=self._name(self._prompt[place]))
                continue
            its = slice(row * most, (row + 1) * most)
            yield self._token(self._prompt[place], logprobs[row], list(zip(ids[its], values[its], strict=True)))

    def _token(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> pb.TokenInfo:
        """A token with its log-probability, and with its rank where it is one of the alternatives."""
        candidates = [
            pb.LogProb(token_id=other, logprob=value, token=self._name(other), rank=rank)
            for rank, (other, value) in enumerate(top, 1)
        ]
        info = pb.TokenInfo(token_id=token, token=self._name(token), logprob=logprob, candidates=candidates)
        rank = next((candidate.rank for candidate in candidates if candidate.token_id == token), None)
        if rank is not None:
            info.rank = rank
        return info

    def _name(self, token: int) -> str:
        # A part of a character has no text of its own.
        return "" if self._tokenizer is None else self._tokenizer.name(token).decode(errors="replace")


def _finished(finish: Finish) -> pb.GenerationFinished:
    """The end of an output by itself."""
    if finish.reason is FinishReason.LENGTH:
        return pb.GenerationFinished(reason=pb.FINISH_REASON_LENGTH)
    finished = pb.GenerationFinished(reason=pb.FINISH_REASON_STOP)
    if finish.stop_string is not None:
        finished.stop_match.stop_text = finish.stop_string
    elif finish.stop_token_id is not None and finish.reason is FinishReason.STOP:
        finished.stop_match.stop_token_id = finish.stop_token_id
    elif finish.stop_token_id is not None:
        finished.stop_match.eos_token_id = finish.stop_token_id
    return finished
