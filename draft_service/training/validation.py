"""The accepted length of drafts on held-out text, computed without a target in the loop.

In a text that the target wrote greedily, every next token is the target's choice. So a chain of greedy guesses from any
place is accepted up to the first guess that differs from the text, and up to there the head reads exactly what it would
read when drafting.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draft_service.training.batches import Batch, BatchPlan, make_batch
from draft_service.training.corpus import Texts
from draft_service.training.loss import most_probable
from draft_service.training.unrolling import Head, lm_heads, lm_inputs
from outrider.distillation import Reader

log = logging.getLogger(__name__)
# Guesses of a chain.
DEPTH = 7
# At most one in this many greedy texts is held back, but one at least.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Results of greedy chains of guesses: of `DEPTH` each, or of one for each Medusa head."""

    roots: int  # places that a chain was drafted from
    reached: tuple[float, ...]  # [depth] share of the chains that were accepted up to each depth or beyond
    # [depth] share of the guesses at each depth that were accepted, given that those before them were.
    by_depth: tuple[float, ...]
    mean_length: float  # tokens per step, the target's own included
    # Share of the text's tokens that are the teacher's most probable ones of the draft vocabulary. Less than one where
    # the text's token is not in the vocabulary, or reading and writing round differently.
    agreement: float


def hold_out(texts: Texts, wanted: int, temperatures: int) -> tuple[Texts, Texts]:
    """Texts to train on, and the first `wanted` greedy ones to validate with: a quarter of these at most, one at least.
    Answers to a held-out prompt at its other `temperatures` are not trained on either."""
    greedy = np.flatnonzero(texts.temperatures == 0)
    held = greedy[: min(wanted, max(1, len(greedy) // _SHARE))]
    questions = np.unique(texts.numbers[held] // temperatures)
    rest = np.flatnonzero(~np.isin(texts.numbers // temperatures, questions))
    return texts.choose(rest), texts.choose(held)


class Validator:
    """Measures a head on held-out texts."""

    def __init__(self, reader: Reader, plan: BatchPlan, depth: int = DEPTH) -> None:
        """On the plan's texts; a chain has `depth` guesses."""
        device = reader.weights().lm_head.device
        self._reader, self._depth = reader, depth
        self._batches = [
            make_batch(plan.texts, chosen, padded, depth, whole=True).to(device) for padded, chosen in plan.in_order()
        ]

    @torch.inference_mode()
    def measure(self, head: Head, seconds: float = math.inf) -> Acceptance:
        """Draft a chain from every place of every text, or of as many batches of them as take `seconds`, at least one:
        these are then measured from now on, so that results can be compared."""
        began, found = time.monotonic(), list[tuple[Tensor, Tensor]]()
        for batch in self._batches:
            if found and time.monotonic() - began >= seconds:
                break
            found.append(self._matches(head, batch))
        if len(found) < len(self._batches):
            log.info("validation takes %d of %d batches, in the time that there is", len(found), len(self._batches))
            del self._batches[len(found) :]
        matches, agreeing = zip(*found, strict=True)
        return acceptance_of(torch.cat(matches).cpu(), torch.cat(agreeing).cpu())

    def _matches(self, head: Head, batch: Batch) -> tuple[Tensor, Tensor]:
        """[roots, depth] whether each guess is the text's token, and [roots] whether the target's first one is."""
        lesson = self._reader.read(batch.token_ids, batch.distribution_rows, head.token_ids)
        lm_input = lm_inputs(head, lesson.states, batch.token_ids, self._depth).flatten(0, 2)
        rows, heads = lm_input.index_select(0, batch.rows), lm_heads(head)
        parts = torch.split(rows, batch.rows_of_heads(len(heads)))
        guessed = torch.cat([most_probable(own, lm_head) for own, lm_head in zip(parts, heads, strict=True)])
        target = lesson.probs.argmax(-1).index_select(0, batch.distributions[: batch.counts[0]])
        if head.token_ids is not None:
            guessed, target = head.token_ids[guessed], head.token_ids[target]
        agreeing = target == batch.next_tokens[: batch.counts[0]]
        return (guessed == batch.next_tokens).view(self._depth, -1).T, agreeing


def acceptance_of(matches: Tensor, agreeing: Tensor) -> Acceptance:
    """Acceptance from [roots, depth] whether each guess was right, and [roots] whether the teacher agrees."""
    roots = len(matches)
    reached = matches.long().cumprod(-1).double().sum(0) / max(1, roots)
    before = torch.cat([torch.ones(1, dtype=torch.float64), reached[:-1]])
    # 0 / 1e-12 where no chain came so far.
    by_depth = reached / before.clamp_min(1e-12)
    return Acceptance(
        roots=roots,
        reached=tuple(round(share, 4) for share in reached.tolist()),
        by_depth=tuple(round(share, 4) for share in by_depth.tolist()),
        mean_length=round(1.0 + float(reached.sum()), 4),
        agreement=round(float(agreeing.double().mean()) if roots else 0.0, 4),
    )
