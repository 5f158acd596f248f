"""A head that a drafter in the target's process is told to run is the target's too, named once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import target_service.__main__ as program
from target_service.config import TargetConfig


@pytest.mark.parametrize(
    ("draft", "named", "head"),
    [
        ("inprocess:eagle --head X", {}, "X"),
        ("inprocess:eagle --breadth 2 --head='a folder/X'", {}, "a folder/X"),
        ("inprocess:eagle --head W --head X", {}, "X"),
        ("inprocess:eagle --head=X --head W --head=Y", {}, "Y"),
        ("inprocess:eagle", {("eagle", "head"): "X"}, "X"),
        ("inprocess:eagle --head X", {("eagle", "head"): "Y"}, "X"),
        ("inprocess:merged --head X", {}, "X"),
        ("inprocess:merged --merged-drafters medusa,trie", {("medusa", "head"): "M", ("eagle", "head"): "E"}, "M"),
        ("inprocess:merged --merged-drafters mtp,trie --base-model B", {}, "B"),
        ("inprocess:medusa --head M", {}, "M"),
        ("inprocess:mtp --base-model B", {}, "B"),
        ("inprocess:eagle", {}, ""),
        ("inprocess:trie --head X", {("eagle", "head"): "X"}, ""),
        ("inprocess:eagle --head 'X", {}, ""),
        ("127.0.0.1:1", {("eagle", "head"): "X"}, ""),
    ],
)
def test_the_target_learns_of_it(draft: str, named: Any, head: str) -> None:
    assert TargetConfig(draft=draft).with_head_of_draft(named).draft_head == head
    assert TargetConfig(draft=draft, draft_head="Z").with_head_of_draft(named).draft_head == "Z"


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_it_is_named_as_drafters_settings_are(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--draft", "inprocess:eagle" + (" --head X" if source == "flag" else "")]
    if source == "environment":
        monkeypatch.setenv("OUTRIDER_EAGLE_HEAD", "X")
    elif source == "file":
        path = tmp_path / "outrider.toml"
        path.write_text('[eagle]\nhead = "X"\n')
        # What the program sets for its children.
        monkeypatch.setenv("OUTRIDER_CONFIG", str(path))
    served: list[TargetConfig] = []
    monkeypatch.setattr(program, "_serve", lambda config: served.append(config) or 0)
    monkeypatch.setattr(program, "configure_logging", lambda _level: None)
    monkeypatch.setattr(program, "prepare_service", lambda: None)
    assert program.main([*words, "--listen", "127.0.0.1:0"]) == 0
    assert [config.draft_head for config in served] == ["X"]
