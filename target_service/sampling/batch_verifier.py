"""Verifies, all at once, the sequences of a step whose logits are shaped first or whose log-probabilities are returned.

`SequenceVerifier.verify` is the definition. Row by row it takes a GPU some hundred launches and several waits for each
row; here the launches are those of one step, whatever its number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.sampling import TokenLogprobs
from outrider.tree import TokenTree
from target_service.grammars.following import TreeMasks, mask_logits
from target_service.sampling.adjustments import ADJUSTMENT, adjusted
from target_service.sampling.distribution import logprobs_of
from target_service.sampling.verifier import SequenceVerifier, Verified, emitted_tokens
from tree_kernels.verification import DeviceVerifier, Verdicts, Walk

# Integers of 16 bytes.
_ALIGNED = 4
# Rows at once, whose logits are copied: 33 MB for 128,256 tokens. Keys and values leave a tenth of what a GPU has free.
# One tree may have more.
_MOST_ROWS = 64


class Asked(NamedTuple):
    """One sequence to verify."""

    verifier: SequenceVerifier
    tree: TokenTree  # rows to verify, the root first
    first_row: int  # the root's row of the logits
    output: Sequence[int]  # tokens committed so far, without the prompt
    step: int  # of the sequence


class BatchVerifier:
    """See the module. For every 64 rows it waits for the device twice at most: for the walks, and for
    log-probabilities."""

    def __init__(self, verifier: DeviceVerifier, *, typical: bool = False) -> None:
        """`verifier` bounds every step, and nothing else may use it. `typical`: sequences may be verified by typical
        acceptance, so its kernels are compiled by `warm_up`."""
        self._verifier = verifier
        self._device = verifier.verdicts.tensor.device
        self._typical = typical

    def warm_up(self) -> None:
        """Compile every kernel that a step may need. Takes seconds, once."""
        self._verifier.warm_up(torch.float32, filtered=(True,), typical=(self._typical,))

    def verify(self, asked: Sequence[Asked], logits: Tensor) -> list[Verified]:
        """The outcome of each, given logits [rows, at least vocabulary] of the step."""
        return [outcome for part in _parts(asked) for outcome in self._verify(part, logits)]

    def _verify(self, asked: Sequence[Asked], logits: Tensor) -> list[Verified]:
        rows = [one.first_row + row for one in asked for row in range(len(one.tree))]
        shaped = logits[self._integers(rows), : self._verifier.vocabulary_size].float()
        self._shape(asked, shaped)
        masks = self._mask(asked, shaped)
        walks, lossy = self._walks(asked, shaped)
        errors = [None if own is None else own.error for own in masks]
        logprobs = self._logprobs(asked, walks, logits)
        outcomes = zip(walks, logprobs, lossy, errors, strict=True)
        return [Verified(walk, logprob, lossy=flags, error=error) for walk, logprob, flags, error in outcomes]

    def _copied(self, *parts: NDArray[np.int32]) -> list[Tensor]:
        """These on the device, by one copy. Each begins at an address of 16 bytes, since Triton compiles kernels anew
        for others, while requests wait."""
        starts = list(itertools.accumulate((-(-len(part) // _ALIGNED) * _ALIGNED for part in parts), initial=0))
        integers = np.zeros(starts[-1], np.int32)
        for start, part in zip(starts, parts, strict=False):
            integers[start : start + len(part)] = part
        on_device = torch.from_numpy(integers).to(self._device, non_blocking=True)
        return [on_device[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _shape(self, asked: Sequence[Asked], logits: Tensor) -> None:
        """Apply biases, penalties and held-back tokens to logits [rows of these trees, V] fp32."""
        first, parts = 0, [np.empty(0, ADJUSTMENT)]
        for one in asked:
            own = one.verifier.adjustments(one.tree, one.output)
            own["row"] += first
            parts.append(own)
            first += len(one.tree)
        wanted = np.concatenate(parts)
        if len(wanted):
            adjusted(logits, torch.from_numpy(wanted.view(np.uint8)).to(self._device, non_blocking=True))

    def _mask(self, asked: Sequence[Asked], logits: Tensor) -> list[TreeMasks | None]:
        """Apply the masks of grammars to logits [rows of these trees, V] fp32, and return them."""
        first, rows, words = 0, list[int](), list[NDArray[np.int32]]()
        masks = [one.verifier.masks(one.tree, one.output) for one in asked]
        for one, own in zip(asked, masks, strict=True):
            if own is not None:
                rows += range(first, first + len(one.tree))
                words.append(own.words)
            first += len(one.tree)
        if rows:
            on_device = torch.from_numpy(np.concatenate(words)).to(self._device, non_blocking=True)
            mask_logits(logits, self._integers(rows), on_device)
        return masks

    def _walks(self, asked: Sequence[Asked], logits: Tensor) -> tuple[list[Walk], list[tuple[bool, ...]]]:
        first, wanted, tokens, parents = 0, [], list[int](), list[int]()
        distributions: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for verifier, tree, _, output, step in asked:
            wanted.append(verifier.rows_to_verify(tree, first, verifier.prompt_length + len(output), step))
            tokens += tree.token_ids
            parents += tree.parents
            for row, drawn in tree.distributions.items():
                distributions[first + row] = (drawn.token_ids, drawn.weights)
            first += len(tree)
        parts = [np.array(tokens, np.int32), np.array(parents, np.int32), self._verifier.pack(wanted)]
        if distributions:
            parts.append(self._verifier.pack_distributions(distributions))
        # Always the same kernels, which are compiled: filters cost little beside the launches.
        typical = self._typical or any(one.verifier.lossy for one in asked)
        verdicts = self._verifier.sampled(logits, *self._copied(*parts), typical=typical)
        found = torch.cat([verdicts.tensor, self._verifier.lossy_rows]).cpu()
        host = Verdicts.over(found[: len(verdicts.tensor)], len(verdicts.accepted_counts))
        lossy_rows = found[len(verdicts.tensor) :].tolist()
        counts, next_tokens, accepted = (
            part.tolist() for part in (host.accepted_counts, host.next_tokens, host.accepted_rows)
        )
        walks, lossy = list[Walk](), list[tuple[bool, ...]]()
        for place, one in enumerate(asked):
            at = slice(wanted[place].first_row, wanted[place].first_row + counts[place])
            walks.append(Walk(tuple(accepted[at]), next_tokens[place]))
            lossy.append(tuple(map(bool, lossy_rows[at])) if one.verifier.lossy else ())
        return walks, lossy

    def _logprobs(
        self, asked: Sequence[Asked], walks: Sequence[Walk], logits: Tensor
    ) -> list[tuple[TokenLogprobs, ...]]:
        """Log-probabilities of every walk's tokens, by the raw logits, where they are returned."""
        rows, tokens, tops, counts = (list[int]() for _ in range(4))
        for one, walk in zip(asked, walks, strict=True):
            wanted = one.verifier.logprobs is not None and walk.finite
            own_rows, own_tokens = emitted_tokens(one.tree, walk) if wanted else ([], [])
            rows += [one.first_row + row for row in own_rows]
            tokens += own_tokens
            tops += [one.verifier.logprobs or 0] * len(own_rows)
            counts.append(len(own_rows))
        if not rows:
            return [()] * len(asked)
        own_logits = logits[self._integers(rows), : self._verifier.vocabulary_size]
        found = iter(logprobs_of(own_logits, self._integers(tokens), tops))
        return [tuple(itertools.islice(found, count)) for count in counts]


def _parts(asked: Sequence[Asked]) -> Iterator[list[Asked]]:
    """The sequences in order, in parts of `_MOST_ROWS` rows at most, or of one sequence."""
    part, rows = list[Asked](), 0
    for one in asked:
        if part and rows + len(one.tree) > _MOST_ROWS:
            yield part
            part, rows = [], 0
        part.append(one)
        rows += len(one.tree)
    if part:
        yield part
