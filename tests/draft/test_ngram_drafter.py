"""The trie drafter: what it learns and from whom, who sees it, what it costs, and what survives a restart."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_checks import check_integrity, count

from draft_service.drafters.base import CorpusDrafter, DraftSequence, tree_limits
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.ngram.snapshot import FILE_NAME
from outrider.errors import PermissionDenied, QuotaExceeded, UnknownCorpus
from outrider.sampling import LOSSLESS_MODES, VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits

VOCABULARY = 1_000
_ids = itertools.count(1)


@contextmanager
def running(**config: object) -> Iterator[NgramDrafter]:
    drafter = NgramDrafter(TrieConfig(**config))  # type: ignore[arg-type]
    drafter.start()
    try:
        yield drafter
    finally:
        drafter.stop()


def sequence(token_ids: Sequence[int], tenant: str = "default", **fields: object) -> DraftSequence:
    prompt_length = fields.pop("prompt_length", len(token_ids))
    return DraftSequence(next(_ids), list(token_ids), prompt_length, VOCABULARY, tenant=tenant, **fields)  # type: ignore[arg-type]


def commit(drafter: NgramDrafter, followed: DraftSequence, token_ids: Sequence[int]) -> None:
    followed.token_ids.extend(token_ids)
    drafter.advance(followed, token_ids)


def say(drafter: NgramDrafter, prompt: Sequence[int], output: Sequence[int] = (), tenant: str = "default") -> None:
    """A whole request: opened, committed, closed, learnt."""
    followed = sequence(prompt, tenant)
    drafter.open(followed)
    if output:
        commit(drafter, followed, output)
    drafter.close(followed)
    drafter.flush()


def drafted(drafter: NgramDrafter, prompt: Sequence[int], tenant: str = "default", **fields: object) -> TokenTree:
    followed = sequence(prompt, tenant, **fields)
    drafter.open(followed)
    tree = drafter.propose([followed])[0]
    drafter.close(followed)
    return tree


def chain(tree: TokenTree) -> list[int]:
    """Tokens of the path of best children."""
    tokens, row = [], 0
    while tree.children[row]:
        row = tree.children[row][0]
        tokens.append(tree.token_ids[row])
    return tokens


def test_a_prompt_is_copied_from() -> None:
    with running() as drafter:
        assert chain(drafted(drafter, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]))[:4] == [4, 5, 6, 7]


def test_committed_output_is_drafted_from_at_once() -> None:
    with running() as drafter:
        followed = sequence([1, 2])
        drafter.open(followed)
        commit(drafter, followed, [3, 4, 5, 1, 2])
        assert chain(drafter.propose([followed])[0])[:3] == [3, 4, 5]


def test_what_one_request_said_the_next_one_drafts() -> None:
    with running() as drafter:
        say(drafter, [10, 11], list(range(20, 60)))
        assert chain(drafted(drafter, [99, 20, 21, 22]))[:5] == [23, 24, 25, 26, 27]


@pytest.mark.parametrize("learning", ["learn_prompts", "learn_outputs"])
def test_learning_can_be_turned_off(learning: str) -> None:
    with running(**{learning: False}) as drafter:
        say(drafter, [1, 2, 3, 4], [5, 6, 7, 8])
        knows_prompt = chain(drafted(drafter, [9, 1, 2]))[:1] == [3]
        knows_output = chain(drafted(drafter, [9, 5, 6]))[:1] == [7]
        assert (knows_prompt, knows_output) == (learning != "learn_prompts", learning != "learn_outputs")


documents = st.lists(st.integers(0, 6), min_size=2, max_size=30)


@settings(max_examples=15)
@given(st.lists(documents, min_size=1, max_size=4), st.lists(documents, min_size=1, max_size=4), documents)
def test_a_tenants_ngrams_never_reach_another(
    theirs: list[list[int]], ours: list[list[int]], prompt: list[int]
) -> None:
    with running() as drafter:
        for text in theirs:
            say(drafter, text, text, tenant="theirs")
        for text in ours:
            say(drafter, text, tenant="ours")
        for mode in LOSSLESS_MODES:
            tree = drafted(drafter, prompt, tenant="ours", mode=mode)
            known = {pair for text in (*ours, prompt) for pair in itertools.pairwise(text)}
            pairs = {(tree.token_ids[tree.parents[row]], tree.token_ids[row]) for row in range(1, len(tree))}
            assert pairs <= known


def test_a_corpus_is_drafted_from_only_by_name() -> None:
    text = list(range(100, 200))
    with running() as drafter:
        assert isinstance(drafter, CorpusDrafter)
        growth = drafter.add_corpus("maker", "manual", text)
        assert growth.tokens == len(text) and growth.nodes > len(text)
        assert chain(drafted(drafter, [1, 100, 101], "other", corpus="manual"))[:3] == [102, 103, 104]
        assert drafted(drafter, [1, 100, 101], "other").drafted == 0
        assert drafted(drafter, [1, 100, 101], "maker").drafted == 0
        with pytest.raises(PermissionDenied):
            drafter.add_corpus("other", "manual", text)
        with pytest.raises(UnknownCorpus):
            drafter.open(sequence([1], corpus="missing"))


def test_a_tenants_own_corpus_is_its_own() -> None:
    text = list(range(100, 200))
    with running() as drafter:
        drafter.add_corpus("maker", "", text)
        assert chain(drafted(drafter, [1, 100, 101], "maker"))[:2] == [102, 103]
        assert drafted(drafter, [1, 100, 101], "other").drafted == 0


@pytest.mark.parametrize("corpus", ["", "manual"], ids=["own", "shared"])
def test_what_fits_the_quota_is_kept(corpus: str) -> None:
    with running(tenant_capacity=2_000, corpus_capacity=1_000, capacity=4_000) as drafter:
        with pytest.raises(QuotaExceeded) as refused:
            drafter.add_corpus("maker", corpus, [*range(500), *range(500)])
        learnt = int(refused.value.metadata["learnt_tokens"])
        assert 0 < learnt < 1_000
        assert chain(drafted(drafter, [9, 0, 1], "maker", corpus=corpus))[:2] == [2, 3]
        with pytest.raises(QuotaExceeded):
            drafter.add_corpus("maker", corpus, list(range(600, 900)))
        # One tenant's quota is not another's.
        drafter.add_corpus("other", corpus and "else", list(range(60)))


def test_a_tenant_stays_within_its_capacity() -> None:
    with running(tenant_capacity=2_000) as drafter:
        for start in range(0, 900, 30):
            say(drafter, list(range(start, start + 30)))
        figures = drafter.stats()
        assert figures["trie_nodes"] <= 2_000 and figures["trie_evictions"] > 0


@pytest.mark.parametrize("mode", LOSSLESS_MODES, ids=lambda mode: mode.value)
def test_a_tenant_that_has_taught_nothing_takes_no_room(mode: VerificationMode) -> None:
    with running(learn_prompts=False) as drafter:
        for number in range(5):
            assert drafted(drafter, [1, 2, 3, 1, 2], f"tenant-{number}", mode=mode).drafted
        assert drafter.stats()["trie_tenants"] == 0


def test_the_longest_idle_tenants_make_room() -> None:
    with running(tenant_capacity=1_000, corpus_capacity=1_000, capacity=4_000) as drafter:
        for number in range(20):
            say(drafter, list(range(80)), tenant=f"tenant-{number}")
        figures = drafter.stats()
        assert 0 < figures["trie_tenants"] < 20
        assert figures["trie_dropped_tenants"] == 20 - figures["trie_tenants"]
        assert chain(drafted(drafter, [99, 1, 2], "tenant-19"))[:1] == [3]


def test_too_much_to_learn_is_dropped_and_counted() -> None:
    with running(max_backlog=10) as drafter:
        say(drafter, list(range(100)))
        assert drafter.stats()["trie_dropped_tokens_total"] == 100


def test_limits_are_the_smaller_of_both() -> None:
    loop = [1, 2, 3] * 10
    with running(num_draft_tokens=20, branch_length=10) as drafter:
        assert drafted(drafter, loop).drafted <= 20
        assert drafted(drafter, loop, limits=TreeLimits(5, 2)).drafted <= 5
        assert max(drafted(drafter, loop, limits=TreeLimits(5, 2)).depths) <= 2
        assert tree_limits(drafter.limits, TreeLimits(255, 0)) == TreeLimits(20, 10)


def test_many_sequences_are_drafted_in_one_call() -> None:
    with running() as drafter:
        followed = [sequence([k, k + 1, k + 2, k, k + 1]) for k in range(0, 50, 5)]
        for one in followed:
            drafter.open(one)
        trees = drafter.propose(followed)
        assert [chain(tree)[0] for tree in trees] == [k + 2 for k in range(0, 50, 5)]


def test_close_is_idempotent() -> None:
    with running() as drafter:
        followed = sequence([1, 2, 3])
        drafter.open(followed)
        drafter.close(followed)
        drafter.close(followed)


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    with running(snapshot=str(tmp_path)) as drafter:
        say(drafter, list(range(40)), tenant="a")
        drafter.add_corpus("a", "manual", list(range(100, 140)))
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0
    with running(snapshot=str(tmp_path)) as drafter:
        assert chain(drafted(drafter, [99, 1, 2], "a"))[:2] == [3, 4]
        assert drafted(drafter, [99, 1, 2], "b").drafted == 0
        assert chain(drafted(drafter, [99, 100, 101], "b", corpus="manual"))[:2] == [102, 103]
        with pytest.raises(PermissionDenied):
            drafter.add_corpus("b", "manual", [1])


def test_a_damaged_snapshot_is_refused_loudly_and_the_service_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(snapshot=str(tmp_path)) as drafter:
        say(drafter, list(range(40)))
    path = tmp_path / FILE_NAME
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with caplog.at_level(logging.ERROR), running(snapshot=str(tmp_path)) as drafter:
        assert drafted(drafter, [99, 1, 2]).drafted == 0
    assert "refused" in caplog.text and "starts empty" in caplog.text
    assert (tmp_path / (FILE_NAME + ".refused")).read_bytes() == bytes(damaged)


def test_a_snapshot_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("not a folder")
    with running(snapshot=str(tmp_path / "folder")) as drafter:
        say(drafter, [1, 2, 3])
    assert "not written" in caplog.text and "cannot be locked" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 256},
        {"breadth": 0},
        {"min_score": 0.0},
        {"tenant_capacity": 1},
        {"capacity": 1000},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_senseless_settings_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        TrieConfig(**bad)  # type: ignore[arg-type]


def test_shared_corpora_leave_room_for_tenants() -> None:
    with running(tenant_capacity=1_000, corpus_capacity=4_000, capacity=8_000) as drafter:
        for owner in ("first", "second", "third"):
            with pytest.raises(QuotaExceeded):
                for start in range(0, 9_000, 300):
                    drafter.add_corpus(owner, f"of-{owner}", [start + place for place in range(300)])
        for tenant in ("a", "b"):
            say(drafter, list(range(50)), tenant=tenant)
        assert drafter.stats()["trie_tenants"] == 2


def test_a_tenant_takes_no_more_names_than_it_may() -> None:
    with running(corpus_capacity=1_000) as drafter:
        for number in range(16):
            drafter.add_corpus("maker", f"name-{number}", [1, 2, 3])
        with pytest.raises(QuotaExceeded) as refused:
            drafter.add_corpus("maker", "one-more", [1, 2, 3])
        assert refused.value.retry_after is None
        drafter.add_corpus("maker", "name-3", [4, 5])
        drafter.add_corpus("other", "one-more", [1, 2, 3])


def test_own_tries_are_bounded_together() -> None:
    """Each took up to 18 MB outside of every capacity."""
    rng = np.random.default_rng(3)
    with running(own_capacity=200_000, learn_prompts=False, learn_outputs=False) as drafter:
        sequences = []
        for number in range(20):
            said = rng.integers(0, 30_000, 8_000).tolist()
            sequences.append(DraftSequence(number, said, len(said), 30_000))
            drafter.open(sequences[-1])
        least = 4 * 64 * TrieConfig().depth
        assert drafter.stats()["trie_own_rows"] <= 200_000 + 20 * least
        assert drafter.stats()["trie_own_rows"] == sum(len(one.state.own.rows) for one in sequences)
        for one in sequences:
            for size in (1, 40, 200, 3):
                fresh = rng.integers(0, 30_000, size).tolist()
                one.token_ids += fresh
                drafter.advance(one, fresh)
                drafter.propose([one])
            check_integrity(one.state.own)
            # What it said last is not what it forgets first.
            assert count(one.state.own, one.token_ids[-4:-1]) > 0
        assert drafter.stats()["trie_own_rows"] <= 200_000 + 20 * least
        assert drafter.stats()["trie_own_rows"] == sum(len(one.state.own.rows) for one in sequences)
        for one in sequences:
            drafter.close(one)
        assert drafter.stats()["trie_own_rows"] == 0


def test_a_deleted_corpus_is_forgotten_and_its_memory_free() -> None:
    with running() as drafter:
        before = drafter.stats()["trie_bytes"]
        drafter.add_corpus("maker", "manual", list(range(100, 200)))
        drafter.add_corpus("maker", "manual", list(range(200, 250)))
        # The figures say what is counted; this, that nothing holds the arrays.
        held = weakref.ref(drafter._corpora._shared["manual"].trie)
        listed = drafter.corpora("other")
        assert [(one.name, one.owner, one.tokens, one.documents, one.shared) for one in listed] == [
            ("manual", "maker", 150, 2, True)
        ]
        with pytest.raises(UnknownCorpus):
            drafter.delete_corpus("other", "manual")
        assert drafter.delete_corpus("maker", "manual") == listed[0]
        assert drafter.stats()["trie_bytes"] == before and held() is None
        assert drafter.corpora("maker") == []
        with pytest.raises(UnknownCorpus):
            drafter.delete_corpus(None, "manual")
        with pytest.raises(UnknownCorpus):
            drafter.open(sequence([1], corpus="manual"))
        # Its name and its place are free again.
        drafter.add_corpus("other", "manual", [1, 2, 3])
        assert drafter.corpora("maker")[0].owner == "other"


def test_places_of_deleted_corpora_are_free() -> None:
    with running(corpus_capacity=1_000) as drafter:
        for number in range(40):
            drafter.add_corpus("maker", f"name-{number}", [1, 2, 3])
            drafter.delete_corpus("maker", f"name-{number}")
        assert drafter._corpora._rows == 0


def test_corpora_are_bounded_over_all_tenants() -> None:
    with running(corpus_capacity=1_000) as drafter:
        for number in range(1024):
            drafter.add_corpus(f"tenant-{number // 16}", f"name-{number}", [1])
        with pytest.raises(QuotaExceeded) as refused:
            drafter.add_corpus("late", "one-more", [1])
        assert refused.value.retry_after is None and len(drafter.corpora("late")) == 1024


@pytest.mark.parametrize("mode", list(LOSSLESS_MODES))
def test_a_sequence_goes_on_without_a_deleted_corpus(mode: VerificationMode) -> None:
    with running(learn_prompts=False) as drafter:
        drafter.add_corpus("maker", "manual", list(range(100, 200)))
        drafter.add_corpus("user", "", [101, 900])
        one = sequence([1, 100, 101], "user", corpus="manual", mode=mode)
        drafter.open(one)
        assert 102 in drafter.propose([one])[0].token_ids
        drafter.delete_corpus("maker", "manual")
        tree = drafter.propose([one])[0]
        assert 102 not in tree.token_ids and 900 in tree.token_ids
        drafter.close(one)
