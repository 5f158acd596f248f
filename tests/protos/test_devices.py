"""A device that is not there is refused with what is there."""

from __future__ import annotations

import pytest
import torch

from outrider.devices import check_device, choose_device
from outrider.settings import SettingsError


@pytest.mark.parametrize("device", ["cpu"])
def test_a_processor_is_always_there(device: str) -> None:
    check_device(device)


@pytest.mark.parametrize(
    ("built_for", "gpus", "device", "message"),
    [
        (None, 0, "cuda", "built without CUDA"),
        ("13.0", 0, "cuda:0", "finds no GPU"),
        ("13.0", 2, "cuda:2", "there are 2 GPUs"),
        ("13.0", 2, "gpu", "none that Outrider runs on: cpu"),
        ("13.0", 2, "mps", "none that Outrider runs on"),
        (None, 0, "cuda", "pip install torch --index-url"),
        ("13.0", 2, "cuda:1", ""),
        ("13.0", 1, "cuda", ""),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, gpus: int, device: str, message: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if not message:
        check_device(device)
        return
    with pytest.raises(SettingsError, match=message):
        check_device(device)


def test_only_a_numbered_gpu_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for device in ("cpu", "cuda", "cuda:1"):
        choose_device(device)
    assert chosen == [torch.device("cuda:1")]
