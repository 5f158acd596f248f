"""Where an output ends, independent of how its tokens were grouped into steps."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.sampling import FinishReason, SamplingParams
from target_service.core.sequence import Finish
from target_service.text.tokenizer import ModelTokenizer


class StopChecker:
    """Decides token by token where one output ends."""

    def __init__(
        self,
        params: SamplingParams,
        end_token_ids: Sequence[int],
        max_tokens: int,
        tokenizer: ModelTokenizer | None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._ends = frozenset(() if params.ignore_eos else end_token_ids)
        self._stops = frozenset(params.stop_token_ids)
        self._either = self._ends | self._stops
        self._min_tokens = params.min_tokens
        # A form of output ends where it ends, whatever the minimum.
        self._ends_early = params.structured_output is not None
        self._max_tokens = max_tokens
        self._text = tokenizer.answer(prompt, params.stop) if params.stop and tokenizer is not None else None

    def begin_form(self) -> None:
        """The output is held to a form from now on."""
        self._ends_early = True

    def cut(self, length: int, new_ids: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of `new_ids`, which follow `length` others, are kept, and why the output ends there, if it does.
        Call once per commit."""
        goes_on = length + len(new_ids) < self._max_tokens and self._either.isdisjoint(new_ids)
        if goes_on and self._text is None:
            # Nearly all commits.
            return len(new_ids), None
        for count, token in enumerate(new_ids, start=1):
            past_minimum = length + count > self._min_tokens
            if token in self._stops and past_minimum:
                return count, Finish(FinishReason.STOP, stop_token_id=token)
            if token in self._ends and (past_minimum or self._ends_early):
                return count, Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=token)
            if self._text is not None:
                self._text.push((token,))
                if self._text.matched is not None:
                    return count, Finish(FinishReason.STOP, stop_string=self._text.matched)
            if length + count >= self._max_tokens:
                return count, Finish(FinishReason.LENGTH)
        return len(new_ids), None
