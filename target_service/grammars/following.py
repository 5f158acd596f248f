"""One output's grammar: which tokens may come after each row of a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WORD = 32


class TreeMasks(NamedTuple):
    """Which tokens may follow each row: bit `token % 32` of `words[row, token // 32]`, words being int32. With an
    `error` they took more work than is allowed, and the output cannot go on."""

    words: NDArray[np.int32]
    error: InvalidField | None = None


class FollowedGrammar:
    """The state of a grammar after the tokens of one output: they alone decide it."""

    def __init__(
        self,
        matcher: LLMatcher,
        form: StructuredOutput,
        vocabulary_size: int,
        end_token_ids: Sequence[int],
    ) -> None:
        """`matcher` is at its beginning, and nothing else uses it. Symbols: V is the vocabulary size."""
        self._matcher = matcher
        self._form = form
        # Tokens of the output that the matcher has read.
        self._length = 0
        self._words = -(-vocabulary_size // _WORD)
        self._ends = frozenset(end_token_ids)
        bits = np.zeros(self._words * _WORD, bool)
        bits[list(end_token_ids)] = True
        # [words] int32: the end alone. For rows that no walk reaches, whose logits need some distribution.
        self._end_alone = np.packbits(bits, bitorder="little").view(np.int32)

    def masks(self, tree: TokenTree, output: Sequence[int]) -> TreeMasks:
        """The masks of a tree's rows, whose root is the last token of `output`, or of the prompt where that is empty.
        Each output must continue the one of the last call."""
        self._matcher.consume_tokens(list(output[self._length :]))
        self._length = len(output)
        words = np.tile(self._end_alone, (len(tree.token_ids), 1))
        children: dict[int, list[int]] = defaultdict(list)
        for row, parent in enumerate(tree.parents[1:], start=1):
            children[parent].append(row)
        if self._walk(tree, children, words):
            return TreeMasks(words)
        problem = "is too complex: a token of this output takes more work than is allowed"
        return TreeMasks(words, InvalidField(f"sampling.structured_output.{self._form.form}", problem))

    def _walk(self, tree: TokenTree, children: dict[int, list[int]], words: NDArray[np.int32]) -> bool:
        """Fill in the masks of all rows that the grammar allows, depth first, and lead the matcher back to the root.
        False where it has met a limit."""
        if not self._fill(0, words):
            return False
        # Rows of the path, each with those below it that are still to come. Not by recursion: a tree may be a chain of
        # a thousand rows.
        path = [(0, iter(children[0]))]
        while path:
            row, below = path[-1]
            child = next((one for one in below if self._goes_on(words[row], tree.token_ids[one])), None)
            if child is None:
                path.pop()
                if path and not self._matcher.rollback(1):
                    return False
            else:
                self._matcher.consume_token(tree.token_ids[child])
                if not self._fill(child, words):
                    return False
                path.append((child, iter(children[child])))
        return True

    def _fill(self, row: int, words: NDArray[np.int32]) -> bool:
        """Fill in the mask of the row that the matcher has come to. False where there is none."""
        # There may be a word more than the vocabulary has.
        words[row] = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        return not self._matcher.is_error() and bool(words[row].any())

    def _goes_on(self, mask: NDArray[np.int32], token: int) -> bool:
        """Whether a mask allows a token, and there is something behind it."""
        return bool(mask[token // _WORD] >> (token % _WORD) & 1) and token not in self._ends
