"""Log-probabilities of the prompts that a step read, as events."""

from __future__ import annotations

from collections.abc import Container

from target_service.core.sequence import PromptLogprobs, Sequence
from target_service.engine.step import Step


def prompt_events(step: Step, live: Container[int]) -> tuple[list[PromptLogprobs], list[Sequence]]:
    """The events of sequences that return them, and sequences whose prompts have logits that are no finite numbers;
    both of those whose ids are in `live`."""
    scored = [each for each in step.launched.prompt_logprobs() if each.item.sequence.sequence_id in live]
    events = [scores for _, scores in scored if scores is not None]
    return events, [item.sequence for item, scores in scored if scores is None]
