"""A hub that does not answer is told of soon, and in one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from target_service.config import TargetConfig
from target_service.model.loading.loader import load_runner
from target_service.model.loading.store import HubUnreachable, check_hub


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> str:
    endpoint = f"http://127.0.0.1:{unused_tcp_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return endpoint


def test_a_hub_that_does_not_answer(no_hub: str) -> None:
    begun = time.monotonic()
    with pytest.raises(HubUnreachable, match="does not answer") as refused:
        load_runner(TargetConfig(model="nobody/nothing"))
    assert time.monotonic() - begun < 5 and no_hub in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("folder", ["/absent/model", "./absent"])
def test_a_folder_that_is_not_there(no_hub: str, folder: str) -> None:
    assert no_hub
    with pytest.raises(FileNotFoundError, match="no such folder"):
        check_hub(folder)


def test_what_is_here_needs_no_hub(no_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_hub
    check_hub(str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_hub("nobody/nothing")
