"""Several devices in the settings, who writes on which, and gradients that are averaged between them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draft_service.training import worker
from draft_service.training.config import TrainingConfig
from draft_service.training.optimiser import MasterAdamW
from draft_service.training.run_folder import RunFolder
from outrider.distillation import TeacherSettings
from outrider.settings import SettingsError


def config_of(folder: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(out=str(folder / "head"), **settings)


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("cpu", ("cpu",)),
        ("cuda", ("cuda",)),
        ("cuda:1", ("cuda:1",)),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda:0, cuda:1", ("cuda:0", "cuda:1")),
    ],
)
def test_devices_are_a_list_of_commas(tmp_path: Path, device: str, devices: tuple[str, ...]) -> None:
    assert config_of(tmp_path, device=device).devices == devices


@pytest.mark.parametrize("device", ["cuda:0,", "cpu,cuda:0", "cuda,cuda:1", "cuda:0,cuda:0", "cuda,cuda"])
def test_devices_that_cannot_train_together_are_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(SettingsError, match="--device"):
        config_of(tmp_path, device=device)


@pytest.mark.parametrize(("writers", "at_once"), [(1, 2), (2, 2), (5, 5)])
def test_no_device_is_without_a_writer(tmp_path: Path, writers: int, at_once: int) -> None:
    assert config_of(tmp_path, device="cuda:0,cuda:1", writers=writers).writers_at_once == at_once


def test_writers_take_the_devices_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(_name: str, settings: TeacherSettings) -> None:
        asked.append(settings.device)
        raise SettingsError("no model here")

    monkeypatch.setattr(worker, "load_teacher", refuse)
    monkeypatch.setattr(worker, "choose_device", lambda device: asked.append(f"chosen {device}"))
    settings = json.dumps(asdict(config_of(tmp_path, device="cuda:0,cuda:3", writers=3)))
    for number in range(3):
        assert worker.main(["write", settings, str(number), "1"]) == 1
    assert asked == ["chosen cuda:0", "cuda:0", "chosen cuda:3", "cuda:3", "chosen cuda:0", "cuda:0"]


def test_writing_goes_on_with_as_many_writers_as_it_began(tmp_path: Path) -> None:
    RunFolder(config_of(tmp_path, writers=1, device="cpu,cpu")).create()
    with pytest.raises(SettingsError, match="2 writers on --device cpu,cpu"):
        RunFolder(config_of(tmp_path, writers=1, resume=True))
    RunFolder(config_of(tmp_path, writers=1, device="cuda:0,cuda:1", resume=True)).save_tokens(None)
    # No text is written any more.
    RunFolder(config_of(tmp_path, writers=1, resume=True))


def test_gradients_in_half_precision_are_averaged_in_full_before_they_are_clipped() -> None:
    torch.manual_seed(0)
    wide, narrow = nn.Linear(3, 2), nn.Linear(3, 2).to(torch.bfloat16)
    seen: list[Tensor] = []

    def average(flat: Tensor) -> None:
        seen.append(flat.clone())
        flat.mul_(0.25)

    optimiser = MasterAdamW(narrow, weight_decay=0.0, clip=1e-3, masters=wide, average=average)
    narrow(torch.randn(4, 3, dtype=torch.bfloat16)).square().sum().backward()
    own = torch.cat([one.grad.float().reshape(-1) for one in narrow.parameters() if one.grad is not None])
    norm = optimiser.step(0.01)
    (flat,) = seen
    assert flat.dtype == torch.float32
    assert torch.equal(flat, own)
    # The norm is of the mean, which clipping then makes smaller.
    torch.testing.assert_close(norm, 0.25 * own.norm())
    assert norm > 1e-3


def test_masters_of_another_process_are_taken_over() -> None:
    torch.manual_seed(0)
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimiser = MasterAdamW(module, weight_decay=0.0, clip=1.0, masters=module)
    values = iter(other.parameters())

    def share(master: Tensor) -> None:
        master.copy_(next(values).detach())

    optimiser.share(share)
    assert all(torch.equal(own, its) for own, its in zip(module.parameters(), other.parameters(), strict=True))
