"""How hidden states reach an EAGLE drafter: in pieces, late, never, or wrong."""

from __future__ import annotations

import pytest
import torch
from eagle_drafting import draft, feed, make_drafter, opened, plain_tree, same_tree, sequence_of, states_of, text
from eagle_heads import VOCABULARY, make_head

from draft_service.drafters.base import features_of
from draft_service.drafters.hidden_states import FeatureWindow
from outrider.errors import InvalidField
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.tree import TokenTree
from outrider.wire.frames import FeatureRequest


@pytest.mark.parametrize("mode", LOSSLESS_MODES, ids=lambda mode: mode.value)
def test_features_may_come_in_any_pieces(mode: VerificationMode) -> None:
    """Trees along the way, rejected every time, leave no trace: what is read step by step is what is read at once."""
    head = make_head()
    tokens, states = text(40), states_of(head, 40)
    drafter = make_drafter(head, max_rows=5)
    sequence = sequence_of(tokens[:10], mode)
    drafter.open(sequence)
    for begin in range(0, 9, 4):
        feed(sequence, states[begin : min(begin + 4, 9)], begin)
    length = 10
    for step in (0, 1, 3, 1, 8, 2):
        before, length = length, length + step
        if step:
            sequence.token_ids.extend(tokens[before:length])
            feed(sequence, states[before - 1 : length - 1], before - 1)
            drafter.advance(sequence, tokens[before:length])
        (tree,) = drafter.propose([sequence])
        same_tree(tree, draft(make_drafter(head), tokens[:length], states, mode))
        (again,) = drafter.propose([sequence])
        same_tree(again, tree)


def test_a_prompts_features_may_be_read_while_they_arrive() -> None:
    head = make_head()
    tokens, states = text(30), states_of(head, 30)
    drafter = make_drafter(head)
    sequence = sequence_of(tokens)
    drafter.open(sequence)
    for begin in range(0, 29, 8):
        feed(sequence, states[begin : min(begin + 8, 29)], begin)
        drafter.absorb([sequence])
        assert sequence.features is not None and len(sequence.features) == 0
    drafter.absorb([sequence])
    (tree,) = drafter.propose([sequence])
    same_tree(tree, draft(make_drafter(head), tokens, states))
    assert drafter.stats()["eagle_feature_rows_total"] == 29


def test_a_window_may_begin_late() -> None:
    """Positions stay true, and the tree is that of a head that never saw what came before."""
    head = make_head()
    tokens, states = text(30), states_of(head, 30)
    drafter = make_drafter(head)
    sequence = sequence_of(tokens)
    drafter.open(sequence)
    feed(sequence, states[19:29], 19)
    (tree,) = drafter.propose([sequence])
    same_tree(tree, plain_tree(head, tokens, states, first=19))


@pytest.mark.parametrize(("layers", "seen"), [(1, 6), (3, 16)])
def test_a_head_with_a_window_asks_for_no_more_than_it_sees(layers: int, seen: int) -> None:
    head = make_head(window=6, num_layers=layers)
    tokens, states = text(30), states_of(head, 30)
    drafter = make_drafter(head)
    assert features_of(drafter).window == seen
    sequence = sequence_of(tokens)
    drafter.open(sequence)
    feed(sequence, states[29 - seen : 29], 29 - seen)
    (tree,) = drafter.propose([sequence])
    same_tree(tree, plain_tree(head, tokens, states))


def test_without_the_last_feature_nothing_is_drafted_and_later_it_is() -> None:
    head = make_head()
    tokens, states = text(20), states_of(head, 20)
    drafter = make_drafter(head)
    sequence = sequence_of(tokens[:8])
    drafter.open(sequence)
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[7])]
    feed(sequence, states[:4], 0)
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[7])]
    feed(sequence, states[4:7], 4)
    assert drafter.propose([sequence])[0].drafted
    # An advance without its features, and one with: what lies between is never known, and drafting goes on.
    sequence.token_ids.extend(tokens[8:11])
    drafter.advance(sequence, tokens[8:11])
    assert drafter.propose([sequence]) == [TokenTree.root_only(tokens[10])]
    sequence.token_ids.extend(tokens[11:13])
    feed(sequence, states[10:12], 10)
    drafter.advance(sequence, tokens[11:13])
    assert drafter.propose([sequence])[0].drafted
    assert drafter.stats()["eagle_missing_features_total"] == 3


