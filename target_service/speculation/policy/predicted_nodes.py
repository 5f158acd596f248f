"""Predictions on their way into the device's tables, and what became of them, where the device chooses rows.

A prediction is grown into the table from the host, as a draft's tree is. It needs no kernel of its own: the device
walks its nodes down the text that was said since, merges them with what it looks up, and mends them where one token was
exchanged or put in. A chain lasts for many passes, so that little is sent; where the model leaves it, the next one
follows a pass behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from target_service.core.sequence import DevicePass, Sequence
from target_service.execution.node_tables import NodeTables, PredictedNodes
from target_service.speculation.policy.live_sequence import LiveSequence

# Nodes of a chain, of the 240 that a table holds, and tokens after which it is renewed: what is left of it then is
# longer than the deepest path of a pass.
_CHAIN, _RENEWED = 160, 96


def graft_predictions(sequences: Iterable[Sequence], live: Mapping[int, LiveSequence], tables: NodeTables) -> None:
    """Give the tables what is predicted of the sequences of a step by now, where that is not what they have."""
    for sequence in sequences:
        prediction, sequence_id = live[sequence.sequence_id].prediction, sequence.sequence_id
        if prediction is None or not sequence.request.max_draft_nodes:
            continue
        known, places, base = tables.predicted(sequence_id), prediction.offsets, len(sequence.token_ids)
        if known is not None and known.places == places and base - known.base < _RENEWED:
            continue
        chains = tuple(prediction.chains(_CHAIN))
        if chains or known is not None:
            tables.predict(sequence_id, PredictedNodes(base, places, chains, sequence.token_ids) if chains else None)


def note_passes(live: LiveSequence, passes: Iterable[DevicePass], tokens: int, tables: NodeTables) -> None:
    """Learn and count what passes verified of a sequence's prediction, `tokens` being how many of theirs were kept.

    Rows that a draft had put into the same table are not told apart from the prediction's, and count as its own.
    """
    if live.prediction is None or tables.predicted(live.sequence.sequence_id) is None:
        return
    totals = live.sequence.totals
    for one in passes:
        if tokens <= 0:
            # Behind the sequence's end.
            return
        if one.drafted_from_table:
            live.prediction.judge(one.accepted_from_table)
            totals.predicted_tokens += one.drafted_from_table
            totals.accepted_predicted_tokens += min(tokens, one.accepted_from_table)
        tokens -= one.accepted + 1
