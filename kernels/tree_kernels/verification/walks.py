"""Which drafted rows the target accepts, and its next token. Every rule here preserves the target's distribution.

Words: a row is *accepted* when the target agrees with it and with every row above it; the *next token* is the target's
own, *bonus* if the path ended at a leaf, *recovered* otherwise. The root is committed already and is never listed.

Sources: Leviathan et al. (arXiv 2211.17192) for one draft; Jeon et al., "Recursive speculative decoding" (arXiv
2402.14160) for siblings drawn without replacement; Daliri, Musco, Suresh (arXiv 2408.07978) for coupled Gumbel-max
draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tree_kernels.philox import exponentials, gumbel_words, gumbel_words_of
from tree_kernels.verification.records import NOT_FINITE


class Walk(NamedTuple):
    """The outcome of one verify step: accepted rows from the root's child down, and the target's own next token. A
    named tuple, since a step makes one for every sequence."""

    accepted_rows: tuple[int, ...]
    next_token: int  # with `NOT_FINITE` where the last row's logits are no finite numbers

    @property
    def finite(self) -> bool:
        """Whether the next token may be generated."""
        return self.next_token < NOT_FINITE


def match_walk(parents: Sequence[int], token_ids: Sequence[int], choose: Callable[[int, int], int]) -> Walk:
    """Follow the target's own choices down the tree, as far as the tree holds them (GREEDY and COUPLED).

    Lossless for every tree that was made without the choices' coins, because every token is the target's own choice.

    Args:
        parents: [rows], parents[i] < i; row 0 is the root.
        token_ids: [rows]; of siblings with the same token the first is followed.
        choose: the target's token after a row, given the row and its depth below the root. Called once per row of the
            path, root first.
    """
    children = children_of(parents)
    accepted: list[int] = []
    row = 0
    while True:
        token = choose(row, len(accepted))
        match = next((child for child in children[row] if token_ids[child] == token), None)
        if match is None:
            return Walk(tuple(accepted), token)
        accepted.append(match)
        row = match


def coupled_token(probs: Tensor, seed: int, position: int) -> int:
    """The winner of the exponential race, which is the Gumbel-max trick: argmin of E(seed, position, y) / probs[y]. A
    draw from `probs`.

    Tokens of probability zero never win; ties go to the lowest id. `probs` [V] are non-negative, at least one positive,
    and need not sum to 1; `seed` is the request's, of 64 bits; `position` is the absolute index of the chosen token.
    """
    # Below this share of the vocabulary, drawing the noise of single tokens costs less than that of all.
    if int(probs.count_nonzero()) * 8 < len(probs):
        entrants = probs.nonzero()[:, 0]
        noise = exponentials(gumbel_words_of(seed, position, entrants))
        return int(entrants[torch.argmin(noise / probs[entrants].double())])
    # Noise is positive, so a token of probability zero finishes at infinity.
    noise = exponentials(gumbel_words(seed, position, len(probs), probs.device))
    return int(torch.argmin(noise.div_(probs.double())))


class Chance:
    """Every random decision of rejection sampling, by one coin each: uniforms in [0, 1)."""

    def __init__(self, coin: Callable[[], float]) -> None:
        self._coin = coin

    def accept(self, probability: float) -> bool:
        """True with the given probability, which may exceed 1; never true for 0."""
        # Strict, so that a coin of 0 accepts nothing that has probability 0.
        return self._coin() < probability

    def draw(self, weights: Tensor) -> int:
        """An index of weights [V] in proportion to them, which are non-negative and not all zero."""
        cumulative = weights.cumsum(0)
        token = int(torch.searchsorted(cumulative, self._coin() * float(cumulative[-1]), right=True))
        if token < len(cumulative):
            return token
        # Rounding carried the coin past the end.
        return int(weights.nonzero()[-1])


def rejection_walk(
    parents: Sequence[int],
    token_ids: Sequence[int],
    distributions: Mapping[int, tuple[Sequence[int], Sequence[int]]],
    probs_of: Callable[[int, int], Tensor | None],
    chance: Chance,
) -> Walk:
    """Recursive rejection sampling over a tree (REJECTION).

    The output has the target's distribution if the children of each row with a distribution were drawn from it one
    after the other without replacement, in row order, and the children of every other row were chosen without the
    target's coins (each is then a point mass). A child outside its row's distribution counts as a point mass too.

    Args:
        parents: [rows], parents[i] < i; row 0 is the root. Rows are in draw order.
        token_ids: [rows]; siblings carry different tokens.
        distributions: by row of the parent, token ids and integer weights >= 1; token i had probability
            weights[i] / sum(weights).
        probs_of: the target's distribution [V] after a row, given the row and its depth below the root; it need not sum
            to 1. None where its logits are no finite numbers, which ends the walk. Called once per row of the path,
            root first.
        chance: takes at most one decision for each row below the root, and one for the next token.
    """
    children = children_of(parents)
    accepted: list[int] = []
    row = 0
    while True:
        probs = probs_of(row, len(accepted))
        if probs is None:
            return Walk(tuple(accepted), NOT_FINITE)
        residual = _Residual(probs, distributions.get(row))
        match = next((child for child in children[row] if residual.accepts(token_ids[child], chance)), None)
        if match is None:
            return Walk(tuple(accepted), chance.draw(residual.weights))
        accepted.append(match)
        row = match


class _Residual:
    """The residual of the target's distribution at one row, after the children that it rejected.

    `weights` [V] is not normalised: `_mass` is its sum.
    """

    def __init__(self, probs: Tensor, distribution: tuple[Sequence[int], Sequence[int]] | None) -> None:
        self.weights = probs.to(device="cpu", dtype=torch.float64, copy=True)
        self._mass = float(self.weights.sum())
        self._draft = dict(zip(*distribution, strict=True)) if distribution else {}

    def accepts(self, token_id: int, chance: Chance) -> bool:
        """Accept with probability min(1, p / q); else subtract the draft's distribution from the target's."""
        draft = self._draft if token_id in self._draft else {token_id: 1}
        total = sum(draft.values())
        draft_mass = self._mass * draft[token_id] / total
        if chance.accept(float(self.weights[token_id]) / draft_mass):
            return True
        self._subtract(list(draft), [weight / total for weight in draft.values()])
        # Without replacement: the next sibling was drawn from the rest.
        self._draft.pop(token_id, None)
        return False

    def _subtract(self, token_ids: list[int], draft_probs: list[float]) -> None:
        index = torch.tensor(token_ids)
        left = self.weights[index] - self._mass * torch.tensor(draft_probs, dtype=torch.float64)
        residual = self.weights.index_copy(0, index, left.clamp_(min=0.0))
        mass = float(residual.sum())
        # Equal distributions reject no draft except by rounding: then the distribution is kept.
        if mass > 0.0:
            self.weights, self._mass = residual, mass


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The children of each row, in rising order."""
    children: list[list[int]] = [[] for _ in parents]
    for row in range(1, len(parents)):
        children[parents[row]].append(row)
    return children
