"""Merged trees: what several drafters agree on is one node, the best come first, and drawn trees are never mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from eagle_drafting import make_drafter, same_tree, states_of, text
from eagle_heads import VOCABULARY, make_head
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.drafters.random_trees import RANDOM
from draft_service.config import drafter_config
from draft_service.drafters.base import CorpusDrafter, Drafter, DraftSequence, create, features_of, info_of
from draft_service.drafters.grown import ArrayDrafter, GrownTrees, Pending
from draft_service.drafters.merged import MergedConfig, MergedDrafter
from draft_service.drafters.merging import merge_grown
from draft_service.drafters.prompt_lookup import PromptLookupConfig, PromptLookupDrafter
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from draft_service.service import run_service
from outrider.errors import NotSupported, UnknownCorpus
from outrider.sampling import SamplingParams, VerificationMode
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits


def tree(*nodes: tuple[int, int, float]) -> TokenTree:
    """Root 9, then (parent, token, score)."""
    return TokenTree(
        (9, *(token for _, token, _ in nodes)),
        (0, *(parent for parent, _, _ in nodes)),
        (1.0, *(score for _, _, score in nodes)),
    )


def merge(proposed: Sequence[TokenTree], nodes: int) -> TokenTree:
    (merged,) = merge_grown([GrownTrees.of([one]) for one in proposed], [nodes]).as_trees()
    return merged


def by_paths(proposed: Sequence[TokenTree], nodes: int) -> TokenTree:
    """The merged tree by its definition: each path with its highest score, in the order in which they were proposed."""
    scores: dict[tuple[int, ...], float] = {}
    for one in proposed:
        for path, score in zip(paths_of(one)[1:], one.scores[1:], strict=True):
            scores[path] = max(scores.get(path, 0.0), score)
    totals: dict[tuple[int, ...], float] = {}
    for path, score in scores.items():
        totals[path[:-1]] = totals.get(path[:-1], 0.0) + score
    path_probs: dict[tuple[int, ...], float] = {(): 1.0}
    for path, score in scores.items():
        scores[path] = score / max(1.0, totals[path[:-1]])
        path_probs[path] = path_probs[path[:-1]] * scores[path]
    kept = sorted(scores, key=lambda path: -path_probs[path])[:nodes]
    row_of = {path: row for row, path in enumerate([(), *kept])}
    return TokenTree(
        (proposed[0].token_ids[0], *(path[-1] for path in kept)),
        (0, *(row_of[path[:-1]] for path in kept)),
        (1.0, *(scores[path] for path in kept)),
    )


def test_duplicates_are_joined_and_the_best_come_first() -> None:
    first = tree((0, 1, 0.6), (1, 2, 0.5), (0, 3, 0.2))
    second = tree((0, 4, 0.15), (0, 1, 0.5), (2, 2, 0.9), (2, 5, 0.05))
    merged = merge([first, second], 10)
    # 1; 2 below it with the higher score; 3; 4; 5 below 1.
    assert merged.token_ids == (9, 1, 2, 3, 4, 5)
    assert merged.parents == (0, 0, 1, 0, 0, 1)
    assert merged.scores == pytest.approx((1.0, 0.6, 0.9, 0.2, 0.15, 0.05))
    assert merge([first, second], 3) == TokenTree((9, 1, 2, 3), (0, 0, 1, 0), merged.scores[:4])


def test_siblings_share_at_most_all_of_the_chance() -> None:
    merged = merge([tree((0, 1, 0.9)), tree((0, 2, 0.9), (0, 3, 0.1))], 10)
    assert merged.token_ids == (9, 1, 2, 3)
    assert sum(merged.scores[1:]) == pytest.approx(1.0) and merged.scores[1] == merged.scores[2]


def test_one_tree_stays_as_it_is() -> None:
    alone = tree((0, 1, 0.6), (1, 2, 0.9), (0, 3, 0.3), (2, 3, 0.5))
    assert merge([alone, TokenTree.root_only(9)], 10) == alone
    assert merge([TokenTree.root_only(9)] * 2, 10) == TokenTree.root_only(9)


@st.composite
def trees(draw: Any) -> TokenTree:
    nodes: list[tuple[int, int, float]] = []
    siblings: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(0, len(nodes))), draw(st.integers(0, 4))
        if (parent, token) not in siblings:
            siblings.add((parent, token))
            nodes.append((parent, token, draw(st.floats(0.0, 1.0))))
    return tree(*nodes)


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 20))
def test_every_merged_tree_is_well_formed(proposed: list[TokenTree], nodes: int) -> None:
    merged = merge(proposed, nodes)
    TokenTree.checked(merged.token_ids, merged.parents, merged.scores, vocabulary_size=10, max_rows=nodes + 1)
    path_probs = [1.0]
    for row in range(1, len(merged)):
        path_probs.append(path_probs[merged.parents[row]] * merged.scores[row])
    assert all(path_probs[row] >= path_probs[row + 1] - 1e-12 for row in range(1, len(merged) - 1))
    assert paths(merged) <= set().union(*(paths(one) for one in proposed))
    if nodes >= 20 and len(proposed) == 1:
        assert paths(merged) == paths(proposed[0])


@given(st.lists(st.tuples(trees(), trees(), trees()), min_size=1, max_size=4), st.integers(2, 3), st.integers(1, 20))
def test_compiled_loops_merge_the_same(proposed: list[tuple[TokenTree, ...]], parts: int, nodes: int) -> None:
    limits = [max(1, nodes - i) for i in range(len(proposed))]
    merged = merge_grown([GrownTrees.of([own[part] for own in proposed]) for part in range(parts)], limits)
    assert merged.as_trees() == [by_paths(own[:parts], most) for own, most in zip(proposed, limits, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_compiled_loops_merge_large_trees_the_same(seed: int) -> None:
    random = np.random.default_rng(seed)

    def grown(rows: int, steep: float) -> TokenTree:
        nodes: list[tuple[int, int, float]] = []
        siblings: set[tuple[int, int]] = set()
        while len(nodes) < rows:
            parent, token = int(random.integers(0, len(nodes) + 1)), int(random.integers(0, 6))
            if (parent, token) not in siblings:
                siblings.add((parent, token))
                # Few different ones, so that many are equal.
                nodes.append((parent, token, round(float(random.random() ** steep), 1 + seed % 3)))
        return tree(*nodes)

    proposed = [grown(239, 1.0), grown(1 + 20 * seed, 0.1), grown(100, 4.0)]
    for nodes in (1, 100, 239, 255):
        assert merge(proposed, nodes) == by_paths(proposed, nodes)


def paths_of(one: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from below the root to each row."""
    found: list[tuple[int, ...]] = [()]
    for row in range(1, len(one)):
        found.append((*found[one.parents[row]], one.token_ids[row]))
    return found


