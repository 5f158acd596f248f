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
# Nodes that a form lets expect, and masks that are computed in a step for text that is not known yet: the host does so
# while a pass runs. Chosen.
_EXPECTED_NODES, _EXPECTED_MASKS = 160, 24
# Tokens of expected text that are left below the output's last token, with which it is not renewed: of few forms, and
# of more than so many, whose passes have fewer rows for each. Chosen: two passes seldom accept more.
_ENOUGH_EXPECTED, _ENOUGH_OF_MANY, _FEW_FORMS = 16, 6, 12


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


def assign_slots(sequences: Iterable[Sequence], live: Mapping[int, LiveSequence], tables: NodeTables) -> None:
    """Give sequences with forms their slots, before the step is launched that reads what is expected of them."""
    for sequence in sequences:
        if _drafts_of_form(sequence, live):
            tables.assign_slot(sequence.sequence_id)


def graft_expected(sequences: Iterable[Sequence], live: Mapping[int, LiveSequence], tables: NodeTables) -> None:
    """Update the tables with what the forms of a step's sequences let expect, once the step is masked. The pass behind
    it, which may be launched already, finds it below what the step generates."""
    of_forms = [one for one in sequences if _drafts_of_form(one, live)]
    masks, enough = _EXPECTED_MASKS, _ENOUGH_EXPECTED if len(of_forms) <= _FEW_FORMS else _ENOUGH_OF_MANY
    for sequence in of_forms:
        grammar, known = live[sequence.sequence_id].verifier.grammar, tables.expected(sequence.sequence_id)
        if grammar is None or (known is not None and known.left() >= enough):
            continue
        (nodes, masks), text = grammar.expected(_EXPECTED_NODES, masks), sequence.token_ids
        tables.expect(sequence.sequence_id, ExpectedTree.of(len(text), *nodes.packed(), text) if nodes else None)


def _drafts_of_form(sequence: Sequence, live: Mapping[int, LiveSequence]) -> bool:
    """Whether the device may draft for a sequence what its form lets expect."""
    own, request = live.get(sequence.sequence_id), sequence.request
    if own is None or own.verifier.grammar is None or own.verifier.grammar.slow:
        return False
    return bool(request.speculate and request.max_draft_nodes and request.device_rows)


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
