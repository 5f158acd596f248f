"""Several drafts for a target: who follows what, and what happens to it when one of them goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_draft import FAST, INFO
from scripted_drafter import VOCABULARY, Listener, opening, step
from waits import wait_until

from outrider.drafting.events import Connected, Disconnected, DraftEvents, Grown, SequenceFailure
from outrider.drafting.link import connect_draft, prepare_draft
from outrider.drafting.listed import ListedDrafts
from outrider.drafting.prefix_homes import PrefixHomes
from outrider.drafting.several import SeveralDrafts
from outrider.settings import SettingsError
from outrider.wire.frames import DraftInfo, OpenSequence, SequenceAdvance, SequenceFeatures, SequenceGrowth, Vectors

TRIE, EAGLE = replace(INFO, drafter="trie"), replace(INFO, drafter="eagle")


@dataclass
class OneLink:
    """A link that remembers what it was told, by sequence."""

    events: DraftEvents
    told: list[tuple[str, int]] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    stopped: bool = False

    def open(self, sequence: OpenSequence) -> None:
        self.told.append(("open", sequence.sequence_id))

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        self.told += [("advance", one.sequence_id) for one in advances]

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        self.told += [("features", one.sequence_id) for one in features]

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.told += [("close", each) for each in sequence_ids]

    def cut_off(self, reason: str) -> None:
        self.cut.append(reason)

    def stop(self) -> None:
        self.stopped = True

    def grow(self, sequence_id: int, nodes: int = 1) -> None:
        zeros = (0,) * nodes
        self.events.receive(Grown([SequenceGrowth(sequence_id, 0, 1, zeros, zeros, (0.5,) * nodes)]))


@dataclass
class Drafts:
    """Links by address, and what the target hears of them together."""

    links: dict[str, OneLink] = field(default_factory=dict)
    heard: Listener = field(default_factory=Listener)

    def connect(self, address: str, events: DraftEvents) -> Any:
        self.links[address] = OneLink(events)
        return self.links[address]

    def several(self, addresses: str = "abc", info: DraftInfo = TRIE) -> SeveralDrafts:
        found = SeveralDrafts(list(addresses), self.connect, self.heard)
        for link in self.links.values():
            link.events.receive(Connected(info))
        return found

    def home_of(self, sequence_id: int) -> str:
        """Who was told to open it last."""
        return [address for address, link in self.links.items() if ("open", sequence_id) in link.told][-1]


@pytest.fixture
def drafts() -> Drafts:
    return Drafts()


def test_the_first_that_is_there_is_the_draft(drafts: Drafts) -> None:
    drafts.several()
    assert drafts.heard.infos == [TRIE] and not drafts.heard.losses


def test_a_tenant_stays_with_the_draft_that_knows_its_texts(drafts: Drafts) -> None:
    several = drafts.several()
    for number in range(60):
        several.open(opening(number, tenant=f"tenant {number % 20}"))
    homes = [drafts.home_of(number) for number in range(60)]
    assert homes[:20] == homes[20:40] == homes[40:] and set(homes) == set("abc")
    # Another target takes the same ones there, in whatever order it names them.
    others = Drafts()
    again = others.several("cab")
    for number in range(20):
        again.open(opening(number, tenant=f"tenant {number}"))
    assert [others.home_of(number) for number in range(20)] == homes[:20]


@pytest.mark.parametrize("drafter", ["eagle", "prompt_lookup"])
def test_drafts_without_memory_share_what_one_tenant_asks(drafts: Drafts, drafter: str) -> None:
    several = drafts.several(info=replace(INFO, drafter=drafter))
    for number in range(90):
        several.open(opening(number))
    assert min(Counter(map(drafts.home_of, range(90))).values()) > 15


def _text(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 131 + 7 * i + i * i) % VOCABULARY for i in range(length))


def test_a_conversation_stays_with_the_draft_that_has_read_it(drafts: Drafts) -> None:
    """Turn after turn, for each tenant by itself, and until that draft is lost."""
    several = drafts.several(info=EAGLE)
    ids = iter(range(1, 1000))

    def home(seed: int, length: int, tenant: str = "acme") -> str:
        number = next(ids)
        several.open(opening(number, _text(seed, length), tenant=tenant))
        several.close([number])
        return drafts.home_of(number)

    first = [home(seed, 200) for seed in range(12)]
    assert set(first) == set("abc")
    for turn in (260, 320, 800):
        assert [home(seed, turn) for seed in range(12)] == first
    assert [home(seed, 300, "other") for seed in range(12)] != first
    # What is shorter than a block is nobody's.
    assert {home(3, 60) for _ in range(30)} == set("abc")
    gone = first[0]
    drafts.links[gone].events.receive(Disconnected("lost"))
    drafts.links[gone].events.receive(Connected(EAGLE))
    assert several._prefix_homes.choose("acme", _text(0, 200), [], "abc") == ""


def test_a_prompt_of_all_does_not_fill_one_draft(drafts: Drafts) -> None:
    several = drafts.several(info=EAGLE)
    for number in range(30):
        several.open(opening(number, (*_text(1, 640), number)))
    assert max(Counter(map(drafts.home_of, range(30))).values()) <= 1.25 * 10 + 2


def test_blocks_are_forgotten_oldest_first() -> None:
    homes = PrefixHomes(most_blocks=3)
    for seed, address in ((1, "a"), (2, "b"), (3, "c")):
        homes.note("acme", _text(seed, 64), address)
    assert homes.choose("acme", _text(1, 100), [], ["a", "b"]) == "a"
    homes.note("acme", _text(1, 128), "a")
    assert [homes.choose("acme", _text(seed, 64), [], "abc") for seed in (1, 2, 3)] == ["a", "", "c"]
    assert homes.choose("other", _text(1, 64), [], "abc") == ""
    homes.forget("a")
    assert homes.choose("acme", _text(1, 128), [], "abc") == ""


def test_each_draft_hears_of_its_own_sequences(drafts: Drafts) -> None:
    several = drafts.several(info=EAGLE)
    for number in range(12):
        several.open(opening(number))
    several.advance([step(1, 7, sequence_id=number) for number in range(12)])
    vectors = Vectors("float32", 2, b"\0" * 8)
    several.send_features([SequenceFeatures(number, 0, vectors) for number in range(12)])
    several.close(range(12))
    for link in drafts.links.values():
        own = [number for what, number in link.told if what == "open"]
        assert own and link.told == [(what, each) for what in ("open", "advance", "features", "close") for each in own]
    # What is closed is nobody's.
    several.advance([step(2, 7, sequence_id=3)])
    assert all(link.told[-1][0] == "close" for link in drafts.links.values())


def test_the_others_take_over_what_a_lost_one_followed(drafts: Drafts) -> None:
    several = drafts.several()
    for number in range(30):
        several.open(opening(number, tenant=f"tenant {number}"))
    before = [drafts.home_of(number) for number in range(30)]
    drafts.links["b"].events.receive(Disconnected("killed"))
    assert drafts.heard.lost == [number for number in range(30) if before[number] == "b"]
    assert drafts.heard.connected and not drafts.heard.losses
    told = len(drafts.links["b"].told)
    for number in drafts.heard.lost:
        several.open(opening(number, tenant=f"tenant {number}"))
    assert len(drafts.links["b"].told) == told
    # Those of the others stay where they are, and so they do when it is back.
    drafts.links["b"].events.receive(Connected(replace(TRIE, version="newer")))
    assert drafts.heard.infos == [TRIE]
    several.advance([step(1, 7, sequence_id=number) for number in range(30)])
    assert len(drafts.links["b"].told) == told
    # New ones of its tenants go there again.
    several.open(opening(99, tenant=f"tenant {drafts.heard.lost[0]}"))
    assert drafts.home_of(99) == "b"


def test_while_none_is_there_nothing_is_told(drafts: Drafts) -> None:
    several = drafts.several("ab")
    several.open(opening(1))
    for address in "ab":
        drafts.links[address].events.receive(Disconnected(f"{address} is gone"))
    assert len(drafts.heard.losses) == 1 and not drafts.heard.connected
    told = {address: list(link.told) for address, link in drafts.links.items()}
    several.open(opening(2))
    several.advance([step(1, 7)])
    assert {address: link.told for address, link in drafts.links.items()} == told
    drafts.links["b"].events.receive(Connected(TRIE))
    assert drafts.heard.infos == [TRIE, TRIE]
    several.open(opening(1))
    assert ("open", 1) in drafts.links["b"].told


def test_growth_of_a_draft_that_no_longer_follows_is_left_out(drafts: Drafts) -> None:
    several = drafts.several("ab")
    several.open(opening(1))
    home = drafts.home_of(1)
    (other,) = {"a", "b"} - {home}
    drafts.links[home].grow(1)
    drafts.links[other].grow(1)
    assert len(drafts.heard.growths) == 1
    drafts.links[other].events.receive(SequenceFailure(1, "GONE", "not mine"))
    assert not drafts.heard.failures
    drafts.links[home].events.receive(SequenceFailure(1, "QUOTA", "full"))
    assert len(drafts.heard.failures) == 1
    drafts.links[home].grow(1)
    assert len(drafts.heard.growths) == 1


def test_one_of_another_kind_is_left_alone(drafts: Drafts) -> None:
    several = SeveralDrafts(["a", "b"], drafts.connect, drafts.heard)
    drafts.links["a"].events.receive(Connected(EAGLE))
    drafts.links["b"].events.receive(Connected(TRIE))
    for number in range(20):
        several.open(opening(number))
    assert not drafts.links["b"].told
    drafts.links["a"].events.receive(Disconnected("gone"))
    assert drafts.heard.losses == ["gone"] and drafts.heard.infos == [EAGLE, TRIE]


def test_those_that_changed_one_after_the_other_are_used_once_the_last_is_gone(drafts: Drafts) -> None:
    several = drafts.several("abc", TRIE)
    links = drafts.links
    for address in "ab":
        links[address].events.receive(Disconnected("restarted"))
        links[address].events.receive(Connected(EAGLE))
    several.open(opening(100))
    assert drafts.home_of(100) == "c" and drafts.heard.infos == [TRIE]
    links["c"].events.receive(Disconnected("restarted"))
    assert drafts.heard.losses == ["restarted"] and drafts.heard.infos == [TRIE, EAGLE]
    for number in range(60):
        several.open(opening(number))
    assert {drafts.home_of(number) for number in range(60)} == {"a", "b"}
    links["c"].events.receive(Connected(EAGLE))
    assert drafts.heard.infos == [TRIE, EAGLE]


def test_one_that_was_not_used_and_is_gone_is_not_waited_for(drafts: Drafts) -> None:
    several = SeveralDrafts(["a", "b"], drafts.connect, drafts.heard)
    drafts.links["a"].events.receive(Connected(EAGLE))
    drafts.links["b"].events.receive(Connected(TRIE))
    drafts.links["b"].events.receive(Disconnected("gone"))
    drafts.links["a"].events.receive(Disconnected("gone too"))
    several.open(opening(1))
    assert drafts.heard.losses[-1] == "gone too" and TRIE not in drafts.heard.infos and not drafts.links["b"].told


def test_the_one_that_says_most_is_cut_off(drafts: Drafts) -> None:
    several = drafts.several("ab")
    for number in range(20):
        several.open(opening(number, tenant=f"tenant {number}"))
    homes = {drafts.home_of(number): number for number in range(20)}
    drafts.links["a"].grow(homes["a"], nodes=3)
    drafts.links["b"].grow(homes["b"], nodes=200)
    several.cut_off("too much")
    assert not drafts.links["a"].cut and drafts.links["b"].cut == ["too much"]
    # The receiver has given up all of them.
    several.advance([step(1, 7, sequence_id=number) for number in range(20)])
    assert all(what != "advance" for link in drafts.links.values() for what, _ in link.told)
    several.stop()
    assert all(link.stopped for link in drafts.links.values())


@pytest.mark.parametrize("address", ["127.0.0.1:1,inprocess:trie", "127.0.0.1:1, 127.0.0.1:1"])
def test_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="each named once"):
        connect_draft(address, Listener(), VOCABULARY, "")


def test_a_list_of_addresses_is_several_drafts() -> None:
    link = connect_draft("127.0.0.1:1, unix:/nowhere/draft", Listener(), VOCABULARY, "", FAST)
    try:
        assert isinstance(link, SeveralDrafts)
    finally:
        link.stop()


def test_drafts_are_added_and_removed_while_sequences_run(drafts: Drafts) -> None:
    several = drafts.several("ab")
    for number in range(40):
        several.open(opening(number, tenant=f"tenant {number}"))
    left = [number for number in range(40) if drafts.home_of(number) == "a"]
    kept = drafts.links["b"]
    several.change_addresses(["b", "c"])
    drafts.links["c"].events.receive(Connected(TRIE))
    assert drafts.links["a"].stopped and drafts.links["b"] is kept and not kept.stopped
    # The target opens these again, and only these; it still has a draft.
    assert sorted(drafts.heard.lost) == left and not drafts.heard.losses
    for number in range(100, 140):
        several.open(opening(number, tenant=f"tenant {number}"))
    assert {drafts.home_of(number) for number in range(100, 140)} == {"b", "c"}


def test_there_is_no_draft_once_the_last_is_removed(drafts: Drafts) -> None:
    several = drafts.several("a")
    several.open(opening(1))
    several.change_addresses([])
    assert drafts.heard.losses == ["it is not listed any more"]
    several.open(opening(2))
    several.cut_off("nobody is there")
    several.change_addresses(["b"])
    drafts.links["b"].events.receive(Connected(EAGLE))
    assert drafts.heard.infos == [TRIE, EAGLE]


def test_a_file_of_drafts_is_read_again_when_it_is_replaced(
    drafts: Drafts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = tmp_path / "drafts"

    def write(*lines: str) -> None:
        (tmp_path / "next").write_text("\n".join(lines))
        (tmp_path / "next").rename(listed)

    write()
    several = ListedDrafts(listed, drafts.connect, drafts.heard)
    try:
        assert drafts.heard.losses == [f"{listed} lists no draft"]
        write("one:1", "", "two:2")
        wait_until(lambda: drafts.links.keys() == {"one:1", "two:2"})
        write("one:1", "no address")
        wait_until(lambda: any("stay as they are" in line for line in caplog.messages))
        assert not any(link.stopped for link in drafts.links.values())
        write("two:2")
        wait_until(lambda: drafts.links["one:1"].stopped)
    finally:
        several.stop()
    assert drafts.links["two:2"].stopped


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "No such file"), ("a:1\na:1", "named twice"), ("a", "'a' is not HOST:PORT")]
)
def test_a_file_of_drafts_that_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "drafts").write_text(text)
    with pytest.raises(SettingsError, match=problem):
        prepare_draft(f"file:{tmp_path / 'drafts'}")
