"""Which leading pages groups of sequences have in common, and when it pays to read them once."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter

import pytest
from engine_harness import request

from target_service.core.sequence import Sequence, SequenceTotals
from target_service.engine.common_pages import CommonPages, _in_groups
from target_service.model.cuda_graphs import sizes
from target_service.model.cuda_graphs.sizes import Bucket, buckets_up_to, capacity, choose_bucket, padded
from tree_kernels.attention import AttentionBatch, TreeAttention

# A system prompt of 6,400 tokens.
SYSTEM = list(range(1000, 1400))


def sequence(number: int, pages: list[int], tokens: int | None = None) -> Sequence:
    kept = Sequence(number, request([1, 2, 3]), [1, 2, 3], SequenceTotals())
    kept.pages = array("i", pages)
    kept.kv_length = 16 * len(pages) if tokens is None else tokens
    return kept


def several(count: int, common: int = 400, first: int = 0) -> list[Sequence]:
    return [
        sequence(n, [*SYSTEM[:common], *range(10_000 + 50 * n, 10_010 + 50 * n)]) for n in range(first, first + count)
    ]


def test_what_all_begin_with_is_read_once() -> None:
    assert CommonPages(16).of(several(10)) == (400,) * 10


@pytest.mark.parametrize("sequences", [several(7), several(8, common=300), several(0)], ids=["few", "short", "none"])
def test_few_sequences_or_keys_are_read_by_each(sequences: list[Sequence]) -> None:
    assert CommonPages(16).of(sequences) == ()


def test_pages_hold_whole_tiles_of_keys() -> None:
    assert CommonPages(16).of(several(16, common=397)) == (392,) * 16
    longer = several(10, common=397)
    for one in longer:
        one.kv_length = 64 * len(one.pages)
    assert CommonPages(64).of(longer) == (396,) * 10


def test_others_read_what_is_theirs() -> None:
    others = [sequence(100, []), sequence(101, list(range(7000, 7900))), sequence(102, SYSTEM[:20])]
    mixed = [others[0], *several(6), others[1], *several(6, first=6), others[2]]
    assert CommonPages(16).of(mixed) == (0, *(400,) * 6, 0, *(400,) * 6, 0)


def test_longer_prefixes_of_fewer_may_spare_more() -> None:
    assert CommonPages(16).of([*several(9), *several(9, common=380, first=9)]) == (376,) * 18
    assert CommonPages(16).of([*several(12), *several(3, common=200, first=12)]) == (*(400,) * 12, 0, 0, 0)


def test_every_group_of_enough_sequences_has_its_own_pages() -> None:
    # Three applications behind one chat template, one of them with too few sequences, and requests without any.
    prompts = [[*SYSTEM[:3], *range(2000, 2200)], [*SYSTEM[:3], *range(3000, 3300)], [*SYSTEM[:3], *range(4000, 4390)]]
    turns = [(n, n % 3) for n in range(33) if n % 3 < 2 or n < 20]
    sequences = [sequence(n, [*prompts[of], *range(10_000 + 50 * n, 10_010 + 50 * n)]) for n, of in turns]
    sequences += [sequence(50, [7000]), sequence(51, [])]
    pages = CommonPages(16)
    assert pages.of(sequences) == (*[(200, 296, 0)[of] for _, of in turns], 0, 0)
    assert [one.common_page for one in sequences] == [*[(2196, 3292, -1)[of] for _, of in turns], -1, -1]
    # In any order, and in two parts.
    sequences.sort(key=lambda one: (one.sequence_id % 2, one.common_page))
    expected = tuple({-1: 0, 2196: 200, 3292: 296}[one.common_page] for one in sequences)
    assert pages.of(sequences) == expected


def test_groups_within_a_group_are_chosen_where_they_spare_more() -> None:
    def nested(outer: int, inner: int) -> list[Sequence]:
        parts = [[*SYSTEM[:outer], *range(2000 + 500 * of, 2000 + 500 * of + inner)] for of in range(2)]
        return [sequence(n, [*parts[n % 2], 10_000 + n]) for n in range(20)]

    for outer, inner, groups in ((160, 80, 2), (240, 0, 1)):
        sequences = nested(outer, inner)
        assert CommonPages(16).of(sequences) == (240,) * 20
        assert len({one.common_page for one in sequences}) == groups
    # Those that it leaves are a group too, if they are enough.
    sequences = [*nested(240, 160)[::2], *several(8, common=240, first=20)]
    assert CommonPages(16).of(sequences) == (*(400,) * 10, *(240,) * 8)
    sequences = [*nested(240, 160)[::2], *several(7, common=240, first=20)]
    assert CommonPages(16).of(sequences) == (240,) * 17
    sequences = [*nested(80, 320)[::2], *several(7, common=80, first=20)]
    assert CommonPages(16).of(sequences) == (*(400,) * 10, *(0,) * 7)


def test_what_all_groups_spare_together_is_worth_a_step() -> None:
    few = several(8, common=240)
    assert CommonPages(16).of(few) == ()
    assert [one.common_page for one in few] == [-1] * 8
    others = [sequence(50 + n, [*range(2000, 2160), 20_000 + n]) for n in range(8)]
    assert CommonPages(16).of([*few, *others]) == (*(240,) * 8, *(160,) * 8)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_among_nested_groups_spares_more(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "FEWEST_IN_COMMON", 2)
    rng = random.Random(seed)
    texts = sorted("".join(rng.choices("ab", k=5)) for _ in range(9))

    def most(beginning: str) -> int:
        count = sum(text.startswith(beginning) for text in texts)
        whole = (count - 1) * len(beginning) if count >= 2 else 0
        return max(whole, most(beginning + "a") + most(beginning + "b")) if len(beginning) < 5 else whole

    pairs = itertools.pairwise(texts)
    found = _in_groups([max(n for n in range(6) if one[:n] == other[:n]) for one, other in pairs])
    groups = Counter(text[:pages] for text, (_, pages) in zip(texts, found, strict=True) if pages)
    assert min(groups.values(), default=2) >= 2
    assert sum((count - 1) * len(beginning) for beginning, count in groups.items()) >= most("")


def test_only_keys_that_are_computed_count() -> None:
    sequences = several(12)
    sequences[4].kv_length = 16 * 200
    assert CommonPages(16).of(sequences) == (*(400,) * 4, 0, *(400,) * 7)


def test_it_is_found_again_when_pages_or_sequences_change() -> None:
    pages = CommonPages(16)
    sequences = several(12)
    assert pages.of(sequences) == pages.of(sequences) == (400,) * 12
    # One gave way, which `SequencePages.release` notes, and came back to pages of its own.
    sequences[3].pages, sequences[3].common_page = array("i", range(20_000, 20_410)), -1
    assert pages.of(sequences) == (*(400,) * 3, 0, *(400,) * 8)
    assert pages.of(sequences[1:]) == (400, 400, 0, *(400,) * 8)
    sequences[5].kv_length -= 16 * 200
    assert pages.of(sequences[1:]) == (400, 400, 0, 400, 0, *(400,) * 6)


def step(sequences: int, rows: int, common: int = 0) -> AttentionBatch:
    return AttentionBatch(
        tuple(range(0, sequences * rows + 1, rows)), (640,) * sequences, (tuple(range(48)),) * sequences, 16,
        ((0,) * rows,) * sequences, (common,) * sequences if common else (),
    )  # fmt: skip


def test_steps_with_common_pages_have_sizes_of_their_own() -> None:
    buckets = buckets_up_to(512, 64, common=True)
    own = [bucket for bucket in buckets if bucket.common]
    assert own and all(bucket.sequences == min(bucket.rows, 64) >= 8 for bucket in own)
    assert choose_bucket(buckets, step(20, 3, common=8)) == Bucket(64, 64, common=True)
    assert choose_bucket(buckets, step(20, 3)) == Bucket(64, 64)
    # One that is not captured, or too large, runs as a step without.
    without = [bucket for bucket in buckets if not bucket.common]
    assert choose_bucket(without, step(20, 3, common=8)) == Bucket(64, 64)
    assert choose_bucket([*without, Bucket(512, 64, common=True)], step(20, 3, common=8)) == Bucket(64, 64)
    assert choose_bucket(buckets, step(20, 30, common=8)) is None
    assert choose_bucket(buckets_up_to(1024, 64, common=True), step(20, 30, common=8)) == Bucket(768, 64)
    largest = capacity(Bucket(64, 64, common=True), 16, 400)
    largest.check()
    assert largest.common_pages == (128,) * 64
    assert padded(step(20, 3, common=8), Bucket(64, 64, common=True)).common_pages == (8,) * 20 + (0,) * 44


@pytest.mark.parametrize(
    "common",
    [(8, 8), (8, 7, 8), (8, 48, 8), (8, -8, 8)],
    ids=["not for each", "not whole tiles", "longer than the prefix", "negative"],
)
def test_a_plan_refuses_common_pages_that_disagree(common: tuple[int, ...]) -> None:
    batch = step(3, 2)
    with pytest.raises(ValueError, match="expected common_pages"):
        TreeAttention().plan(
            AttentionBatch(batch.query_starts, batch.prefix_lengths, batch.pages, 16, batch.parents, common)
        )
