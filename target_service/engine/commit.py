"""Commits a verified step to its sequences: tokens, KV, totals, pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from outrider.tree import TokenTree, VerifiedTree
from target_service.core.sequence import SequenceState, SequenceTotals, StepVerdict
from target_service.core.sequence_pages import SequencePages
from target_service.engine.step import Step
from target_service.sampling.verifier import Verified
from target_service.speculation.merged_tree import PredictedTree
from target_service.speculation.policy.live_sequence import LiveSequence


def commit(
    live: LiveSequence, tree: TokenTree, outcome: Verified, compute_ns: int, *, model_version: int, kept: bool = True
) -> StepVerdict:
    """Append the tokens of a step, and return its verdict. `model_version` is that of the weights that it ran with.

    The KV of its known tokens was counted at its launch; that of accepted ones counts if the sequence has `kept` its
    pages since.
    """
    sequence, walk, totals = live.sequence, outcome.walk, live.sequence.totals
    passes, by_step = outcome.passes, tuple([one.accepted for one in outcome.device_passes])
    # What was verified is unknown here where the device chose rows, and of passes launched at once.
    root, shows = sequence.root, sequence.request.trees and passes == 1 and not by_step
    tokens = outcome.tokens(tree)
    kept_tokens, finish = live.stops.cut(totals.completion_tokens, tokens)
    del tokens[kept_tokens:]
    accepted = tuple(walk.accepted_rows[:kept_tokens])
    sequence.token_ids += tokens
    if kept:
        sequence.kv_length += min(len(accepted), kept_tokens - 1) + sum(by_step)
        sequence.state = SequenceState.RUNNING
    sequence.external_tree = None
    queue_ns = totals.started_ns - totals.arrived_ns if sequence.step == 0 else 0
    if finish is not None:
        by_step = _kept_drafts(by_step, kept_tokens)
    sequence.step += passes
    verdict = StepVerdict(
        sequence_id=sequence.sequence_id,
        step=sequence.step - 1,
        accepted_rows=accepted,
        token_ids=tuple(tokens),
        drafted_tokens=len(accepted) + sum(by_step),
        logprobs=outcome.logprobs[:kept_tokens],
        finish=finish,
        queue_ns=queue_ns,
        compute_ns=compute_ns,
        drafts_by_step=by_step if any(by_step[1:]) else (),
        model_version=model_version,
        # The tree of a step prepared before its root was known holds another token there.
        tree=VerifiedTree((root, *tree.token_ids[1:]), tuple(tree.parents), accepted) if shows else None,
    )
    if outcome.lossy:
        totals.lossy_tokens += sum(outcome.lossy[: verdict.drafted_tokens])
    if isinstance(tree, PredictedTree):
        totals.predicted_tokens += tree.predicted_rows
        totals.accepted_predicted_tokens += tree.accepted_predicted(accepted)
    if tree.drafted:
        _count_drafts(totals, tree.drafted, max(tree.depths), len(accepted))
    # Passes after the end of the sequence do not count.
    for one, drafts in zip(outcome.device_passes, by_step, strict=False):
        if one.drafted:
            # The depth of its tree is unknown: at least that of the accepted rows.
            _count_drafts(totals, one.drafted, max(1, drafts), drafts)
    now = time.monotonic_ns()
    totals.first_token_ns = totals.first_token_ns or now
    totals.completion_tokens += len(tokens)
    totals.steps += verdict.passes
    totals.accepted_tokens += verdict.drafted_tokens
    if finish is not None:
        totals.finished_ns = now
    return verdict


def _kept_drafts(accepted_by_pass: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Drafted tokens by pass among the first `tokens`, of passes that each accepted some and sampled one more."""
    kept: list[int] = []
    for accepted in accepted_by_pass:
        if tokens:
            kept.append(min(accepted, tokens))
            tokens -= min(accepted + 1, tokens)
    return tuple(kept)


def _count_drafts(totals: SequenceTotals, rows: int, depth: int, accepted: int) -> None:
    """Count a pass that verified `rows` drafted rows, down to `depth`, and accepted some."""
    totals.drafted_steps += 1
    totals.drafted_tokens += rows
    _count_depths(totals.drafted_by_depth, depth)
    _count_depths(totals.accepted_by_depth, accepted)


def _count_depths(counts: list[int], depth: int) -> None:
    """Add one to the first `depth` counts."""
    if depth > len(counts):
        counts.extend([0] * (depth - len(counts)))
    for d in range(depth):
        counts[d] += 1


def publish_pages(
    step: Step,
    outcomes: SequenceOf[Verified | None],
    live: Mapping[int, LiveSequence],
    pages: SequencePages,
) -> None:
    """Let other sequences share the pages that `step` filled, and windows leave theirs."""
    for item, outcome in zip(step.batch.items, outcomes, strict=True):
        sequence = item.sequence
        if item.kept and sequence.sequence_id in live:
            # A chunk that did not reach the root has no outcome; behind a commit all keys but the root's are final.
            computed = item.start + item.known if outcome is None else len(sequence.token_ids) - 1
            pages.publish(sequence, computed)
            pages.leave_windows(sequence, computed)


def trim_pages(step: Step, pages: SequencePages, needed: Mapping[int, int]) -> None:
    """Give back the pages of rows that `step` did not accept, but for keys that the step under way needs, by sequence
    id."""
    if step.has_drafts and pages.scarce:
        for item in step.batch.items:
            if item.kept:
                pages.trim(item.sequence, needed.get(item.sequence.sequence_id, 0))
