"""Snapshots: whole, checked, private, and refused when anything about them is wrong."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from trie_checks import count
from waits import HUNG_SECONDS

from draft_service.ngram.arrays import SEEN
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.corpora import StoredTrie
from draft_service.ngram.drafter import NgramDrafter
from draft_service.ngram.snapshot import FILE_NAME, Claim, SnapshotRefused, keep_refused, load, save
from draft_service.ngram.trie import NgramTrie

SETTINGS = {"depth": 4, "unit": 16}


def tries() -> list[StoredTrie]:
    trie = NgramTrie(4, 10_000)
    trie.insert(np.array([1, 2, 3, 1, 2, 4], dtype=np.int32))
    rows = trie.rows[: trie.used]
    return [StoredTrie("a", "", rows), StoredTrie("a", "manual", rows[:1]), StoredTrie("b.c-d", "", rows)]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "folder" / FILE_NAME, tries(), SETTINGS)
    loaded, damaged = load(tmp_path / "deep" / "folder" / FILE_NAME, SETTINGS)
    assert damaged == []
    for before, after in zip(tries(), loaded, strict=True):
        assert (before.tenant, before.corpus) == (after.tenant, after.corpus)
        assert np.array_equal(before.rows, after.rows)


def test_none_is_empty(tmp_path: Path) -> None:
    assert load(tmp_path / FILE_NAME, SETTINGS) == ([], [])
    save(tmp_path / FILE_NAME, [], SETTINGS)
    assert load(tmp_path / FILE_NAME, SETTINGS) == ([], [])


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    save(tmp_path / FILE_NAME, tries(), SETTINGS)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@examples(60)
@given(data=st.data())
def test_a_changed_byte_costs_one_trie_or_all(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("snapshot")
    save(folder / FILE_NAME, tries(), SETTINGS)
    content = bytearray((folder / FILE_NAME).read_bytes())
    header = int.from_bytes(content[:8], "little")
    # Anywhere in the tensors, or in the length of the header.
    place = data.draw(st.integers(8 + header, len(content) - 1) | st.integers(0, 7))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / FILE_NAME).write_bytes(content)
    if place < 8:
        with pytest.raises(SnapshotRefused):
            load(folder / FILE_NAME, SETTINGS)
        return
    loaded, damaged = load(folder / FILE_NAME, SETTINGS)
    # Every byte behind the header is one trie's.
    assert len(damaged) == 1 and len(loaded) == len(tries()) - 1
    whole = {(stored.tenant, stored.corpus): stored.rows for stored in tries()}
    for stored in loaded:
        assert np.array_equal(stored.rows, whole[stored.tenant, stored.corpus])


@settings(max_examples=30)
@given(keep=st.floats(0.0, 0.999))
def test_a_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, keep: float) -> None:
    folder = tmp_path_factory.mktemp("snapshot")
    save(folder / FILE_NAME, tries(), SETTINGS)
    content = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(SnapshotRefused):
        load(folder / FILE_NAME, SETTINGS)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    save(tmp_path / FILE_NAME, tries(), SETTINGS)
    with pytest.raises(SnapshotRefused, match="other settings"):
        load(tmp_path / FILE_NAME, SETTINGS | {"depth": 5})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "else"),
        ("names", "[]"),
        ("names", "[7]"),
        ("names", "{"),
        ("sha256", "00"),
        ("sha256", "[]"),
        ("settings", "{}"),
        ("documents", "[]"),
        ("documents", "[-1]"),
        ("documents", "[true]"),
        ("documents", "7"),
    ],
)
def test_changed_metadata_is_refused(tmp_path: Path, key: str, value: str) -> None:
    save(tmp_path / FILE_NAME, tries()[:1], SETTINGS)
    path = tmp_path / FILE_NAME
    with safe_open(path, framework="numpy") as file:
        metadata, rows = file.metadata(), file.get_tensor("0")
    save_file({"0": rows}, path, metadata | {key: value})
    with pytest.raises(SnapshotRefused):
        load(tmp_path / FILE_NAME, SETTINGS)


def test_a_trie_under_another_name_is_refused(tmp_path: Path) -> None:
    """What one tenant said is never another's."""
    save(tmp_path / FILE_NAME, tries()[:1], SETTINGS)
    path = tmp_path / FILE_NAME
    with safe_open(path, framework="numpy") as file:
        metadata, rows = file.metadata(), file.get_tensor("0")
    save_file({"0": rows}, path, metadata | {"names": '[["b", ""]]'})
    assert load(tmp_path / FILE_NAME, SETTINGS) == ([], [("b", "")])


