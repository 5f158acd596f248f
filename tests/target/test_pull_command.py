"""Fetching ahead of time: what is at hand stays where it is, what cannot be had is said in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from target_service.model.loading.store import local_folder, main


def test_a_folder_stays_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path


def test_a_known_name_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    folder = local_folder("smollm2-135m-instruct")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert main(["pull", "smollm2-135m-instruct"]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder


@pytest.mark.parametrize("model", ["not/a/model", "no such name!"])
def test_what_no_hub_can_have(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", model]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{model}: ")
    assert said.count("\n") == 1
