"""Passes of fixed sizes are the passes they stand for. No GPU is needed: what a graph would replay is run."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from eagle_drafting import (
    COUPLED,
    GREEDY,
    SETTINGS,
    draft,
    feed,
    make_drafter,
    opened,
    same_tree,
    sequence_of,
    states_of,
    text,
)
from eagle_heads import KINDS, make_head
from kernel_worker import INTERPRETED, work
from static_drafting import StaticDrafting, static_kv  # noqa: F401

from draft_service import neural_drafter
from draft_service.drafters.grown import ArrayDrafter, GrownTrees
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.cuda_graphs.drafting import CapturedDrafting, PassSize
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.tree import TokenTree

pytestmark = [pytest.mark.values, pytest.mark.usefixtures("static_kv")]
# Workers import what tests do.
SEARCHED = os.pathsep.join(sys.path)


def static_drafter(head: EagleHead, **settings: Any) -> EagleDrafter:
    config = EagleConfig(**(SETTINGS | settings))
    drafter = make_drafter(head, **settings)
    drafter._drafting = StaticDrafting(HeadNetwork(head), config)
    return drafter


def paths(tree: TokenTree, depth: int) -> set[tuple[int, ...]]:
    """Tokens from the root down to every node that is no deeper."""
    found: list[tuple[int, ...]] = [()]
    for row in range(1, len(tree)):
        found.append((*found[tree.parents[row]], tree.token_ids[row]))
    return {path for path in found if 0 < len(path) <= depth}


@pytest.mark.parametrize("early", [1, 2, 4])
def test_the_first_levels_come_before_the_others(early: int) -> None:
    """And hold nothing of the trees before them."""
    head = make_head()
    shape = {"num_steps": 5, "topk": 3, "frontier": 4, "num_draft_tokens": 60, "early_levels": early}
    drafter = static_drafter(head, **shape)
    known = states_of(head, 40, 3)
    one = opened(drafter, sequence_of(text(7, 3)), known)
    for step in range(3):
        pending = drafter.start_trees([one])
        assert pending.early and pending.fresh()
        (first,), (whole,) = pending.wait(True).as_trees(), pending.fetch().as_trees()
        alone = static_drafter(head, **{**shape, "early_levels": 0})
        (expected,) = alone.propose([opened(alone, sequence_of(list(one.token_ids)), known)])
        same_tree(whole, expected)
        assert paths(whole, early) <= paths(first, early) == paths(first, 99)
        length = len(one.token_ids)
        one.token_ids.extend(text(1 + step, step))
        feed(one, known[length - 1 : length + step], length - 1)
        drafter.start_trees([one])
        assert not pending.fresh()


@pytest.mark.parametrize("kind", [KINDS["eagle-3"], KINDS["two layers"]], ids=["one layer", "two layers"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_static_passes_draft_the_same_trees(count: int, kind: dict[str, object]) -> None:
    head = make_head(**kind)
    modes = list(LOSSLESS_MODES)
    drafters = [make_drafter(head), static_drafter(head)]
    known = [states_of(head, 40, i) for i in range(count)]
    followed = [
        [opened(drafter, sequence_of(text(7 + 3 * i, i), modes[i % 3]), known[i]) for i in range(count)]
        for drafter in drafters
    ]
    for step in range(5):
        # Every other sequence takes part, in turn; passes shrink and grow.
        chosen = [i for i in range(count) if count == 1 or (i + step) % 2 or step == 4]
        trees = [
            drafter.propose([sequences[i] for i in chosen])
            for drafter, sequences in zip(drafters, followed, strict=True)
        ]
        for expected, found in zip(*trees, strict=True):
            assert expected.drafted
            same_tree(found, expected)
        for sequences in followed:
            for i in chosen:
                length = len(sequences[i].token_ids)
                sequences[i].token_ids.extend(text(1 + step, step))
                feed(sequences[i], known[i][length - 1 : length + step], length - 1)
    drafting = drafters[1]._drafting
    assert isinstance(drafting, StaticDrafting)
    assert any(size.committed for size in drafting._passes) and drafting._trees
    # Only REJECTION's trees grow a level at a time.
    assert any(not size.committed for size in drafting._passes) == (count > 2)


@pytest.mark.parametrize("beside", [0, 2], ids=["alone", "beside others"])
@pytest.mark.parametrize("length", [8, 9, 64, 65, 256, 257, 700])
def test_prompts_are_read_in_pieces_of_captured_sizes(length: int, beside: int) -> None:
    """The trees behind them, and the next ones, are those of a head that has read all at once."""
    head = make_head()
    drafters = [make_drafter(head), static_drafter(head)]
    known = [states_of(head, length + 20, i) for i in range(1 + beside)]
    followed = [
        [opened(drafter, sequence_of(text(9, i)), known[i]) for i in range(1, 1 + beside)] for drafter in drafters
    ]
    for drafter, others in zip(drafters, followed, strict=True):
        drafter.propose(others)
        for i, other in enumerate(others, 1):
            other.token_ids.extend(text(2, i))
            feed(other, known[i][8:10], 8)
        # Its features are one fewer than its tokens.
        others.insert(0, opened(drafter, sequence_of(text(length + 1)), known[0]))
    for step in range(2):
        expected, found = (drafter.propose(own) for drafter, own in zip(drafters, followed, strict=True))
        for one, other in zip(expected, found, strict=True):
            assert one.drafted
            same_tree(other, one)
        for own in followed:
            own[0].token_ids.extend(text(3, step))
            feed(own[0], known[0][length + 3 * step : length + 3 * step + 3], length + 3 * step)
    drafting = drafters[1]._drafting
    assert isinstance(drafting, StaticDrafting)
    assert max(size.tail for size in drafting._passes if size.sequences == 1) <= 256


@pytest.mark.parametrize("place", [0, 2, 5])
def test_sequences_beside_a_prompt_share_their_passes(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each would take one of its own, which keeps the device from the trees of all."""
    head, length = make_head(), 300
    drafters = [make_drafter(head), static_drafter(head)]
    known = [states_of(head, 320, i) for i in range(6)]
    followed = [[opened(drafter, sequence_of(text(9, i)), known[i]) for i in range(1, 6)] for drafter in drafters]
    read: list[PassSize] = []
    replay = CapturedDrafting._replay

    def counted(self: CapturedDrafting, size: PassSize, *arguments: Any) -> Any:
        read.append(size)
        return replay(self, size, *arguments)

    monkeypatch.setattr(CapturedDrafting, "_replay", counted)
    for drafter, others in zip(drafters, followed, strict=True):
        drafter.propose(others)
        for i, other in enumerate(others, 1):
            other.token_ids.extend(text(2, i))
            feed(other, known[i][8:10], 8)
        others.insert(place, opened(drafter, sequence_of(text(length + 1)), known[0]))
    read.clear()
    expected, found = (drafter.propose(own) for drafter, own in zip(drafters, followed, strict=True))
    for one, other in zip(expected, found, strict=True):
        assert one.drafted
        same_tree(other, one)
    prompt = [size.tail for size in read if size.sequences == 1]
    assert prompt == [256, 64] and len(read) - len(prompt) == (1 if place in (0, 5) else 2)


