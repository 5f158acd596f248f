"""Fetching ahead of time: what is at hand stays where it is, what cannot be had is said in a line."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from target_service.model.loading.store import local_folder
from target_service.prefetch import PATTERNS, main, prefetch


def test_a_folder_stays_where_it_is(tmp_path: Path) -> None:
    assert prefetch(str(tmp_path)) == tmp_path


def test_a_known_name_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    folder = local_folder("smollm2-135m-instruct")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert prefetch("smollm2-135m-instruct") == folder


def test_a_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert prefetch("organisation/model") == tmp_path
    assert asked == [("organisation/model", list(PATTERNS))]
    assert not any(pattern.endswith(("bin", "pt", "py", "*")) for pattern in PATTERNS)


@pytest.mark.parametrize("model", ["not/a/model", "no such name!"])
def test_what_no_hub_can_have(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{model}: ")
    assert said.count("\n") == 1
