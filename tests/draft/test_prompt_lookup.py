"""Prompt lookup against a search through the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.base import CorpusDrafter, DraftSequence
from draft_service.drafters.prompt_lookup import PromptLookupConfig, PromptLookupDrafter
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits


def expected(tokens: Sequence[int], config: PromptLookupConfig) -> list[int]:
    """The oracle: the longest suffix that occurred before, where it occurred last."""
    for length in range(min(config.lookup_max, len(tokens) - 1), config.lookup_min - 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[len(tokens) - length :]:
                copied = list(tokens)
                for i in range(config.lookup_tokens):
                    copied.append(copied[begin + length + i])
                return copied[len(tokens) :]
    return []


@examples(150)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_latest_longest_run_is_copied(
    prompt: list[int], commits: list[list[int]], shortest: int, more: int
) -> None:
    config = PromptLookupConfig(lookup_tokens=5, lookup_min=shortest, lookup_max=shortest + more)
    drafter = PromptLookupDrafter(config)
    sequence = DraftSequence(1, list(prompt), len(prompt), 4)
    drafter.open(sequence)
    for committed in ([], *commits):
        if committed:
            sequence.token_ids.extend(committed)
            drafter.advance(sequence, committed)
        tree = drafter.propose([sequence])[0]
        assert list(tree.token_ids) == [sequence.root, *expected(sequence.token_ids, config)]
        assert TokenTree.checked(tree.token_ids, tree.parents, tree.scores, vocabulary_size=4).is_chain
    drafter.close(sequence)


def test_longer_runs_score_higher() -> None:
    drafter = PromptLookupDrafter(PromptLookupConfig())
    scores = []
    for text in ([1, 2, 3, 4, 5, 3, 4], [1, 2, 3, 4, 5, 1, 2, 3, 4]):
        sequence = DraftSequence(1, text, len(text), 10)
        drafter.open(sequence)
        scores.append(drafter.propose([sequence])[0].scores[1])
    assert 0.0 < scores[0] < scores[1] < 1.0


def test_limits_are_kept() -> None:
    drafter = PromptLookupDrafter(PromptLookupConfig())
    sequence = DraftSequence(1, [1, 2] * 20, 40, 10, limits=TreeLimits(max_nodes=20, max_depth=3))
    drafter.open(sequence)
    assert drafter.propose([sequence])[0].drafted == 3


def test_it_cannot_be_taught() -> None:
    assert not isinstance(PromptLookupDrafter(PromptLookupConfig()), CorpusDrafter)


@pytest.mark.parametrize("bad", [{"lookup_tokens": 0}, {"lookup_min": 0}, {"lookup_min": 5}], ids=str)
def test_senseless_settings_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        PromptLookupConfig(**bad)
