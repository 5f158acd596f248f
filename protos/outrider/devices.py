"""Checks of a device before a model is loaded, and the choice of a thread's device."""

from __future__ import annotations

import re

from outrider.settings import SettingsError


def check_device_name(device: str) -> None:
    """Raise `SettingsError` for a name that is no supported device. Uses neither PyTorch nor the machine."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise SettingsError(f"device {device!r} is none that Outrider runs on: cpu, cuda, or cuda:1 and so on")


def check_device(device: str) -> None:
    """Raise `SettingsError`, with the reason, for a device that this machine or this PyTorch does not have."""
    check_device_name(device)
    # Imported here: clients use this package without PyTorch.
    import torch

    wanted = torch.device(device)
    if wanted.type != "cuda":
        return
    if torch.version.cuda is None and torch.version.hip is None:
        # docs/models.md and docs/troubleshooting.md name the address too.
        raise SettingsError(
            f"device {device}: PyTorch {torch.__version__} was built without CUDA; a build that has it: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    count = torch.cuda.device_count()
    if not count:
        raise SettingsError(f"device {device}: PyTorch finds no GPU; is there a driver, and CUDA_VISIBLE_DEVICES set?")
    if (wanted.index or 0) >= count:
        raise SettingsError(f"device {device}: there are {count} GPUs, counted from 0")


def choose_device(device: str) -> None:
    """Make `device` this thread's current device, which Triton launches kernels on. Does nothing without a number."""
    import torch

    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is not None:
        torch.cuda.set_device(wanted)