@pytest.mark.parametrize("mode", [GREEDY, COUPLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("topk", [1, 4])
def test_every_shape_of_a_whole_tree(topk: int, steps: int, page_size: int, mode: VerificationMode) -> None:
    """Contexts of all lengths about the pages' ends; sequences that close, and others that take their pages."""
    head = make_head()
    settings = {"topk": topk, "num_steps": steps, "num_draft_tokens": 9, "page_size": page_size, "kv_tokens": 1024}
    drafters = [make_drafter(head, **settings), static_drafter(head, **settings)]
    for turn in range(4):
        lengths = range(2 + turn, 26, 5)
        followed = [
            [
                opened(drafter, sequence_of(text(length, length), mode), states_of(head, 40, length))
                for length in lengths
            ]
            for drafter in drafters
        ]
        trees = [drafter.propose(own) for drafter, own in zip(drafters, followed, strict=True)]
        for expected, found in zip(*trees, strict=True):
            assert expected.drafted
            same_tree(found, expected)
        for drafter, own in zip(drafters, followed, strict=True):
            # In another order, so that pages are not taken as they were left.
            for sequence in own[::2] + own[1::2]:
                drafter.close(sequence)


def test_a_full_cache_costs_drafts_only() -> None:
    head = make_head()
    drafter = static_drafter(head, kv_tokens=64)
    first, second = (opened(drafter, sequence_of(text(30, i)), states_of(head, 30, i)) for i in range(2))
    trees = drafter.propose([first, second])
    assert trees[0].drafted and not trees[1].drafted
    same_tree(trees[0], draft(make_drafter(head), text(30, 0), states_of(head, 30, 0)))
    drafter.close(first)
    assert drafter.propose([second])[0].drafted


@pytest.mark.parametrize("static", [False, True], ids=["by level", "at once"])
@pytest.mark.parametrize(
    "settings", [{}, {"frontier": 9, "num_steps": 6, "num_draft_tokens": 120, "rows_per_level": 16}]
)
def test_trees_come_as_bytes(settings: dict[str, Any], static: bool) -> None:
    head = make_head()
    drafter = (static_drafter if static else make_drafter)(head, **settings)
    assert isinstance(drafter, ArrayDrafter)
    modes = [GREEDY, COUPLED, GREEDY, VerificationMode.REJECTION]
    sequences = [opened(drafter, sequence_of(text(9 + i, i), modes[i]), states_of(head, 20, i)) for i in range(4)]
    # Whose features have not come.
    sequences[1].token_ids.append(5)
    heads = [(i, 3, 1 + 100 * i, 9999) for i in range(4)]
    for chosen in ([0, 1, 2], [1], [0], [2, 0]):
        asked, own = [sequences[i] for i in chosen], [heads[i] for i in chosen]
        expected = drafter.propose(asked)
        packed = drafter.start_trees(asked).fetch().packed(own)
        assert packed is not None
        assert packed == GrownTrees.of(expected).packed(own)
        assert packed[0] == [tree.drafted for tree in expected]
        assert [count > 0 for count in packed[0]] == [i != 1 for i in chosen]
        # A token that the target does not know.
        few = drafter.start_trees(asked).fetch().packed([(*one[:3], 1) for one in own])
        assert few == (packed if chosen == [1] else None)
    assert drafter.propose(sequences)[3].distributions
    assert drafter.start_trees([]).fetch().packed([]) == ([], b"")


def test_free_rows_and_sequences_that_are_not_there_change_nothing() -> None:
    """What a larger batch left in the tensors does not reach a smaller one."""
    head = make_head()
    drafter = static_drafter(head)
    many = [opened(drafter, sequence_of(text(9, i), COUPLED, seed=i), states_of(head, 9, i)) for i in range(4)]
    drafter.propose(many)
    for sequence in many:
        length = len(sequence.token_ids)
        sequence.token_ids.extend(text(2, 50))
        feed(sequence, states_of(head, 20, 5)[length - 1 : length + 1], length - 1)
    three = drafter.propose(many[1:])
    for tree, sequence, i in zip(three, many[1:], range(1, 4), strict=True):
        known = torch.cat([states_of(head, 9, i)[:8], states_of(head, 20, 5)[8:10]])
        same_tree(tree, draft(make_drafter(head), sequence.token_ids, known, COUPLED, seed=i))


def test_triton_sees_the_rows_that_the_device_chose() -> None:
    pytest.importorskip("triton")
    expected, found = work("../draft/interpreted_trees_worker.py", PYTHONPATH=SEARCHED, **INTERPRETED)
    assert len(expected) == len(found) == 6
    for (tokens, parents, scores), other in zip(found, expected, strict=True):
        assert [tokens, parents] == other[:2] and scores == pytest.approx(other[2], rel=1e-3)
        assert len(tokens) > 5


def test_what_common_batches_replay_is_captured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neural_drafter, "drafting_on", lambda net, own: StaticDrafting(net, own))
    drafting = make_drafter(make_head(), captured_sequences=5).drafting
    assert isinstance(drafting, StaticDrafting)
    assert set(drafting._trees) == {(count, coupled) for count in (1, 2, 4, 8) for coupled in (False, True)}
    assert {size.sequences for size in drafting._passes if size.committed} == {1, 2, 4, 8}
    assert drafting.cache.used_pages == 0
