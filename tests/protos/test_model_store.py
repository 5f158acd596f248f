"""Models by name, asked of the target's own store in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import UnknownModel
from outrider.model_store import model_source

NAME = "smollm2-135m-instruct"


def test_folders_and_hub_ids_stay_as_they_are(tmp_path: Path) -> None:
    assert model_source(str(tmp_path)) == str(tmp_path)
    assert model_source("somebody/some-model") == "somebody/some-model"


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(UnknownModel, match=NAME):
        model_source("smollm3")


def test_a_hub_id_at_a_revision_is_looked_up() -> None:
    with pytest.raises(UnknownModel, match="outrider model pull somebody/some-model@v1"):
        model_source("somebody/some-model@v1")


def test_a_known_name_is_its_folder_once_it_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(UnknownModel, match=f"outrider model pull {NAME}"):
        model_source(NAME)
    # As the store lays it out.
    from target_service.model.loading.store import local_folder

    local_folder(NAME).mkdir(parents=True)
    assert model_source(NAME) == str(local_folder(NAME))
