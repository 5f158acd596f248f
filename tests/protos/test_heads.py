"""Heads by name: found where the draft service is, said by name where they are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.errors import NotSupported
from outrider.heads import head_made_for, head_source, shipped_heads


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft service that is installed elsewhere, with two heads, and a folder that is none."""
    heads = tmp_path / "draft_service" / "heads"
    for name, config in (("small", {"outrider": {"target": "a-model"}}), ("other", {})):
        (heads / name).mkdir(parents=True)
        (heads / name / "config.json").write_text(json.dumps(config))
    (heads / "no-head").mkdir()
    (heads / "small" / "training.json").write_text(json.dumps({"acceptance": {"mean_length": 2.5}}))
    (heads / "small" / "model.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "draft_service" / "__init__.py").write_text("raise AssertionError('looked up, never imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "draft_service", raising=False)
    return heads


def test_heads_are_listed_with_what_they_are_for(installed: Path) -> None:
    other, small = shipped_heads()
    assert (small.name, small.folder, small.target) == ("small", installed / "small", "a-model")
    assert small.accepted_length == 2.5 and 3.0 <= small.megabytes < 3.1
    assert (other.name, other.target, other.accepted_length) == ("other", "", None)
    assert head_made_for("a-model") == small
    assert head_made_for("another") is None and head_made_for("") is None


def test_a_name_is_its_folder_and_all_else_stays(installed: Path, tmp_path: Path) -> None:
    assert head_source("small") == str(installed / "small")
    assert head_source(str(tmp_path)) == str(tmp_path)
    assert head_source("somebody/some-head") == "somebody/some-head"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("head", ["smal", "./small", "/nowhere/small", "no-head"])
def test_an_unknown_name_says_which_there_are(head: str) -> None:
    with pytest.raises(NotSupported, match=r"there: other, small"):
        head_source(head)


def test_without_a_draft_service_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.heads.importlib.util.find_spec", lambda _: None)
    assert shipped_heads() == ()
    with pytest.raises(NotSupported, match="none in this installation"):
        head_source("small")