def paths(one: TokenTree) -> set[tuple[int, ...]]:
    return set(paths_of(one))


def trie_and_head() -> tuple[MergedDrafter, NgramDrafter]:
    trie = NgramDrafter(TrieConfig(num_draft_tokens=10))
    merged = MergedDrafter(MergedConfig(), [make_drafter(make_head(draft_vocab_size=VOCABULARY)), trie])
    trie.start()
    return merged, trie


def followed(drafter: Drafter, mode: VerificationMode, *, fed: bool = True) -> DraftSequence:
    tokens = text(6) * 3
    sampling = SamplingParams(temperature=0.0 if mode is VerificationMode.GREEDY else 1.0)
    sequence = DraftSequence(1, tokens[:-4], 1, VOCABULARY, seed=3, mode=mode, sampling=sampling)
    drafter.open(sequence)
    known = states_of(make_head(), len(tokens))
    sequence.token_ids.extend(tokens[-4:])
    if fed:
        assert sequence.features is not None
        sequence.features.append(known[: len(tokens) - 1], 0)
    drafter.advance(sequence, tokens[-4:])
    for part in drafter._parts if isinstance(drafter, MergedDrafter) else [drafter]:
        if isinstance(part, NgramDrafter):
            # It learns in a thread of its own, and trees of before and after that differ.
            part.flush()
    return sequence


def test_trie_and_head_serve_one_sequence() -> None:
    merged, trie = trie_and_head()
    assert merged.limits == TreeLimits(14, 32) and merged.vocabulary_size == VOCABULARY
    wanted = features_of(merged)
    assert wanted is not None and not wanted.required
    sequence = followed(merged, VerificationMode.GREEDY)
    (both,) = merged.propose([sequence])
    (of_head,), (of_trie,) = (part.propose([view]) for part, view in zip(merged._parts, sequence.state, strict=True))
    assert of_trie.drafted and of_head.drafted
    assert both == by_paths([of_head, of_trie], 14)
    assert paths(both) & paths(of_trie) - {()} and paths(both) & paths(of_head) - {()}
    merged.close(sequence)
    merged.close(sequence)
    assert merged.stats()["eagle_cache_used_tokens"] == 0 and "trie_backlog_tokens" in merged.stats()
    merged.stop()
    assert trie.stats()["trie_learnt_tokens_total"] > 0