def test_features_that_cannot_be_are_refused() -> None:
    drafter = make_drafter()
    sequence = sequence_of(text(5))
    drafter.open(sequence)
    width = 3 * 16
    with pytest.raises(InvalidField, match="shape"):
        feed(sequence, torch.zeros(2, width + 1), 0)
    with pytest.raises(InvalidField, match="floating"):
        feed(sequence, torch.zeros(2, width, dtype=torch.int32), 0)
    with pytest.raises(InvalidField, match="position"):
        feed(sequence, torch.zeros(2, width), -1)
    feed(sequence, torch.zeros(6, width), 0)
    # The root's own cannot be known, nor what comes after it.
    assert drafter.propose([sequence]) == [TokenTree.root_only(sequence.root)]
    drafter.close(sequence)
    drafter.close(sequence)


@pytest.mark.parametrize("mode", LOSSLESS_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38], ids=str)
def test_features_that_are_no_numbers_harm_their_sequence_only(mode: VerificationMode, value: float) -> None:
    head = make_head()
    drafter = make_drafter(head)
    states = states_of(head, 12)
    broken = states.clone()
    broken[7] = value
    # Of the same text they would share what is read, as one target has the same states for both.
    given = (text(12, 1), broken), (text(12), states)
    harmed, other = (opened(drafter, sequence_of(tokens, mode), own) for tokens, own in given)
    tree, expected = drafter.propose([harmed, other])
    same_tree(expected, draft(make_drafter(head), text(12), states, mode))
    TokenTree.checked(tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=VOCABULARY)
    if value != value:
        assert tree == TokenTree.root_only(harmed.root)


def test_a_window_that_overflows_begins_late() -> None:
    head = make_head()
    tokens, states = text(30), states_of(head, 30)
    tree = draft(make_drafter(head, feature_window=10), tokens, states)
    same_tree(tree, plain_tree(head, tokens, states, first=19))


def test_a_full_cache_costs_drafts_only() -> None:
    head = make_head()
    drafter = make_drafter(head, kv_tokens=64)
    states = states_of(head, 40)
    first, second = (opened(drafter, sequence_of(text(length, i)), states) for i, length in enumerate((35, 30)))
    trees = drafter.propose([first, second])
    assert trees[0].drafted and trees[1] == TokenTree.root_only(second.root)
    assert drafter.stats()["eagle_cache_full_total"] == 1
    drafter.close(first)
    (tree,) = drafter.propose([second])
    same_tree(tree, plain_tree(head, second.token_ids, states))


def test_features_may_be_projected_by_the_target() -> None:
    head = make_head(fc_norm=True)
    tokens, states = text(15), states_of(head, 15)
    drafter = make_drafter(head, projection="target")
    assert features_of(drafter) == FeatureRequest((1, 5, 8), 16, "float32", projected=True, window=8192)
    assert features_of(make_drafter(head)) == FeatureRequest((1, 5, 8), 48, "float32", projected=False, window=8192)
    same_tree(draft(drafter, tokens, head.project(states)), draft(make_drafter(head), tokens, states))


def test_the_window_keeps_what_is_newest() -> None:
    window = FeatureWindow(2, 4)
    values = torch.arange(20.0).view(10, 2)
    window.append(values[:3], 0)
    window.append(values[2:6], 2)
    assert (window.begin, window.end, len(window)) == (2, 6, 4)
    begin, taken = window.pop_vectors()
    assert begin == 2 and torch.equal(torch.cat(taken), values[2:6]) and not len(window)
    window.append(values[6:8], 6)
    # Vectors between are missing.
    window.append(values[9:], 9)
    begin, taken = window.pop_vectors()
    assert (begin, window.begin, window.end) == (9, 10, 10) and torch.equal(torch.cat(taken), values[9:])
    assert window.pop_vectors() == (10, [])
