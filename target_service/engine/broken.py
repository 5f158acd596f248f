"""Outcomes whose logits are no finite numbers: whether the drafts may be why, and the error where they are not."""

from __future__ import annotations

import logging

import torch

from outrider.errors import LogitsNotFinite
from target_service.core.sequence import Sequence
from target_service.execution.batch import StepItem
from target_service.sampling.verifier import Verified

log = logging.getLogger(__name__)


def may_be_the_drafts(item: StepItem, outcome: Verified) -> bool:
    """Whether logits that are not finite may come from drafted rows, and not from the tokens of the sequence itself.

    Attention gives a hidden key no weight, but 0 times a value that is NaN or infinite is NaN: one drafted token with
    such values reaches every row of its tree. Plain decoding would not read it. A client's own tree is its own affair.
    """
    if item.tree is None or item.sequence.request.external:
        return False
    return item.tree.drafted > 0 or any(one.drafted for one in outcome.device_passes)


def logits_not_finite(sequence: Sequence, dtype: torch.dtype) -> LogitsNotFinite:
    """The error that ends a sequence whose own tokens have such logits; it is logged."""
    length, kind = len(sequence.token_ids), str(dtype).removeprefix("torch.")
    log.error("request %d ended: logits behind %d tokens are not finite", sequence.sequence_id, length)
    return LogitsNotFinite(f"the model's logits are not finite numbers in {kind}", tokens=length)