def test_a_part_that_fails_to_open_leaves_no_other_open() -> None:
    """By any error, such as memory that is short or a mistake in somebody's drafter."""

    class Failing(PromptLookupDrafter):
        def open(self, _: DraftSequence) -> None:
            raise RuntimeError("no memory")

    closed: list[DraftSequence] = []

    class Noting(PromptLookupDrafter):
        def close(self, sequence: DraftSequence) -> None:
            closed.append(sequence)

    merged = MergedDrafter(MergedConfig(), [Noting(PromptLookupConfig()), Failing(PromptLookupConfig())])
    sequence = DraftSequence(1, [1, 2], 1, VOCABULARY)
    with pytest.raises(RuntimeError, match="no memory"):
        merged.open(sequence)
    assert len(closed) == 1


def test_a_part_that_fails_to_close_leaves_no_other_open() -> None:
    closed: list[DraftSequence] = []

    class Noting(PromptLookupDrafter):
        def close(self, sequence: DraftSequence) -> None:
            closed.append(sequence)

    class Failing(PromptLookupDrafter):
        def close(self, _: DraftSequence) -> None:
            raise RuntimeError("a bug")

    for parts in ((Noting, Failing), (Failing, Noting)):
        merged = MergedDrafter(MergedConfig(), [part(PromptLookupConfig()) for part in parts])
        sequence = DraftSequence(1, [1, 2], 1, VOCABULARY)
        merged.open(sequence)
        with pytest.raises(RuntimeError, match="a bug"):
            merged.close(sequence)
        assert sequence.state is None
    assert len(closed) == 2


@pytest.mark.parametrize("mode", [VerificationMode.GREEDY, VerificationMode.COUPLED], ids=["greedy", "coupled"])
def test_bytes_say_what_trees_say(mode: VerificationMode) -> None:
    merged, _ = trie_and_head()
    assert isinstance(merged, ArrayDrafter)
    sequences = [followed(merged, mode), followed(merged, VerificationMode.GREEDY, fed=False)]
    expected, heads = merged.propose(sequences), [(1, 4, 7, VOCABULARY), (2, 5, 1, VOCABULARY)]
    packed = merged.start_trees(sequences).fetch().packed(heads)
    assert packed is not None and packed[0] == [one.drafted for one in expected]
    assert packed == GrownTrees.of(expected).packed(heads)
    # A token that the target does not know.
    assert merged.start_trees(sequences).fetch().packed([(*head[:3], 1) for head in heads]) is None
    merged.stop()


def test_modes_are_mixed_in_a_frame() -> None:
    merged, _ = trie_and_head()
    drawn, joined = followed(merged, VerificationMode.REJECTION), followed(merged, VerificationMode.COUPLED)
    (expected,), (other,) = merged.propose([drawn]), merged.propose([joined])
    for one, alone in zip(merged.propose([drawn, joined]), (expected, other), strict=True):
        same_tree(one, alone)
    assert merged.propose([]) == []
    merged.stop()


def test_others_work_while_another_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    merged, trie = trie_and_head()
    head = merged._parts[0]
    events: list[str] = []

    def begin(sequences: Sequence[DraftSequence]) -> Pending:
        events.append("head begun")
        grown = GrownTrees.of(head.propose(sequences))

        def wait(_early: bool) -> GrownTrees:
            events.append("head fetched")
            return grown

        return Pending(wait, elsewhere=True)

    def grow(sequences: Sequence[DraftSequence]) -> GrownTrees:
        events.append("trie grown")
        return type(trie).grow(trie, sequences)

    sequence = followed(merged, VerificationMode.GREEDY)
    (expected,) = merged.propose([sequence])
    monkeypatch.setattr(head, "start_trees", begin)
    monkeypatch.setattr(trie, "grow", grow)
    assert merged.propose([sequence]) == [expected]
    assert events == ["head begun", "trie grown", "head fetched"]
    merged.stop()


@pytest.mark.parametrize("fed", [True, False], ids=["features", "no features"])
def test_a_drawn_tree_is_that_of_one_drafter(fed: bool) -> None:
    merged, trie = trie_and_head()
    sequence = followed(merged, VerificationMode.REJECTION, fed=fed)
    # Both trees are drawn with all that is learnt.
    trie.flush()
    (drawn,) = merged.propose([sequence])
    speaking = 0 if fed else 1
    (alone,) = merged._parts[speaking].propose([sequence.state[speaking]])
    assert drawn.drafted and drawn == alone
    assert drawn.distributions.keys() == set(drawn.parents[1:])
    merged.stop()


