"""Pages that several sequences share: answers do not depend on them, and what they spare is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import make_tiny
from engine_harness import engine_config, make_runner, plain, plain_each, random_tree, request, run
from hidden_states import states_of
from lasting_engine import Engine

from draft_service.drafters.hidden_states import read_vectors
from outrider.drafting.events import Connected, DraftEvents, Opened
from outrider.sampling import SamplingParams
from outrider.wire.frames import (
    DraftInfo,
    DraftLink,
    FeatureRequest,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    TreeLimits,
)

SHARED = [(7 * i) % 200 + 3 for i in range(40)]
FEATURES = FeatureRequest((0, 2), 96, "float32")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_hits(page_size: int, temperature: float) -> None:
    model = make_tiny()
    sampling = SamplingParams(temperature=temperature, seed=5, ignore_eos=True)
    requests = [request([*SHARED, *tail], 20, sampling=sampling) for tail in ([1], [1], [9, 8], [])]
    engine = Engine(make_runner(make_tiny(), page_size))
    for place, wanted in enumerate(requests):
        (said,), (cached,) = engine.answer(wanted)
        assert said == plain(model, wanted)
        most = len(SHARED) if place != 3 else len(SHARED) - 1
        assert cached == (most // page_size * page_size if place else 0)


def test_without_the_cache_nothing_is_shared() -> None:
    engine = Engine(make_runner(make_tiny()), replace(engine_config(), prefix_cache=False))
    assert [engine.answer(request(SHARED, 5))[1] for _ in range(2)] == [[0], [0]]
    assert engine.runner.cache.spare_pages == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_may_pass_over_what_is_cached(page_size: int) -> None:
    """It reads its whole prompt, beside others that do not, and leaves its pages to later ones."""
    model, engine = make_tiny(), Engine(make_runner(make_tiny(), page_size))
    passing = request([*SHARED, 5], 20, reuses_pages=False)
    expected = plain(model, passing)
    for _ in range(2):
        assert engine.answer(passing) == ([expected], [0])
    together = engine.answer(replace(passing, reuses_pages=True), passing)
    assert together == ([expected] * 2, [len(SHARED) // page_size * page_size, 0])
    # Two of them beside each other: neither waits for the other's pages.
    fresh = request([9, *SHARED], 20, reuses_pages=False)
    assert engine.answer(fresh, fresh) == ([plain(model, fresh)] * 2, [0, 0])
    assert engine.answer(replace(fresh, reuses_pages=True))[1] == [len(SHARED) // page_size * page_size]


def test_a_conversation_finds_its_own_answers() -> None:
    model = make_tiny()
    engine = Engine(make_runner(make_tiny()))
    first = request(SHARED, 30)
    (said,), _ = engine.answer(first)
    following = request([*SHARED, *said, 4, 5], 10)
    (answer,), (cached,) = engine.answer(following)
    assert answer == plain(model, following)
    # All but the answer's last token was computed, and whole pages of that are kept.
    assert cached == (len(SHARED) + 29) // 16 * 16


def test_those_that_begin_together_read_it_once() -> None:
    """The `n` choices of one request, or many requests behind one system prompt."""
    model = make_tiny()
    for chunk in (7, 64):
        engine = Engine(make_runner(make_tiny()), engine_config(prefill_chunk=chunk))
        requests = [request([*SHARED, *tail], 40) for tail in ([1], [1], [2, 3])]
        said, cached = engine.answer(*requests)
        assert said == plain_each(model, requests) and cached == [0, 32, 32]


def test_a_short_common_beginning_is_not_waited_for() -> None:
    """Each reads it, and one page stays."""
    model = make_tiny()
    engine = Engine(make_runner(make_tiny()))
    requests = [request([*SHARED, *[place + 1] * 70], 10) for place in range(3)]
    said, cached = engine.answer(*requests)
    assert said == plain_each(model, requests) and cached == [0, 0, 0]
    # Two pages of the shared prompt, and whole ones behind it of each: 40 + 70 + 10 - 1 tokens in seven pages.
    assert engine.runner.cache.spare_pages == 2 + 3 * 5
    for wanted, before in zip(requests, said, strict=True):
        following = request([*wanted.token_ids, *before], 3)
        assert engine.answer(following) == ([plain(model, following)], [112])


@pytest.mark.parametrize("tenants", [("a", "a"), ("a", "b")])
def test_who_waits_for_a_cancelled_one_begins(tenants: tuple[str, str]) -> None:
    model = make_tiny()
    engine = Engine(make_runner(make_tiny()), engine_config(prefill_chunk=17))
    first, second = (replace(request([*SHARED, place], 10), tenant=tenants[place]) for place in range(2))
    ids = [engine.add(first), engine.add(second)]
    engine.loop.step()
    waits = engine.loop.live[ids[1]].sequence.kv_length == 0
    assert waits == (tenants == ("a", "a"))
    engine.loop.end(ids[0], "cancelled")
    # What the first had computed of it is used.
    assert engine.finish(ids[1:]) == ([plain(model, second)], [16 if waits else 0])


def test_tenants_share_nothing() -> None:
    engine = Engine(make_runner(make_tiny()))
    cached = [engine.answer(request(SHARED, 3, tenant=tenant))[1][0] for tenant in ("one", "two", "one", "two")]
    assert cached == [0, 0, 32, 32]


def test_tenants_share_what_the_operator_lists() -> None:
    model = make_tiny()
    engine = Engine(make_runner(make_tiny()))
    engine.loop.scheduler.pages.share_between_tenants(SHARED)
    for tenant, most in (("one", 0), ("two", 32), ("two", 48)):
        wanted = request([*SHARED, *range(3, 23)], 5, tenant=tenant)
        assert engine.answer(wanted) == ([plain(model, wanted)], [most])


def test_kept_pages_give_way_to_whoever_runs() -> None:
    """The least recently used text goes first, and nobody is preempted for pages that are only kept."""
    engine = Engine(make_runner(make_tiny(), kv_tokens=192))
    texts = [[(place + 11 * i) % 200 + 3 for i in range(40)] for place in range(6)]
    for text in texts:
        engine.answer(request(text, 3))
    assert engine.runner.cache.free_pages == 12
    (_,), (cached,) = engine.answer(request(texts[-1], 3))
    assert cached == 32
    # More than is unowned: two sequences of 80 tokens.
    engine.answer(*(request([9 + place] * 60, 20) for place in range(2)))
    assert [live.sequence.totals.preemptions for live in engine.loop.live.values()] == []
    assert engine.answer(request(texts[0], 3))[1] == [0]


def test_a_preempted_sequence_finds_its_pages() -> None:
    requests = [request([5 + place] * 20, 40) for place in range(2)]
    outcomes = run(make_runner(make_tiny(), kv_tokens=96), requests, config=engine_config(max_running=2))
    assert [one.token_ids for one in outcomes] == plain_each(make_tiny(), requests)
    totals = [one.finished.totals for one in outcomes]
    assert any(one.preemptions for one in totals)
    # What it found of its own is no hit of its prompt.
    assert [one.cached_tokens for one in totals] == [0, 0]


def test_what_a_cancelled_request_had_computed_stays() -> None:
    engine = Engine(make_runner(make_tiny()))
    loop = engine.loop
    loop.add(loop.make(99, request(SHARED, 50)))
    for _ in range(20):
        loop.step()
    loop.end(99, "cancelled")
    engine.check()
    assert engine.answer(request([*SHARED, 1], 3))[1] == [32]


def test_other_weights_find_nothing() -> None:
    engine = Engine(make_runner(make_tiny()))
    engine.answer(request(SHARED, 3))
    engine.loop.exchanged(version=2)
    assert engine.runner.cache.spare_pages == 0
    assert engine.answer(request(SHARED, 3))[1] == [0]


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_behind_a_hit_are_verified_as_ever(on_device: bool) -> None:
    model = make_tiny()
    requests = [request([*SHARED, *tail], 25) for tail in ([1], [2], [1, 3])]
    outcomes = run(make_runner(make_tiny()), requests, propose=random_tree(211, 12), stagger=6, on_device=on_device)
    assert [one.token_ids for one in outcomes] == plain_each(model, requests)
    assert [one.finished.totals.cached_tokens for one in outcomes] == [0, 32, 32]


class ReadingDraft:
    """A link that checks every hidden state it gets against transformers' own, and drafts nothing. Of sequences behind
    the first it needs those from token `features_from` on."""

    def __init__(self, events: DraftEvents, features_from: int) -> None:
        self._events, self._features_from = events, features_from
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self._model = make_tiny()
        events.receive(Connected(DraftInfo("reads", 0, "", TreeLimits(), 1 << 20, "0", features=FEATURES)))

    def open(self, sequence: OpenSequence) -> None:
        self.tokens[sequence.sequence_id] = list(sequence.token_ids)
        first = sequence.sequence_id == 1
        self.known[sequence.sequence_id] = 0 if first else self._features_from
        self._events.receive(Opened(sequence.sequence_id, self.known[sequence.sequence_id]))

    def advance(self, advances: list[SequenceAdvance]) -> None:
        for advance in advances:
            tokens = self.tokens[advance.sequence_id]
            tokens += advance.token_ids
            assert advance.features is not None
            self._take(advance.sequence_id, len(tokens) - 1 - advance.features.rows, advance.features)

    def send_features(self, features: list[SequenceFeatures]) -> None:
        for one in features:
            self._take(one.sequence_id, one.position, one.vectors)

    def close(self, sequence_ids: list[int]) -> None:
        pass

    def _take(self, sequence_id: int, position: int, vectors) -> None:  # type: ignore[no-untyped-def]
        assert position == self.known[sequence_id], "without a gap"
        end = self.known[sequence_id] = position + vectors.rows
        expected = states_of(self._model, self.tokens[sequence_id], FEATURES.layers)[position:end]
        torch.testing.assert_close(read_vectors(vectors), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("features_from", [0, 16], ids=["all", "what it has not read"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_head_gets_the_states_of_a_shared_prefix(page_size: int, features_from: int) -> None:
    links: list[ReadingDraft] = []

    def connect(events: DraftEvents) -> DraftLink:
        links.append(ReadingDraft(events, features_from))
        return links[0]  # type: ignore[return-value]

    requests = [request([*SHARED, *tail], 6) for tail in ([1], [2], [1, 3])]
    config = replace(engine_config(), feature_window=64)
    outcomes = run(make_runner(make_tiny(), page_size), requests, connect=connect, config=config, stagger=8)
    cached = [one.finished.totals.cached_tokens for one in outcomes]
    assert cached == ([0, 40, 41] if page_size == 1 else [0, 32, 32])
    # Of every token but the last two: the answer ended with the step that read the last but one.
    assert [links[0].known[place] for place in (1, 2, 3)] == [len(one.token_ids) + 4 for one in requests]
