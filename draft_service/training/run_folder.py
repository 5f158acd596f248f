"""The folder of a run: its settings, the text that was written, the token map, the last checkpoint and its record."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus, Texts, coverage
from draft_service.training.trainer import Progress
from draft_service.training.unrolling import Head
from outrider.machine import describe_machine, describe_versions
from outrider.settings import SettingsError, unreadable

# What text and weights depend on, and a run that goes on cannot change.
_FIXED = (
    *("model", "dtype", "seed", "prompts", "sampled_prompts", "temperatures", "max_length", "max_prompt"),
    *("max_answer", "turns", "writers", "text", "kind", "init", "new_vocabulary"),
    *("style", "layers", "hidden", "intermediate", "tied", "vocabulary", "steps", "batch_tokens", "validation"),
)


class RunFolder:
    """Where a run keeps what it needs to go on. Every file is whole: it is written beside its place, and moved."""

    def __init__(self, config: TrainingConfig) -> None:
        """Look whether it may be made, or gone on with; `begin` comes before all else.

        Raises:
            SettingsError: a run is there and is not to be resumed, or has other settings; or nothing can be written.
        """
        self._config = config
        self._folder = config.run_folder
        self._settings = self._folder / "settings.json"
        if self._settings.exists():
            if not config.resume:
                raise SettingsError(f"{self._folder} holds a run: --resume goes on with it, or name another --out")
            _check_same(json.loads(self._settings.read_text()), config)
            if not (self.written or config.text):
                _check_writers(json.loads(self._settings.read_text()), config)
        elif config.resume:
            raise SettingsError(f"{self._folder} holds no run to go on with")
        above = next(folder for folder in self._folder.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise SettingsError(f"--out {config.out}: {above} is no folder that may be written")

    def begin(self) -> Corpus:
        """Make it, with its settings, and return where its text is. A run that was refused before leaves nothing."""
        config = self._config
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--out {config.out}: {unreadable(self._folder, error)}") from None
        self._settings.write_text(json.dumps(asdict(config), indent=2) + "\n")
        return self.corpus()

    def corpus(self) -> Corpus:
        """The text that is learnt from."""
        return Corpus(Path(self._config.text) if self._config.text else self._folder / "text")

    @property
    def written(self) -> bool:
        """Whether no more text is to come: the token map was made of it."""
        return (self._folder / "tokens.safetensors").exists()

    def save_tokens(self, tokens: NDArray[np.int64] | None) -> None:
        """Keep the token map; an empty one stands for the whole vocabulary. No text is written from then on."""
        kept = np.zeros(0, np.int64) if tokens is None else tokens
        self._move("tokens.safetensors", lambda path: save_arrays({"token_ids": kept}, path))

    def tokens(self) -> NDArray[np.int64] | None:
        """The token map that was kept."""
        kept: NDArray[np.int64] = load_arrays(self._folder / "tokens.safetensors")["token_ids"]
        return kept if len(kept) else None

    def save_checkpoint(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Tensors and, as JSON, everything else, in one file."""
        metadata = {"state": json.dumps(state)}
        self._move("checkpoint.safetensors", lambda path: save_file(dict(tensors), path, metadata=metadata))

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last one, if there is any."""
        path = self._folder / "checkpoint.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="np") as file:
            state = json.loads(file.metadata()["state"])
        return load_file(path), state

    def _move(self, name: str, write: Any) -> None:
        partial = self._folder / f"{name}.partial"
        write(partial)
        partial.rename(self._folder / name)


def _check_same(before: Mapping[str, Any], config: TrainingConfig) -> None:
    now = asdict(config)
    changed = [name for name in _FIXED if name in before and before[name] != now[name]]
    if changed:
        wanted = ", ".join(f"--{name.replace('_', '-')} {before[name]}" for name in changed)
        raise SettingsError(f"the run that is there was begun with {wanted}")


def _check_writers(before: Mapping[str, Any], config: TrainingConfig) -> None:
    """Texts are numbered by the writers there are, and more devices may have brought more of them."""
    begun = max(before["writers"], len(before["device"].split(",")))
    if begun != config.writers_at_once:
        raise SettingsError(f"the text that is there was begun by {begun} writers on --device {before['device']}")


# Beside those that are described always.
_PACKAGES = ("triton", "safetensors")
_CURVE_POINTS = 200


def training_record(
    config: TrainingConfig,
    command: Sequence[str],
    texts: Texts,
    counts: NDArray[np.int64],
    head: Head,
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
        "machine": describe_machine() | _gpus(config.devices),
        "versions": describe_versions(_PACKAGES),
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


def _gpus(devices: Sequence[str]) -> dict[str, Any]:
    """The first GPU's name and memory, and how many there were; nothing where none was used."""
    if not devices[0].startswith("cuda"):
        return {}
    used = torch.cuda.max_memory_reserved(devices[0]) / 2**30
    return {"gpu": torch.cuda.get_device_name(devices[0]), "gpus": len(devices), "gpu_gib_used": round(used, 1)}
