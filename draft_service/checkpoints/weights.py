"""Reads one model's config.json and safetensors, from a folder or the hub, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from draft_service.checkpoints.facts import HeadRefused
from outrider.hub import HubUnreachable, check_fetchable

_WEIGHTS = "model.safetensors"
_PICKLED = (".bin", ".pt")


class Weights:
    """The weights of a published model. Nothing is loaded until it is asked for; of the hub, only files that hold it.

    `config` are the entries of its config.json, `names` those of its weights.
    """

    def __init__(self, source: str | Path, files: Sequence[str] = (_WEIGHTS,)) -> None:
        """`source` is a folder or a hub id, `files` what its weights may be called, the first that is there. Raises
        `HeadRefused` when there is no config.json; weights are looked for when they are asked for, and their absence is
        refused then."""
        self._source = str(source)
        self._files = tuple(files)
        self._folder = Path(source) if Path(source).is_dir() else None
        if self._folder is None and "/" in self._source:
            _check_fetchable(self._source)
        self.config: dict[str, Any] = json.loads(self._needed("config.json").read_text())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    @property
    def folder(self) -> Path:
        """Where config.json lies, and the tokenizer's files if they were fetched too."""
        return self._needed("config.json").parent

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one weight, from the file's header."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """The type that one weight is kept in as safetensors names it, such as "BF16", from the file's header."""
        with self._open(name) as file:
            return str(file.get_slice(name).get_dtype())

    def shapes(self, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Of some weights, by the names that others are called by: own name -> published name."""
        return {name: self.shape(published) for name, published in names.items()}

    def tensors(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """As `shapes`, and the weights themselves."""
        return {name: self.tensor(published) for name, published in names.items()}

    def tensor(self, name: str) -> Tensor:
        """One weight, on the CPU, in the type it is kept in."""
        with self._open(name) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self._needed(self._file_of[name]), framework="pt")

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """File of each weight."""
        from safetensors import SafetensorError, safe_open

        file: Path | None = None
        for name in self._files:
            index = self._file(f"{name}.index.json")
            if index is not None:
                return dict(json.loads(index.read_text())["weight_map"])
            file = self._file(name)
            if file is not None:
                break
        file = file or self._only_safetensors()
        try:
            with safe_open(file, framework="pt") as weights:
                return dict.fromkeys(weights.keys(), file.name)
        except SafetensorError as error:
            raise HeadRefused(f"{self._source}: {file.name}: {error}") from None

    def _only_safetensors(self) -> Path:
        """The one file of a folder that names it differently."""
        files = sorted(self._folder.glob("*.safetensors")) if self._folder else []
        if len(files) != 1:
            there = self._folder.iterdir() if self._folder else ()
            pickled = ", ".join(sorted({path.suffix for path in there} & set(_PICKLED)))
            found = f"only pickled weights ({pickled})" if pickled else "no weights in safetensors"
            raise HeadRefused(f"{self._source}: {found}; pickled ones could run code and are never loaded")
        return files[0]

    def _needed(self, name: str) -> Path:
        file = self._file(name)
        if file is None:
            raise HeadRefused(f"{self._source}: no {name}, neither as a folder nor on the hub")
        return file

    def _file(self, name: str) -> Path | None:
        if self._folder is not None:
            path = self._folder / name
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self._source, name))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            return None


def _check_fetchable(source: str) -> None:
    """Raise `HeadRefused` for a hub id that is not here and cannot be fetched."""
    from huggingface_hub.errors import HFValidationError

    try:
        check_fetchable(source)
    except HubUnreachable as error:
        raise HeadRefused(f"{source}: {error}") from None
    except HFValidationError:
        # A path: what is missing there is told by whoever looks for it.
        return