def test_a_refused_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps("junk"))
    with pytest.raises(SnapshotRefused):
        load(tmp_path / FILE_NAME, SETTINGS)
    keep_refused(tmp_path / FILE_NAME)
    save(tmp_path / FILE_NAME, tries(), SETTINGS)
    assert (tmp_path / (FILE_NAME + ".refused")).read_text() == '"junk"'
    assert len(load(tmp_path / FILE_NAME, SETTINGS)[0]) == 3


def test_a_full_disk_leaves_the_snapshot_before(tmp_path: Path) -> None:
    save(tmp_path / FILE_NAME, tries(), SETTINGS)
    before = (tmp_path / FILE_NAME).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError):
            save(tmp_path / FILE_NAME, tries(), SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_what_a_killed_process_left_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in (FILE_NAME, FILE_NAME + ".partial", FILE_NAME + ".partial-left"):
        (folder / name).symlink_to(victim)
    save(folder / FILE_NAME, tries(), SETTINGS)
    assert victim.read_text() == "untouched"
    assert not (folder / FILE_NAME).is_symlink() and len(load(folder / FILE_NAME, SETTINGS)[0]) == 3
    assert not (folder / (FILE_NAME + ".partial-left")).exists()


def test_files_are_claimed_in_their_order(tmp_path: Path) -> None:
    first, second = Claim(tmp_path / "folder"), Claim(tmp_path / "folder")
    assert [claim.path.name for claim in (first, second)] == [FILE_NAME, "tries-2.safetensors"]
    first.release()
    third = Claim(tmp_path / "folder")
    assert third.path == first.path
    for claim in (second, third):
        claim.release()


def test_a_killed_process_claims_nothing(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from draft_service.ngram.snapshot import Claim\n"
    code += "print(Claim(Path(sys.argv[1])).path.name, flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == FILE_NAME
    claim = Claim(tmp_path)
    assert claim.path.name == FILE_NAME
    claim.release()


def test_what_another_writes_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / f"{name}.partial-x" for name in (FILE_NAME, "tries-3.safetensors")]
    for other in others:
        other.touch()
    save(tmp_path / "tries-2.safetensors", tries(), SETTINGS)
    assert all(other.exists() for other in others)


def test_a_folder_without_locks_is_one_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert Claim(tmp_path).path == tmp_path / FILE_NAME
    assert "no other process may keep tries in it" in caplog.text


class TestDrafter:
    """The trie drafter across a restart."""

    def drafter(self, folder: Path) -> NgramDrafter:
        return NgramDrafter(TrieConfig(snapshot=str(folder)))

    def taught(self, folder: Path) -> None:
        drafter = self.drafter(folder)
        for tenant, token in (("a", 10), ("b", 20)):
            drafter.add_corpus(tenant, "", [token, token + 1, token + 2])
        drafter.stop()

    def known(self, folder: Path) -> dict[str, int]:
        drafter = self.drafter(folder)
        drafter._restore()
        tries = {"a": (10, 11), "b": (20, 21)}
        counts = {tenant: count(drafter._corpora._of_tenant(tenant).trie, window) for tenant, window in tries.items()}
        drafter._worker._thread.shutdown()
        drafter._claim.release()
        return counts

    def test_a_deleted_corpus_is_forgotten_and_the_others_are_listed_as_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also after a crash: a snapshot without it is written without anything being learnt."""
        monkeypatch.setattr("draft_service.ngram.drafter._FORGET_SECONDS", 0.01)
        drafter = self.drafter(tmp_path)
        for name in ("gone", "kept", "kept"):
            drafter.add_corpus("a", name, [10, 11, 12])
        drafter.add_corpus("a", "", [10, 11])
        drafter._save()
        before = drafter.corpora("a")
        drafter.delete_corpus("a", "gone")
        deadline = time.monotonic() + HUNG_SECONDS
        while "gone" in (names := [stored.corpus for stored in load(tmp_path / FILE_NAME, drafter._settings)[0]]):
            assert time.monotonic() < deadline, names
            time.sleep(0.01)
        drafter._claim.release()
        restarted = self.drafter(tmp_path)
        restarted._restore()
        listed = restarted.corpora("a")
        assert [(one.name, one.owner, one.tokens, one.documents) for one in listed] == [
            ("", "a", 2, 1),
            ("kept", "a", 6, 2),
        ]
        assert [one.name for one in before] == ["", "gone", "kept"]
        restarted._claim.release()
        for each in (drafter, restarted):
            each._worker._thread.shutdown()

    def test_a_snapshot_of_an_earlier_version_counts_no_documents(self, tmp_path: Path) -> None:
        save(tmp_path / FILE_NAME, tries(), SETTINGS)
        path = tmp_path / FILE_NAME
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        del metadata["documents"]
        save_file(rows, path, metadata)
        assert [stored.documents for stored in load(tmp_path / FILE_NAME, SETTINGS)[0]] == [0, 0, 0]

    def test_each_of_two_that_share_a_folder_keeps_what_it_learnt(self, tmp_path: Path) -> None:
        for _ in range(2):
            first, second = self.drafter(tmp_path), self.drafter(tmp_path)
            for drafter in (first, second):
                drafter._restore()
            # The second time the one before has written both.
            for drafter, tenant, token in ((first, "a", 10), (second, "b", 20)):
                drafter.add_corpus(tenant, "", [token, token + 1, token + 2])
            for drafter in (second, first):
                drafter.stop()
        names = [FILE_NAME, "tries-2.safetensors"]
        held = [load(tmp_path / name, self.drafter(tmp_path)._settings)[0] for name in names]
        assert [[(stored.tenant, stored.documents) for stored in tries] for tries in held] == [[("a", 2)], [("b", 2)]]

    def test_one_that_has_no_snapshot_starts_with_the_newest_of_the_others(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.taught(tmp_path)
        older = load(tmp_path / FILE_NAME, self.drafter(tmp_path)._settings)[0][:1]
        save(tmp_path / "tries-7.safetensors", older, self.drafter(tmp_path)._settings)
        for name, seconds in (("tries-7.safetensors", 1000), (FILE_NAME, 2000)):
            os.utime(tmp_path / name, (seconds, seconds))
        holder = Claim(tmp_path)
        with caplog.at_level(logging.INFO):
            assert all(self.known(tmp_path).values())
        assert f"kept in {tmp_path}/tries-2.safetensors, and start with those of {tmp_path}/{FILE_NAME}" in caplog.text
        holder.release()

    def test_a_damaged_trie_costs_its_tenant_only(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.taught(tmp_path)
        whole = self.known(tmp_path)
        assert whole["a"] > 0 and whole["b"] > 0
        path = tmp_path / FILE_NAME
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        left = self.known(tmp_path)
        assert sorted(left.values()) == [0, whole["a"]]
        assert "damaged trie" in caplog.text and (tmp_path / (FILE_NAME + ".refused")).exists()

    def test_an_unsound_trie_costs_its_tenant_only(self, tmp_path: Path) -> None:
        """With a checksum that is right, as of a clock that ran over before it was written."""
        self.taught(tmp_path)
        loaded, _ = load(tmp_path / FILE_NAME, self.drafter(tmp_path)._settings)
        loaded[0].rows[0, SEEN] = -(2**31)
        save(tmp_path / FILE_NAME, loaded, self.drafter(tmp_path)._settings)
        assert sum(count > 0 for count in self.known(tmp_path).values()) == 1

    def test_a_trie_that_is_larger_than_it_may_be_now_is_cut(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        often, corpus = list(range(100, 110)), list(range(500, 900))
        drafter = self.drafter(tmp_path)
        for text in (*[often] * 5, list(range(400)), *[often] * 5):
            drafter.add_corpus("a", "", text)
        drafter.add_corpus("a", "shared", corpus)
        drafter.stop()
        small = NgramDrafter(TrieConfig(snapshot=str(tmp_path), tenant_capacity=1000, corpus_capacity=1000))
        small._restore()
        own, shared = small._corpora._of_tenant("a").trie, small._corpora._shared["shared"].trie
        assert 0 < own.used <= 1000 >= shared.used > 1 and len(own.rows) <= 1000
        assert count(own, tuple(often[:3])) > 0
        assert "cut" in caplog.text and "damaged" not in caplog.text
        assert not (tmp_path / (FILE_NAME + ".refused")).exists()
        # It learns as any other.
        small.add_corpus("b", "", often)
        small._worker.submit(200, partial(own.insert, np.arange(2000, 2200, dtype=np.int32)))
        small.flush()
        assert own.used <= 1000
        small.stop()

    def test_a_full_disk_does_not_end_the_service(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            self.taught(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "was not written" in caplog.text and not (tmp_path / FILE_NAME).exists()
        assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME + ".lock"]
