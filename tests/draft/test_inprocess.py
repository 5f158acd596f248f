"""The link without a network: the same answers, in the same call, and no drafter's bug in the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from scripted_drafter import VOCABULARY, Listener, ScriptedDrafter, opening, step
from waits import HUNG_SECONDS

from benchmarks.drafters.random_trees import RANDOM
from draft_service import in_process as inprocess
from draft_service.drafters.base import Drafter, DraftSequence
from draft_service.in_process import InprocessLink, ThreadedLink, connect
from draft_service.neural import devices
from outrider.errors import NotSupported, UnknownCorpus, WrongVocabulary
from outrider.settings import SettingsError
from outrider.tree import TokenTree


@pytest.fixture
def heard() -> Listener:
    return Listener()


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter()


@pytest.fixture
def link(drafter: ScriptedDrafter, heard: Listener) -> InprocessLink:
    return InprocessLink(drafter, heard)


def test_answers_come_inside_the_call(link: InprocessLink, heard: Listener, drafter: ScriptedDrafter) -> None:
    assert heard.infos[0].drafter == "scripted"
    link.open(opening(1))
    link.open(opening(2, [20]))
    assert heard.answered(1, 0) and heard.answered(2, 0)
    link.advance([step(1, 13), step(1, 21, 22, sequence_id=2)])
    assert heard.answered(1, 1) and heard.growths[-1].token_ids == (522, 23, 24, 25)
    assert drafter.batches == [1, 1, 2]


def test_a_sequence_opened_again_starts_anew(link: InprocessLink, heard: Listener) -> None:
    link.open(opening(1))
    link.advance([step(1, 13)])
    link.open(opening(1, [30], step=5))
    assert heard.failures == [] and heard.growths[-1].first_node_id == 1
    assert heard.answered(1, 5)


def test_a_refused_sequence_is_a_failure_of_its_own(
    link: InprocessLink, heard: Listener, drafter: ScriptedDrafter
) -> None:
    link.open(opening(1))
    drafter.refuses = UnknownCorpus("no such corpus")
    link.open(opening(2, corpus="nowhere"))
    link.advance([step(5, 1), step(1, 1, sequence_id=2)])
    reasons = [(failure.sequence_id, failure.reason) for failure in heard.failures]
    assert reasons == [(2, "UNKNOWN_CORPUS"), (1, "STEP_SKIPPED"), (2, "UNKNOWN_SEQUENCE")]
    assert heard.connected and not drafter.open_sequences


def test_a_long_conversation_never_runs_out_of_credit(link: InprocessLink, heard: Listener) -> None:
    link.open(opening(1))
    for number in range(1, 40):
        link.advance([step(number, 20)])
        link.advance([])
    assert [growth.base_step for growth in heard.growths] == list(range(40))


def test_a_draft_that_is_cut_off_costs_the_drafts_only(link: InprocessLink, heard: Listener) -> None:
    link.open(opening(1))
    link.cut_off("it says too much")
    assert heard.losses == ["the drafter failed: it says too much"]
    link.open(opening(2))
    link.advance([step(1, 2)])
    link.close([1])
    link.stop()
    assert len(heard.losses) == 1


def test_a_bug_at_the_end_of_a_sequence_costs_nothing_more(
    link: InprocessLink, heard: Listener, drafter: ScriptedDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(_: DraftSequence) -> None:
        raise IndexError("a bug in the drafter")

    for sequence_id in (1, 2):
        link.open(opening(sequence_id))
    drafter.close = wrong  # type: ignore[method-assign]
    link.close([1])
    link.advance([step(1, 13, sequence_id=2)])
    assert heard.connected and not heard.losses and heard.answered(2, 1)
    assert "IndexError: a bug in the drafter" in caplog.text


@pytest.mark.parametrize("call", ["open", "advance", "propose", "no tree"])
def test_a_bug_at_one_sequence_costs_its_drafts_only(
    call: str, link: InprocessLink, heard: Listener, drafter: ScriptedDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: object) -> None:
        if call != "no tree":
            raise IndexError("a bug in the drafter")

    link.open(opening(1))
    name = "propose" if call == "no tree" else call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, name, wrong)
        if call == "open":
            link.open(opening(2))
        else:
            link.advance([step(1, 13)])
    failed = 2 if call == "open" else 1
    assert [(one.sequence_id, one.reason, one.message) for one in heard.failures] == [
        (failed, "INTERNAL", "internal error")
    ]
    said = "TypeError: scripted.propose returned NoneType, not 1 tree" if call == "no tree" else "IndexError: a bug"
    assert said in caplog.text
    assert heard.connected and not heard.losses
    link.open(opening(3))
    link.advance([step(1, 13, sequence_id=3)])
    assert heard.answered(3, 0) and heard.answered(3, 1)


def test_stop_ends_sequences_and_drafter(link: InprocessLink, heard: Listener, drafter: ScriptedDrafter) -> None:
    link.open(opening(1))
    link.stop()
    link.stop()
    link.open(opening(2))
    assert drafter.stopped == 1 and not drafter.open_sequences and heard.connected


def test_settings_come_from_environment_and_file(
    heard: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text("[drafter]\nrandom_nodes = 3\nrandom_depth = 2\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(path))
    monkeypatch.setenv("OUTRIDER_DRAFTER_RANDOM_DEPTH", "1")
    connect(RANDOM)(heard, VOCABULARY, "").stop()
    assert (heard.infos[0].limits.max_nodes, heard.infos[0].limits.max_depth) == (3, 1)


def test_what_cannot_be_is_said_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSupported):
        connect("nothing")
    monkeypatch.setenv("OUTRIDER_DRAFTER_COLOUR", "red")
    with pytest.raises(SettingsError, match="COLOUR"):
        connect(RANDOM)


def test_a_drafter_on_a_gpu_answers_from_a_thread_of_its_own(drafter: ScriptedDrafter, heard: Listener) -> None:
    """The engine's call returns at once; what came while the drafter was at work is answered together."""
    working, go_on = threading.Event(), threading.Event()
    propose = drafter.propose

    def slow(sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        working.set()
        assert go_on.wait(HUNG_SECONDS)
        return propose(sequences)

    drafter.propose = slow  # type: ignore[method-assign]
    link = ThreadedLink(drafter, heard)
    link.open(opening(1))
    assert working.wait(HUNG_SECONDS) and not heard.growths
    link.open(opening(2, [20]))
    link.advance([step(1, 13)])
    link.advance([step(2, 14)])
    go_on.set()
    heard.until(lambda heard: heard.answered(1, 2))
    link.stop()
    assert heard.answered(1, 0) and heard.answered(1, 2) and heard.answered(2, 0) and not heard.answered(1, 1)
    assert not drafter.open_sequences
    link.stop()


@pytest.mark.parametrize("kind", [InprocessLink, ThreadedLink], ids=["inline", "threaded"])
def test_a_drafter_that_failed_is_stopped_too(
    kind: type[InprocessLink], drafter: ScriptedDrafter, heard: Listener
) -> None:
    """Its learner's thread and its snapshot do not hang on what went wrong with a tree."""

    link = kind(drafter, heard)
    link.open(opening(1))
    link.cut_off("it says too much")
    heard.until(lambda heard: heard.losses)
    link.stop()
    link.stop()
    assert drafter.stopped == 1 and heard.losses == ["the drafter failed: it says too much"]


def test_stopping_does_what_came_before_it(drafter: ScriptedDrafter, heard: Listener) -> None:
    """What an engine says last is learnt, although the thread takes it together with the end."""
    working, go_on, advanced = threading.Event(), threading.Event(), []

    def slow(_: DraftSequence) -> None:
        working.set()
        assert go_on.wait(HUNG_SECONDS)

    def advance(_: DraftSequence, committed: Sequence[int]) -> None:
        advanced.append(tuple(committed))

    drafter.open = slow  # type: ignore[method-assign]
    drafter.advance = advance  # type: ignore[method-assign]
    link = ThreadedLink(drafter, heard)
    link.open(opening(1))
    assert working.wait(HUNG_SECONDS)
    link.advance([step(1, 13)])
    stopping = threading.Thread(target=link.stop)
    stopping.start()
    go_on.set()
    stopping.join(HUNG_SECONDS)
    assert not stopping.is_alive() and advanced == [(13,)] and drafter.stopped == 1 and heard.connected


def test_a_thread_that_cannot_begin_is_a_lost_draft(
    drafter: ScriptedDrafter, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(devices, "launching_on", refuse)
    link = ThreadedLink(drafter, heard)
    heard.until(lambda heard: heard.losses)
    link.open(opening(1))
    link.stop()
    assert drafter.stopped == 1 and len(heard.losses) == 1


@pytest.mark.parametrize(("device", "kind"), [("cpu", InprocessLink), ("cuda:1", ThreadedLink)])
def test_a_drafter_on_a_gpu_gets_a_thread(
    device: str, kind: type[InprocessLink], drafter: ScriptedDrafter, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter.device = device  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "launching_on", lambda _: nullcontext())
    monkeypatch.setattr(inprocess, "create", lambda *_: drafter)
    link = connect(RANDOM)(heard, VOCABULARY, "")
    link.stop()
    assert type(link) is kind and drafter.started == drafter.stopped == 1


def test_a_head_of_another_tokenizer_is_refused(
    drafter: ScriptedDrafter, heard: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter.tokenizer_fingerprint = "ab" * 32  # type: ignore[attr-defined]
    monkeypatch.setattr(inprocess, "create", lambda *_: drafter)
    with pytest.raises(WrongVocabulary, match="tokenizer"):
        connect(RANDOM)(heard, VOCABULARY, "cd" * 32)
    assert not drafter.started and not heard.infos
    for fingerprint in ("", "ab" * 32):
        connect(RANDOM)(heard, VOCABULARY, fingerprint).stop()
        assert heard.infos[-1].tokenizer_fingerprint == "ab" * 32


def test_flags_stand_behind_the_drafters_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the drafter and of its parts; those of the service have no effect. Flags win over the environment."""
    made: list[tuple[str, Any, Any]] = []

    def create(name: str, settings_of: Callable[[str], Any]) -> Drafter:
        made.append((name, settings_of(name), settings_of("trie")))
        raise NotSupported("seen")

    monkeypatch.setattr(inprocess, "create", create)
    monkeypatch.setenv("OUTRIDER_MERGED_MERGED_NODES", "9")
    monkeypatch.setenv("OUTRIDER_TRIE_BREADTH", "5")
    with pytest.raises(NotSupported, match="seen"):
        connect("merged --merged-drafters 'trie, prompt_lookup' --breadth 3 --max-sequences 3")
    ((name, config, trie),) = made
    assert (name, config.merged_drafters, config.merged_nodes, trie.breadth) == ("merged", "trie, prompt_lookup", 9, 3)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trie --topk 3", "unrecognized arguments: --topk 3"),
        ("trie 'open", "No closing quotation"),
        ("trie --breadth few", "breadth"),
    ],
)
def test_wrong_flags_are_refused_and_do_not_end_the_process(argument: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        connect(argument)
