"""Writes predictions to the device's tables, and counts what was accepted, where the device chooses rows.

A prediction enters the table as a draft's tree does. It needs no kernel of its own: the device walks its nodes down the
tokens generated since, merges them with what it looks up, and repairs them where one token was replaced or inserted. A
chain lasts for many passes, so little is sent; where the model leaves it, the next one follows a pass later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from target_service.core.sequence import DevicePass, Sequence
from target_service.execution.node_tables import ExpectedTree, NodeTables, PredictedNodes
from target_service.speculation.policy.live_sequence import LiveSequence

# Nodes of a chain, of the 240 that a table holds, and tokens after which it is renewed: the rest of it is then still
# longer than the deepest path of a pass.
_CHAIN, _RENEWED = 160, 96
# Nodes that a form lets expect, masks that are computed for those of all sequences of a step, and for those of one at
# least: the host computes them while a pass runs. Chosen.
_EXPECTED_NODES, _EXPECTED, _LEAST_EXPECTED = 160, 24, 1
# Tokens of expected text that are left below the output's last token, with which it is not renewed: of few forms, and
# of many, whose passes have fewer rows for each. Chosen: two passes seldom accept more.
_ENOUGH_EXPECTED, _ENOUGH_OF_MANY = 16, 6


def graft_predictions(sequences: Iterable[Sequence], live: Mapping[int, LiveSequence], tables: NodeTables) -> None:
    """Update the tables with the current predictions of a step's sequences."""
    for sequence in sequences:
        sequence_id = sequence.sequence_id
        prediction = live[sequence_id].prediction
        if prediction is None or not sequence.request.max_draft_nodes:
            continue
        known, places, base = tables.predicted(sequence_id), prediction.offsets, len(sequence.token_ids)
        if known is not None and known.places == places and base - known.base < _RENEWED:
            continue
        chains = tuple(prediction.chains(_CHAIN))
        if chains or known is not None:
            tables.predict(sequence_id, PredictedNodes(base, places, chains, sequence.token_ids) if chains else None)


def graft_expected(sequences: Iterable[Sequence], live: Mapping[int, LiveSequence], tables: NodeTables) -> None:
    """Update the tables with what the forms of a step's sequences let expect, once the step is masked. The pass that
    is launched next finds it, below what this step generates."""
    of_forms = [one for one in sequences if one.sequence_id in live and live[one.sequence_id].verifier.masked]
    most = _EXPECTED // len(of_forms) if of_forms else 0
    enough = _ENOUGH_EXPECTED if most > _LEAST_EXPECTED else _ENOUGH_OF_MANY
    for sequence in of_forms:
        grammar, request = live[sequence.sequence_id].verifier.grammar, sequence.request
        drafts = request.speculate and request.max_draft_nodes and request.device_rows
        if grammar is None or grammar.slow or not drafts:
            continue
        known = tables.expected(sequence.sequence_id)
        if known is not None and known.left() >= enough:
            continue
        nodes, text = grammar.expected(_EXPECTED_NODES, max(most, _LEAST_EXPECTED)), sequence.token_ids
        tables.expect(sequence.sequence_id, ExpectedTree.of(len(text), *nodes, text) if nodes.token_ids else None)


def note_passes(live: LiveSequence, passes: Iterable[DevicePass], tokens: int, tables: NodeTables) -> None:
    """Count and learn what passes verified of a sequence's prediction; `tokens` of theirs were kept. A draft's rows in
    the same table cannot be distinguished from the prediction's, and count as its own."""
    if live.prediction is None or tables.predicted(live.sequence.sequence_id) is None:
        return
    totals = live.sequence.totals
    for one in passes:
        if tokens <= 0:
            # After the sequence's end.
            return
        if one.drafted_from_table:
            live.prediction.observe_offer(one.accepted_from_table)
            totals.predicted_tokens += one.drafted_from_table
            totals.accepted_predicted_tokens += min(tokens, one.accepted_from_table)
        tokens -= one.accepted + 1
