"""One output's grammar: which tokens may come after each row of a tree, and which must."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WORD = 32


@dataclass(frozen=True)
class ConstrainedTree(TokenTree):
    """A tree without the rows that a grammar forbids, and with rows that it forces: tokens which alone may come."""

    forced: int = 0  # how many rows those are


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
        tokens_of: Callable[[bytes], Sequence[int]],
    ) -> None:
        """`matcher` is at its beginning, and nothing else uses it; `tokens_of` cuts a text into any of its tokens.
        Symbols: V is the vocabulary size."""
        self._matcher = matcher
        self._tokens_of = tokens_of
        self._form = form
        # Tokens of the output that the matcher has read.
        self._length = 0
        self._words = -(-vocabulary_size // _WORD)
        self._ends = frozenset(end_token_ids)
        bits = np.zeros(self._words * _WORD, bool)
        bits[list(end_token_ids)] = True
        # The tree that `constrained` made last, and its masks.
        self._kept: tuple[TokenTree, TreeMasks] | None = None
        # [words] int32: the end alone. For rows that no walk reaches, whose logits need some distribution.
        self._end_alone = np.packbits(bits, bitorder="little").view(np.int32)

    def begin_behind(self, output: Sequence[int], text: bytes) -> None:
        """Begin behind an output, which has the form's first `text` at its end. Once, before anything else."""
        self._matcher.consume_tokens(self._tokens_of(text))
        self._length = len(output)

    def constrained(self, tree: TokenTree, output: Sequence[int], most: int) -> TokenTree:
        """A tree of up to `most` rows below its root, made of one that has no more: without the rows that the grammar
        forbids, and with those that it forces where the tree ends. Its masks are kept for the next call of `masks`.
        Takes what `masks` does, and no draft distributions, which a row that is left out would make wrong."""
        rows = self._follow(tree, output, most)
        if rows is None:
            self._kept = tree, self._complexity(len(tree))
            return tree
        token_ids, sources, parents, words = zip(*rows, strict=True)
        scores = tuple([1.0 if source < 0 else tree.scores[source] for source in sources])
        found = ConstrainedTree(token_ids, parents, scores, forced=sources.count(-1))
        self._kept = found, TreeMasks(np.stack(words))
        return found

    def masks(self, tree: TokenTree, output: Sequence[int]) -> TreeMasks:
        """The masks of a tree's rows, whose root is the last token of `output`, or of the prompt where that is empty.
        Each output must continue the one of the last call."""
        if self._kept is not None and self._kept[0] is tree and self._length == len(output):
            return self._kept[1]
        rows = self._follow(tree, output, 0)
        if rows is None:
            return self._complexity(len(tree))
        words = np.tile(self._end_alone, (len(tree), 1))
        for row in rows:
            words[row.source] = row.words
        return TreeMasks(words)

    def _complexity(self, rows: int) -> TreeMasks:
        problem = "is too complex: a token of this output takes more work than is allowed"
        error = InvalidField(f"sampling.structured_output.{self._form.form}", problem)
        return TreeMasks(np.tile(self._end_alone, (rows, 1)), error)

    def _follow(self, tree: TokenTree, output: Sequence[int], most: int) -> list[_FollowedRow] | None:
        """The rows that the grammar allows, depth first, with forced ones below those that end the tree, up to `most`
        below the root in all. Leads the matcher back to the root. None where it has met a limit."""
        self._matcher.consume_tokens(list(output[self._length :]))
        self._length, self._kept = len(output), None
        children: dict[int, list[int]] = defaultdict(list)
        for row, parent in enumerate(tree.parents[1:], start=1):
            children[parent].append(row)
        words = self._words_here()
        if words is None:
            return None
        rows = [_FollowedRow(tree.token_ids[0], 0, 0, words)]
        # Rows of the path, each with what is still to come below it. Not by recursion: a tree may be a chain of a
        # thousand rows.
        path = [(0, self._below(tree, children[0], words, most))]
        while path:
            above, below = path[-1]
            # A tree without forced rows has room for its own.
            room = len(rows) <= max(most, len(tree) - 1)
            token, source = next(below, (-1, -1)) if room else (-1, -1)
            if token < 0:
                path.pop()
                if path and not self._matcher.rollback(1):
                    return None
                continue
            self._matcher.consume_token(token)
            words = self._words_here()
            if words is None:
                return None
            path.append((len(rows), self._below(tree, children[source] if source >= 0 else [], words, most)))
            rows.append(_FollowedRow(token, source, above, words))
        return rows

    def _below(
        self, tree: TokenTree, children: Sequence[int], words: NDArray[np.int32], most: int
    ) -> Iterator[tuple[int, int]]:
        """(token, row of the tree, -1 for none) of what may follow a row with these children: those of them that are
        allowed, or the one token that is."""
        allowed = [child for child in children if self._goes_on(words, tree.token_ids[child])]
        if allowed or not most:
            return iter([(tree.token_ids[child], child) for child in allowed])
        token = _only_token(words)
        return iter([] if token is None or token in self._ends else [(token, -1)])

    def _words_here(self) -> NDArray[np.int32] | None:
        """[words] the mask of the row that the matcher has come to; None where there is none."""
        # There may be a word more than the vocabulary has.
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        return None if self._matcher.is_error() or not words.any() else words

    def _goes_on(self, mask: NDArray[np.int32], token: int) -> bool:
        """Whether a mask allows a token, and there is something behind it."""
        return bool(mask[token // _WORD] >> (token % _WORD) & 1) and token not in self._ends


class _FollowedRow(NamedTuple):
    token: int
    source: int  # the row of the tree that was followed; -1 for one that was forced
    parent: int
    words: NDArray[np.int32]  # what may come next


def _only_token(words: NDArray[np.int32]) -> int | None:
    """The token that a mask allows, if it is one alone."""
    places = np.flatnonzero(words)
    if len(places) != 1:
        return None
    word = int(words[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(places[0]) * _WORD + word.bit_length() - 1