def test_a_drafter_that_refuses_leaves_nothing_open() -> None:
    merged, _ = trie_and_head()
    sequence = DraftSequence(1, [1, 2], 1, VOCABULARY, corpus="nowhere")
    with pytest.raises(UnknownCorpus):
        merged.open(sequence)
    assert sequence.state is None and sequence.features is None
    merged.stop()


def test_what_cannot_be_merged_is_refused() -> None:
    for names in ("trie", "trie,trie", "trie,merged", ""):
        with pytest.raises(SettingsError):
            MergedConfig(merged_drafters=names)
    with pytest.raises(NotSupported, match="features"):
        MergedDrafter(MergedConfig(), [make_drafter(), make_drafter()])
    others = [make_drafter(), _Foreign(PromptLookupConfig())]
    with pytest.raises(NotSupported, match="vocabularies"):
        MergedDrafter(MergedConfig(), others)


def test_the_tokenizer_is_that_of_the_part_that_has_one() -> None:
    def head(fingerprint: str) -> Drafter:
        drafter = PromptLookupDrafter(PromptLookupConfig())
        drafter.tokenizer_fingerprint = fingerprint  # type: ignore[attr-defined]
        return drafter

    merged = MergedDrafter(MergedConfig(), [PromptLookupDrafter(PromptLookupConfig()), head("ab" * 32), head("")])
    assert info_of(merged, VOCABULARY).tokenizer_fingerprint == "ab" * 32
    with pytest.raises(NotSupported, match="tokenizers"):
        MergedDrafter(MergedConfig(), [head("ab" * 32), head("cd" * 32)])


class _Foreign(PromptLookupDrafter):
    vocabulary_size = 77


def test_it_is_made_by_name_from_the_settings_of_its_parts() -> None:
    asked: list[str] = []

    def settings_of(name: str) -> Any:
        asked.append(name)
        return {
            "merged": MergedConfig(merged_drafters="trie, prompt_lookup"),
            "trie": TrieConfig(num_draft_tokens=7),
            "prompt_lookup": PromptLookupConfig(lookup_tokens=5),
        }[name]

    merged = create("merged", settings_of)
    assert asked == ["merged", "trie", "prompt_lookup"]
    assert merged.limits.max_nodes == 7 and features_of(merged) is None
    assert isinstance(merged, CorpusDrafter)
    merged.start()
    assert merged.add_corpus("tenant", "", [1, 2, 3]).tokens == 3
    merged.stop()
    environment = {"OUTRIDER_MERGED_MERGED_DRAFTERS": f"{RANDOM},prompt_lookup", "OUTRIDER_MERGED_MERGED_NODES": "3"}
    unteachable = create("merged", partial(drafter_config, environment=environment))
    assert not isinstance(unteachable, CorpusDrafter) and unteachable.limits.max_nodes == 3


class _Chain(Drafter):
    """Drafts the same tokens below every root."""

    name, vocabulary_size, max_context, limits = "chain", 0, 64, TreeLimits(9, 9)

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        count = len(self._token_ids)
        tokens, scores = self._token_ids, (1.0, *[0.5] * count)
        return [TokenTree((one.root, *tokens), (0, *range(count)), scores) for one in sequences]


@pytest.mark.parametrize(("nodes", "drafted"), [(0, 5), (6, 6), (3, 3)])
def test_a_merged_tree_is_as_large_as_the_largest_of_its_parts_unless_told(nodes: int, drafted: int) -> None:
    """Chains of other tokens, five and four nodes long."""
    parts = [_Chain(1, 2, 3, 4, 5), _Chain(6, 7, 8, 9)]
    merged = MergedDrafter(MergedConfig(merged_nodes=nodes), parts)
    sequences = [DraftSequence(number, [5], 1, VOCABULARY) for number in (1, 2)]
    for sequence in sequences:
        merged.open(sequence)
    assert [tree.drafted for tree in merged.propose(sequences)] == [drafted, drafted]


def test_figures_of_all_parts_are_there() -> None:
    stats: Sequence[Mapping[str, float]] = [trie_and_head()[0].stats()]
    assert {"eagle_feature_rows_total", "trie_learnt_tokens_total"} <= stats[0].keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--head", "absent"), "absent: no such folder"),
        (("--merged-drafters", f"prompt_lookup,{RANDOM}", "--lookup-min", "0"), "lookup"),
        (("--merged-drafters", f"prompt_lookup,{RANDOM}", "--head", "absent"), "unrecognized arguments: --head"),
        # Which both have.
        (("--num-draft-tokens", "-1"), "num-draft-tokens"),
    ],
    ids=["of-the-first", "of-the-second", "of-neither", "of-both"],
)
def test_flags_reach_the_parts(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_service(["--drafter", "merged", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
