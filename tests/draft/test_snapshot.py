"""Snapshots: whole, checked, private, and refused when anything about them is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from draft_service.ngram.corpora import StoredTrie
from draft_service.ngram.snapshot import FILE_NAME, SnapshotRefused, load, save, set_aside
from draft_service.ngram.trie import NgramTrie

SETTINGS = {"depth": 4, "unit": 16}


def tries() -> list[StoredTrie]:
    trie = NgramTrie(4, 10_000)
    trie.insert(np.array([1, 2, 3, 1, 2, 4], dtype=np.int32))
    rows = trie.rows[: trie.used]
    return [StoredTrie("a", "", rows), StoredTrie("a", "manual", rows[:1]), StoredTrie("b.c-d", "", rows)]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "folder", tries(), SETTINGS)
    loaded = load(tmp_path / "deep" / "folder", SETTINGS)
    for before, after in zip(tries(), loaded, strict=True):
        assert (before.tenant, before.corpus) == (after.tenant, after.corpus)
        assert np.array_equal(before.rows, after.rows)


def test_none_is_empty(tmp_path: Path) -> None:
    assert load(tmp_path, SETTINGS) == []
    save(tmp_path, [], SETTINGS)
    assert load(tmp_path, SETTINGS) == []


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    save(tmp_path, tries(), SETTINGS)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("snapshot")
    save(folder, tries(), SETTINGS)
    content = bytearray((folder / FILE_NAME).read_bytes())
    header = int.from_bytes(content[:8], "little")
    # Anywhere in the tensors, or in the length of the header.
    place = data.draw(st.integers(8 + header, len(content) - 1) | st.integers(0, 7))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / FILE_NAME).write_bytes(content)
    with pytest.raises(SnapshotRefused):
        load(folder, SETTINGS)


@settings(max_examples=30, deadline=None)
@given(keep=st.floats(0.0, 0.999))
def test_a_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, keep: float) -> None:
    folder = tmp_path_factory.mktemp("snapshot")
    save(folder, tries(), SETTINGS)
    content = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(SnapshotRefused):
        load(folder, SETTINGS)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    save(tmp_path, tries(), SETTINGS)
    with pytest.raises(SnapshotRefused, match="other settings"):
        load(tmp_path, SETTINGS | {"depth": 5})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "else"),
        ("names", "[]"),
        ("names", '[["b", ""]]'),
        ("names", "{"),
        ("sha256", "00"),
        ("settings", "{}"),
    ],
)
def test_changed_metadata_is_refused(tmp_path: Path, key: str, value: str) -> None:
    save(tmp_path, tries()[:1], SETTINGS)
    path = tmp_path / FILE_NAME
    with safe_open(path, framework="numpy") as file:
        metadata, rows = file.metadata(), file.get_tensor("0")
    save_file({"0": rows}, path, metadata | {key: value})
    with pytest.raises(SnapshotRefused):
        load(tmp_path, SETTINGS)


def test_a_refused_file_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps("junk"))
    with pytest.raises(SnapshotRefused):
        load(tmp_path, SETTINGS)
    assert set_aside(tmp_path).read_text() == '"junk"'
    assert load(tmp_path, SETTINGS) == []
