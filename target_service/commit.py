"""Applies a verified step once: tokens, KV, totals. Nothing is written before everything is known."""

from __future__ import annotations

import time
from dataclasses import dataclass

from outrider.tree import TokenTree
from target_service.row_budget import SequenceRecord
from target_service.sequence import Finish, Sequence, SequenceState, Verdict
from target_service.stopping import StopChecker
from target_service.verifier import SequenceVerifier, Verified


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence with what verifies and ends it."""

    sequence: Sequence
    verifier: SequenceVerifier
    stops: StopChecker
    record: SequenceRecord


def commit(live: LiveSequence, tree: TokenTree, outcome: Verified, compute_ns: int, *, kept: bool = True) -> Verdict:
    """Append what the step said, and return its verdict. The KV of its known tokens was counted at its launch, and
    that of accepted ones counts if the sequence has `kept` its pages since."""
    sequence, walk, now = live.sequence, outcome.walk, time.monotonic_ns()
    tokens = [*(tree.token_ids[row] for row in walk.accepted_rows), walk.next_token, *outcome.following]
    kept_tokens, finish = live.stops.cut(sequence.totals.completion_tokens, tokens)
    del tokens[kept_tokens:]
    accepted = walk.accepted_rows[:kept_tokens]
    sequence.token_ids.extend(tokens)
    if kept:
        sequence.kv_length += min(len(accepted), kept_tokens - 1)
        sequence.state = SequenceState.RUNNING
    sequence.external_tree = None
    queue_ns = sequence.totals.started_ns - sequence.totals.arrived_ns if sequence.step == 0 else 0
    verdict = Verdict(
        sequence_id=sequence.sequence_id,
        step=sequence.step,
        accepted_rows=accepted,
        token_ids=tuple(tokens),
        drafted_tokens=len(accepted),
        logprobs=outcome.logprobs[:kept_tokens],
        finish=finish,
        queue_ns=queue_ns,
        compute_ns=compute_ns,
    )
    sequence.step += 1 + len(outcome.following)
    _count(sequence, tree, verdict, finish, now)
    return verdict


def _count(sequence: Sequence, tree: TokenTree, verdict: Verdict, finish: Finish | None, now: int) -> None:
    totals = sequence.totals
    totals.first_token_ns = totals.first_token_ns or now
    totals.completion_tokens += len(verdict.token_ids)
    totals.steps += verdict.passes
    totals.accepted_tokens += verdict.drafted_tokens
    if tree.drafted:
        totals.drafted_steps += 1
        totals.drafted_tokens += tree.drafted
        _count_depths(totals.drafted_by_depth, max(tree.depths))
        _count_depths(totals.accepted_by_depth, verdict.drafted_tokens)
    if finish is not None:
        totals.finished_ns = now


def _count_depths(counts: list[int], depth: int) -> None:
    """Add one to the first `depth` counts."""
    counts.extend([0] * (depth - len(counts)))
    for d in range(depth):
        counts[d] += 1
