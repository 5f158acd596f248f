"""Reads a model's config.json and safetensors from a folder or the hub, a tensor at a time."""

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
    """The weights of a published model. Tensors are loaded, and files fetched from the hub, when they are needed.

    Attributes:
        config: the entries of config.json.
    """

    def __init__(self, source: str | Path, files: Sequence[str] = (_WEIGHTS,)) -> None:
        """`source` is a folder or a hub id; `files` are possible names of its weights, in order of preference.

        Raises `HeadRefused` if there is no config.json. Methods raise it if there are no weights.
        """
        self._source = str(source)
        self._files = tuple(files)
        self._folder = Path(source) if Path(source).is_dir() else None
        if self._folder is None and "/" in self._source:
            _check_fetchable(self._source)
        self.config: dict[str, Any] = json.loads(self._needed("config.json").read_text())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights."""
        return tuple(self._file_of)

    @property
    def folder(self) -> Path:
        """The folder of config.json, and of the tokenizer's files if they were fetched too."""
        return self._needed("config.json").parent

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one weight, from the file's header."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """The type of one weight as safetensors names it, such as "BF16", from the file's header."""
        with self._open(name) as file:
            return str(file.get_slice(name).get_dtype())

    def shapes(self, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Shapes of some weights by other names; `names` maps these to the published ones."""
        return {name: self.shape(published) for name, published in names.items()}

    def tensors(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Some weights by other names; `names` maps these to the published ones."""
        return {name: self.tensor(published) for name, published in names.items()}

    def tensor(self, name: str) -> Tensor:
        """One weight, on the CPU, in its stored type."""
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
        """The only safetensors file of a folder, whatever its name."""
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
        # A path, not a hub id. The caller reports the missing file.
        return
