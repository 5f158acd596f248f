"""The folder of a run: settings, text, draft vocabulary, last checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.training.config import TrainingConfig
from draft_service.training.corpus import Corpus
from outrider.settings import SettingsError, unreadable

# Settings that text and weights depend on, which cannot change when a run is resumed.
_FIXED = (
    *("model", "dtype", "seed", "prompts", "sampled_prompts", "temperatures", "max_length", "max_prompt"),
    *("max_answer", "turns", "writers", "text", "kind", "init", "new_vocabulary"),
    *("style", "layers", "hidden", "intermediate", "tied", "vocabulary", "steps", "batch_tokens", "validation"),
)


class RunFolder:
    """What a run needs to be resumed. Every file is written beside its place and then moved there."""

    def __init__(self, config: TrainingConfig) -> None:
        """Check that the run can be started or resumed; call `create` next. Raises `SettingsError` for a folder with a
        run that is not to be resumed or has other settings, without one to resume, or that cannot be written."""
        self._config = config
        self._folder = config.run_folder
        self._settings = self._folder / "settings.json"
        if self._settings.exists():
            if not config.resume:
                raise SettingsError(f"{self._folder} holds a run: --resume goes on with it, or name another --out")
            before, now = json.loads(self._settings.read_text()), asdict(config)
            changed = [name for name in _FIXED if name in before and before[name] != now[name]]
            if changed:
                wanted = ", ".join(f"--{name.replace('_', '-')} {before[name]}" for name in changed)
                raise SettingsError(f"the run that is there was begun with {wanted}")
            # Texts are numbered by writer, and every device has at least one.
            writers = max(before["writers"], len(before["device"].split(",")))
            if not (self.written or config.text) and writers != config.writers_at_once:
                raise SettingsError(
                    f"the text that is there was begun by {writers} writers on --device {before['device']}"
                )
        elif config.resume:
            raise SettingsError(f"{self._folder} holds no run to go on with")
        above = next(folder for folder in self._folder.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise SettingsError(f"--out {config.out}: {above} is no folder that may be written")

    def create(self) -> Corpus:
        """Create the folder with the settings, and return its text. A run that is refused before writes nothing."""
        config = self._config
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--out {config.out}: {unreadable(self._folder, error)}") from None
        self._settings.write_text(json.dumps(asdict(config), indent=2) + "\n")
        return self.corpus()

    def corpus(self) -> Corpus:
        return Corpus(Path(self._config.text) if self._config.text else self._folder / "text")

    @property
    def written(self) -> bool:
        """Whether the text is complete: the draft vocabulary was chosen by it."""
        return (self._folder / "tokens.safetensors").exists()

    def save_tokens(self, tokens: Tensor | None) -> None:
        """Save the draft vocabulary [V'], an empty one for the whole vocabulary. No text is written from then on."""
        saved = torch.zeros(0, dtype=torch.int64) if tokens is None else tokens
        self._move("tokens.safetensors", lambda path: save_file({"token_ids": saved}, path))

    def tokens(self) -> Tensor | None:
        """[V'] target ids of the draft vocabulary; None for the whole vocabulary."""
        saved = load_file(self._folder / "tokens.safetensors")["token_ids"]
        return saved if len(saved) else None

    def save_checkpoint(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Save tensors, and everything else as JSON, in one file."""
        metadata = {"state": json.dumps(state)}
        self._move("checkpoint.safetensors", lambda path: save_file(dict(tensors), path, metadata=metadata))

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        path = self._folder / "checkpoint.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="np") as file:
            state = json.loads(file.metadata()["state"])
        return load_file(path), state

    def _move(self, name: str, write: Callable[[Path], None]) -> None:
        partial = self._folder / f"{name}.partial"
        write(partial)
        partial.rename(self._folder / name)
