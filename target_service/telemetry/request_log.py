"""One line in the log for each request that ends: who asked, how much, how long, what drafts did. No text."""

from __future__ import annotations

import logging

from target_service.core.sequence import SequenceTotals

logger = logging.getLogger(__name__)


def log_request(
    call: str, sequence_id: int, tenant: str, outcome: str, totals: SequenceTotals, ended_ns: int, trace_id: str
) -> None:
    """Write the line. `outcome` is the finish reason, or the reason of an error. `totals` may be of a request that did
    not finish, or 0 where it was refused; `ended_ns` is on the clock of its times. `drafted` is the share of the
    answer's tokens that were accepted drafts."""
    begun = totals.started_ns or ended_ns
    first = totals.first_token_ns or ended_ns
    logger.info(
        "request call=%s id=%d tenant=%s outcome=%s prompt_tokens=%d tokens=%d steps=%d drafted=%.3f queue_ms=%.1f "
        "prefill_ms=%.1f decode_ms=%.1f trace=%s",
        call,
        sequence_id,
        tenant,
        outcome,
        totals.prompt_tokens,
        totals.completion_tokens,
        totals.steps,
        totals.accepted_tokens / max(1, totals.completion_tokens),
        max(0, begun - totals.arrived_ns) / 1e6,
        max(0, first - begun) / 1e6,
        max(0, (totals.finished_ns or ended_ns) - first) / 1e6,
        trace_id or "-",
    )
