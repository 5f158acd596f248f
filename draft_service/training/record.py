"""The record of a training: what the head learnt from, where, how long, and what it came to."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.eagle.head import EagleHead
from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Texts
from draft_service.training.token_map import coverage
from draft_service.training.trainer import Progress
from outrider import __version__

_PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors")
_CURVE_POINTS = 200


def training_record(
    config: TrainingConfig,
    command: Sequence[str],
    texts: Texts,
    counts: NDArray[np.int64],
    head: EagleHead,
    progress: Progress,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """For training.json. `counts` [vocab_size] are of tokens in answers, `seconds` the wall time of each part."""
    tokens = None if head.token_ids is None else head.token_ids.cpu().numpy()
    step = max(1, -(-len(progress.losses) // _CURVE_POINTS))
    return {
        "model": config.model,
        "command": list(command),
        "finished": progress.fraction >= 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(config.device),
        "versions": versions(),
        "text": {
            "texts": len(texts),
            "tokens": len(texts.token_ids),
            "answer_tokens": int(counts.sum()),
            "mean_length": round(len(texts.token_ids) / max(1, len(texts)), 1),
            "vocabulary_coverage": round(coverage(counts, tokens), 5),
        },
        "training": {
            "steps": progress.step,
            "passes": round(progress.tokens / max(1, len(texts.token_ids)), 2),
            "tokens_read": progress.tokens,
            "tokens_per_second": round(progress.tokens / max(1e-9, progress.seconds)),
        },
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "parameters": sum(one.numel() for one in head.parameters() if one.requires_grad),
        "acceptance": progress.validations[-1] if progress.validations else None,
        "validations": progress.validations,
        "losses": progress.losses[::step],
        "settings": asdict(config),
    }


def machine(device: str) -> dict[str, Any]:
    """Processor, cores, and the GPU if one was used."""
    found: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_gib_used"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 1)
    return found


def versions() -> dict[str, str]:
    """Of Outrider and of what computed."""
    found = {"outrider": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            # Triton is not everywhere.
            continue
    return found
