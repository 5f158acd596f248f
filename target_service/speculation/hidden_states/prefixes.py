"""Hidden states beside the pages of shared prefixes, so that a head resumes behind a prefix as it does behind a prompt.

A sequence that begins with pages of others computes no states for their tokens, and a head without them drafts worse.
The states are kept with the pages and sent once more; the head then reads the prefix itself, a single layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from target_service.core.sequence import Sequence
from target_service.speculation.hidden_states.kept import KeptVectors
from target_service.speculation.hidden_states.sending import Features
from tree_kernels.prefix_tree import PageStates


@dataclass(frozen=True, slots=True)
class EncodedStates:
    """The hidden states of one page's tokens, as they are sent."""

    form: Hashable  # of `Features.form`
    row_bytes: int
    data: bytes  # [page_size, row_bytes]

    @property
    def nbytes(self) -> int:
        return len(self.data)


class SharedPrefixStates:
    """What `SequencePages` needs of the hidden states of shared pages."""

    def __init__(
        self, features: Features, is_drafted: Callable[[Sequence], bool], worth: Callable[[Sequence], float]
    ) -> None:
        """`is_drafted`: whether the drafter gets the sequence now; `worth`: how many rows of a prompt take the time
        that it spares the sequence."""
        self._features = features
        self._is_drafted, self._worth = is_drafted, worth

    def most_without(self, sequence: Sequence) -> int:
        """Tokens that the sequence may skip without their states: all unless its drafter reads them, and those before
        the window of one that reads the last ones only."""
        window, known = self._features.window, len(sequence.token_ids)
        if window is None or not self._is_drafted(sequence):
            return known
        kept = self._features.kept_of(sequence.sequence_id)
        if kept is not None and kept.end:
            # A preempted sequence: the drafter has what was computed before.
            return kept.end
        return known - 1 - window if window else 0

    def most_read_again(self, sequence: Sequence) -> float:
        """Tokens beyond `most_without` that the sequence may read again for their states."""
        return self._worth(sequence)

    def of_page(self, sequence: Sequence, start: int, stop: int) -> EncodedStates | None:
        """The states of tokens `start` .. `stop`; None where they are not kept, or the drafter reads fewer of the last
        ones: it loses less than a page by that."""
        kept, window = self._features.kept_of(sequence.sequence_id), self._features.window
        if kept is None or window is None or 0 < window < stop - start:
            return None
        data = kept.copied(start, stop)
        return None if data is None else EncodedStates(self._features.form, kept.row_bytes, data)

    def resume(self, sequence: Sequence, start: int, pages: SequenceOf[PageStates]) -> bool:
        """Begin the sequence with these states of pages from token `start` on. False if one is of another form than is
        sent now."""
        states = [page for page in pages if isinstance(page, EncodedStates) and page.form == self._features.form]
        if len(states) < len(pages) or self._features.kept_of(sequence.sequence_id) is not None:
            return False
        kept = KeptVectors()
        for page in states:
            kept.append(
                max(start, kept.end), memoryview(page.data), page.row_bytes, [range(len(page.data) // page.row_bytes)]
            )
        self._features.restore(sequence.sequence_id, kept)
        return True
