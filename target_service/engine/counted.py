"""Which outcomes of a step count, and how many of their tokens; log-probabilities of the prompts that it read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from outrider.errors import LogitsNotFinite, OutriderError
from outrider.tree import TokenTree
from target_service.core.sequence import DevicePass, PromptLogprobs, Sequence
from target_service.engine.step import Step
from target_service.execution.batch import StepItem
from target_service.sampling.verifier import Verified
from target_service.speculation.policy.live_sequence import LiveSequence
from tree_kernels.verification import Walk

log = logging.getLogger(__name__)


@dataclass
class CountedOutcomes:
    """Of one step.

    Attributes:
        outcomes: by place in the step; None where nothing of it is committed.
        failed: sequences that end with an error: their logits are no finite numbers, or their form takes too much work.
        drafts_broken: those whose logits may be no finite numbers because of their drafts.
        forms: those whose form begins behind what is committed; what they generated behind that is left out.
        scores: log-probabilities of prompts, as events.
    """

    outcomes: list[Verified | None]
    failed: list[tuple[Sequence, OutriderError]] = field(default_factory=list)
    drafts_broken: list[Sequence] = field(default_factory=list)
    forms: list[LiveSequence] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)


def count_outcomes(step: Step, lives: Mapping[int, LiveSequence], dtype: torch.dtype) -> CountedOutcomes:
    """What counts of the outcomes of a step that has ended; `lives` are the sequences under way, and `dtype` the
    model's."""
    outcomes = step.launched.outcomes()
    counted = CountedOutcomes(list(outcomes))
    for place, (item, outcome) in enumerate(zip(step.batch.items, outcomes, strict=True)):
        if outcome is None:
            continue
        live = lives.get(item.sequence.sequence_id)
        if item.tree is None or not outcome.finite or outcome.error is not None:
            counted.outcomes[place] = None
            if item.tree is not None and live is not None:
                _count_broken(counted, item, outcome, dtype)
        elif live is not None and live.trigger is not None:
            kept = live.trigger.cut(outcome.tokens(item.tree))
            if kept is not None:
                counted.outcomes[place] = first_tokens(outcome, item.tree, kept) if kept else None
                counted.forms.append(live)
    _count_scores(counted, step, lives, dtype)
    return counted


def _count_broken(counted: CountedOutcomes, item: StepItem, outcome: Verified, dtype: torch.dtype) -> None:
    sequence = item.sequence
    if outcome.error is not None:
        counted.failed.append((sequence, outcome.error))
    elif _may_be_the_drafts(item, outcome):
        counted.drafts_broken.append(sequence)
    else:
        counted.failed.append((sequence, _logits_not_finite(sequence, dtype)))


def _count_scores(counted: CountedOutcomes, step: Step, lives: Mapping[int, LiveSequence], dtype: torch.dtype) -> None:
    ended = {sequence.sequence_id for sequence, _ in counted.failed}
    for item, scores in step.launched.prompt_logprobs():
        sequence = item.sequence
        if sequence.sequence_id not in lives or sequence.sequence_id in ended:
            continue
        if scores is None:
            counted.failed.append((sequence, _logits_not_finite(sequence, dtype)))
        else:
            counted.scores.append(scores)


def first_tokens(outcome: Verified, tree: TokenTree, count: int) -> Verified:
    """The outcome as if its passes had brought its first `count` tokens alone, one at least."""
    tokens, rows = outcome.tokens(tree), outcome.walk.accepted_rows
    walk, following, passes = outcome.walk, outcome.following[: max(0, count - 1 - len(rows))], list[DevicePass]()
    if count <= len(rows):
        walk = Walk(rows[: count - 1], tokens[count - 1])
    left = count
    for one in outcome.device_passes:
        if left:
            accepted = min(one.accepted, left - 1)
            from_table = min(one.accepted_from_table, accepted)
            passes.append(one._replace(accepted=accepted, accepted_from_table=from_table, path=one.path[:accepted]))
            left -= accepted + 1
    cut = Verified(walk, outcome.logprobs[:count], following, tuple(passes))
    return cut._replace(lossy=outcome.lossy[: cut.accepted])


def _may_be_the_drafts(item: StepItem, outcome: Verified) -> bool:
    """Whether logits that are not finite may come from drafted rows, and not from the tokens of the sequence itself.

    Attention gives a hidden key no weight, but 0 times a value that is NaN or infinite is NaN: one drafted token with
    such values reaches every row of its tree. Plain decoding would not read it. A client's own tree is its own affair.
    """
    if item.tree is None or item.sequence.request.external:
        return False
    return item.tree.drafted > 0 or any(one.drafted for one in outcome.device_passes)


def _logits_not_finite(sequence: Sequence, dtype: torch.dtype) -> LogitsNotFinite:
    """The error that ends a sequence whose own tokens have such logits; it is logged."""
    length, kind = len(sequence.token_ids), str(dtype).removeprefix("torch.")
    log.error("request %d ended: logits behind %d tokens are not finite", sequence.sequence_id, length)
    return LogitsNotFinite(f"the model's logits are not finite numbers in {kind}", tokens=length)
