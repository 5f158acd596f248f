"""Which drafted rows the target keeps, and what it says next. Every rule here leaves the target's law as it was.

Words: a row is *accepted* when the target agrees with it and with every row above it; the *next token* is the target's
own, *bonus* if the path ended at a leaf, *recovered* otherwise. The root is committed already and is never listed.

Sources: Leviathan et al. (arXiv 2211.17192) for one draft; Jeon et al., "Recursive speculative decoding" (arXiv
2402.14160) for siblings drawn without replacement; Daliri, Musco, Suresh (arXiv 2408.07978) for the coupled race.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels.noise import exponentials, race_exponentials, race_words_of

# Below this share of the vocabulary, drawing the noise of single tokens costs less than that of all.
_SPARSE_SHARE = 8


@dataclass(frozen=True, slots=True)
class Walk:
    """The outcome of one verify step: accepted rows from the root's child down, and the target's own next token."""

    accepted_rows: tuple[int, ...]
    next_token: int


def match_walk(parents: Sequence[int], token_ids: Sequence[int], choose: Callable[[int, int], int]) -> Walk:
    """Follow the target's own choices down the tree, as far as the tree holds them (GREEDY and COUPLED).

    Lossless for every tree that was made without looking at the choices' coins, because every token that comes out is
    the target's own choice.

    Args:
        parents: [rows], parents[i] < i; row 0 is the root.
        token_ids: [rows]; siblings carry different tokens.
        choose: the target's token after a row, given the row and its depth below the root. Called once per row of the
            path, root first.
    """
    children = _children(parents)
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
    """The winner of the exponential race: argmin of E(seed, position, y) / probs[y]. A draw from `probs`.

    Tokens of probability zero never win; ties go to the lowest id.

    Args:
        probs: [V], non-negative, at least one positive; need not sum to 1.
        seed: 64-bit seed of the request.
        position: absolute index of the token that is chosen.
    """
    if int(probs.count_nonzero()) * _SPARSE_SHARE < len(probs):
        entrants = probs.nonzero()[:, 0]
        noise = exponentials(race_words_of(seed, position, entrants))
        return int(entrants[torch.argmin(noise / probs[entrants].double())])
    # Noise is positive, so a token of probability zero finishes at infinity.
    return int(torch.argmin(race_exponentials(seed, position, len(probs), probs.device).div_(probs.double())))


def rejection_walk(
    parents: Sequence[int],
    token_ids: Sequence[int],
    distributions: Mapping[int, tuple[Sequence[int], Sequence[int]]],
    probs_of: Callable[[int, int], Tensor],
    coin: Callable[[], float],
) -> Walk:
    """Recursive rejection sampling over a tree (REJECTION).

    The output has the target's law if the children of each row with a distribution were drawn from it one after the
    other without replacement, in row order, and the children of every other row were chosen without looking at the
    target's coins (each is then a point mass). A child outside its row's distribution counts as a point mass too.

    Args:
        parents: [rows], parents[i] < i; row 0 is the root. Rows are in draw order.
        token_ids: [rows]; siblings carry different tokens.
        distributions: by row of the parent, token ids and integer weights >= 1; token i had probability
            weights[i] / sum(weights).
        probs_of: the target's law [V] after a row, given the row and its depth below the root.
        coin: a fresh uniform in [0, 1).
    """
    children = _children(parents)
    accepted: list[int] = []
    row = 0
    while True:
        residual = _Residual(probs_of(row, len(accepted)), distributions.get(row))
        match = next((child for child in children[row] if residual.accepts(token_ids[child], coin())), None)
        if match is None:
            return Walk(tuple(accepted), residual.draw(coin()))
        accepted.append(match)
        row = match


class _Residual:
    """What is left of the target's law at one row, after the children that it rejected.

    `_probs` is not normalised: `_mass` is its sum.
    """

    def __init__(self, probs: Tensor, distribution: tuple[Sequence[int], Sequence[int]] | None) -> None:
        self._probs = probs.to(device="cpu", dtype=torch.float64, copy=True)
        self._mass = float(self._probs.sum())
        self._weights = dict(zip(*distribution, strict=True)) if distribution else {}

    def accepts(self, token_id: int, coin: float) -> bool:
        """Accept with probability min(1, p / q); else take the draft's law away from the target's."""
        weight = self._weights.get(token_id)
        total = sum(self._weights.values())
        draft_prob = 1.0 if weight is None else weight / total
        # Strict, so that a coin of 0 accepts nothing that has probability 0.
        if coin * draft_prob * self._mass < float(self._probs[token_id]):
            return True
        if weight is None:
            self._subtract([token_id], [1.0])
        else:
            self._subtract(list(self._weights), [w / total for w in self._weights.values()])
            del self._weights[token_id]
        return False

    def draw(self, coin: float) -> int:
        """A token of the residual law, by inversion; never one of probability zero."""
        cumulative = self._probs.cumsum(0)
        token = int(torch.searchsorted(cumulative, coin * float(cumulative[-1]), right=True))
        if token < len(cumulative):
            return token
        # Rounding carried the coin past the end.
        return int(self._probs.nonzero()[-1])

    def _subtract(self, token_ids: list[int], draft_probs: list[float]) -> None:
        index = torch.tensor(token_ids)
        left = self._probs[index] - self._mass * torch.tensor(draft_probs, dtype=torch.float64)
        residual = self._probs.index_copy(0, index, left.clamp_(min=0.0))
        mass = float(residual.sum())
        # Where the two laws are equal no draft is ever rejected, except by rounding: keep the law then.
        if mass > 0.0:
            self._probs, self._mass = residual, mass


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for row in range(1, len(parents)):
        children[parents[row]].append(row)
    return children
