"""Where in an output a form begins: behind a text that the model may write, or never does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from target_service.core.sequence import TriggeredForm
from target_service.grammars.following import FollowedGrammar


class FormTrigger:
    """Looks for a trigger in the tokens of one output.

    What a token holds beside the trigger would come before the form is known. So where a token's text goes on behind
    it, that token is not the output's: another is drawn in its place, held to the form, which begins with the trigger.
    Where the form begins, and what comes behind, thus depend on the output alone, and not on how its tokens were
    grouped into steps.
    """

    def __init__(self, form: TriggeredForm, grammar: FollowedGrammar, text_of: Callable[[int], bytes]) -> None:
        """`grammar` is that of the form, at its beginning; `text_of` has a token's text."""
        self.form = form.form
        self._grammar, self._text_of = grammar, text_of
        self._trigger, self._only_first = form.trigger.encode(), form.only_first
        self._reasons = form.reasons
        self._begin, self._end = (mark.encode() for mark in form.reasoning or ("", ""))
        self._longest = max(map(len, (self._trigger, self._begin, self._end)))
        # The end of the text that was looked at and may begin what is looked for.
        self._tail = b""
        # How much of the trigger the output has; of an output that has gone on otherwise, no more is expected.
        self._had = 0
        self._over = False

    def cut(self, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens, which follow those of earlier calls, are the output's, if the form begins behind
        them; None if it does not begin yet."""
        for place, token in enumerate(token_ids):
            if self._over:
                return None
            before = len(self._tail)
            behind = self._look_at(self._text_of(token))
            if behind is not None:
                if not behind:
                    self._had = len(self._trigger)
                    return place + 1
                self._had = max(0, before - self._skipped)
                return place
        return None

    def begun(self, output: Sequence[int]) -> FollowedGrammar:
        """The form's grammar behind an output that `cut` has ended."""
        self._grammar.begin_behind(output, self._trigger[: self._had])
        return self._grammar

    def _look_at(self, text: bytes) -> int | None:
        """The bytes of a token behind the trigger; None where it is not found."""
        if self._only_first:
            return self._look_at_beginning(text)
        self._skipped = 0
        text = self._tail + text
        while True:
            wanted = [self._end] if self._reasons else [self._trigger, self._begin]
            found = [(text.find(each), each) for each in wanted if each]
            place, mark = min([each for each in found if each[0] >= 0], default=(-1, b""))
            if place < 0:
                self._tail = text[max(0, len(text) - self._longest + 1) :]
                return None
            self._skipped += place
            if mark == self._trigger and not self._reasons:
                return len(text) - place - len(mark)
            self._reasons = not self._reasons
            self._skipped += len(mark)
            text = text[place + len(mark) :]

    def _look_at_beginning(self, text: bytes) -> int | None:
        """The same of a trigger that stands where the output begins, if it stands at all."""
        whole = self._tail + text
        stripped = whole.lstrip()
        self._skipped = len(whole) - len(stripped)
        if stripped.startswith(self._trigger):
            return len(stripped) - len(self._trigger)
        self._over = not self._trigger.startswith(stripped)
        self._tail = whole
        return None
