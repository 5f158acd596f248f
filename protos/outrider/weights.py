"""Reads a model's config.json and safetensors from a folder or the hub, a tensor at a time.

Both services read heads by this, each what it needs of the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoints.headers import TensorEntry, read_header
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.checkpoints.regular_files import read_json_object
from outrider.heads import HeadRefused
from outrider.hub import HubUnreachable, check_fetchable

if TYPE_CHECKING:
    from torch import Tensor


class Weights:
    """The weights of a published model, and `config`, the entries of its config.json. Tensors are loaded, and files
    fetched from the hub, when they are needed."""

    def __init__(self, source: str | Path, files: Sequence[str] = ("model.safetensors",)) -> None:
        """`source` is a folder or a hub id; `files` are possible names of its weights, in order of preference. Raises
        `HeadRefused` if there is no config.json that can be read. Methods raise it if there are no weights, or a file
        of them cannot be read."""
        self._source = str(source)
        self._files = tuple(files)
        # By name; kept, since the hub's library asks the hub again for every one.
        self._file = cache(self._search)
        # Headers, which are small: the tensors of a file are asked for one by one.
        self._header = cache(self._read_header)
        self._folder = Path(source) if Path(source).is_dir() else None
        if self._folder is None and "/" in self._source:
            _check_fetchable(self._source)
        self.config: dict[str, Any] = self._json(self._needed("config.json"))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    @property
    def folder(self) -> Path:
        """The folder of config.json, and of the tokenizer's files if they were fetched too."""
        return self._needed("config.json").parent

    def check_files(self) -> None:
        """Raise `HeadRefused` unless every file of the weights can be read."""
        for file in sorted(set(self._file_of.values())):
            self._header(self._needed(file))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one weight, from the file's header."""
        return self._entry(name).shape

    def kind(self, name: str) -> str:
        """The type of one weight as safetensors names it, such as "BF16", from the file's header."""
        return self._entry(name).dtype

    def shapes(self, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Shapes of some weights by other names; `names` maps these to the published ones."""
        return {name: self.shape(published) for name, published in names.items()}

    def tensors(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Some weights by other names; `names` maps these to the published ones."""
        return {name: self.tensor(published) for name, published in names.items()}

    def tensor(self, name: str) -> Tensor:
        """One weight, on the CPU, in its stored type."""
        # Imported here: PyTorch takes a second, and names and shapes do without.
        from outrider.checkpoints.tensors import read_tensor

        entry = self._entry(name)
        with self._refusing():
            return read_tensor(entry)

    def _entry(self, name: str) -> TensorEntry:
        file = self._needed(self._file_of[name])
        entry = self._header(file).get(name)
        if entry is None:
            raise HeadRefused(f"{self._source}/{file.name}: it has no {name}, which the index names")
        return entry

    def _read_header(self, path: Path) -> dict[str, TensorEntry]:
        with self._refusing():
            return read_header(path)

    def _json(self, path: Path) -> dict[str, Any]:
        with self._refusing():
            return read_json_object(path)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What a file cannot be read for becomes a `HeadRefused`."""
        try:
            yield
        except (CheckpointRefused, OSError) as error:
            raise HeadRefused(f"{self._source}/{error}") from None

    @cached_property
    def _file_of(self) -> dict[str, str]:
        for name in self._files:
            if (index := self._file(f"{name}.index.json")) is not None:
                return self._indexed(index)
            if (file := self._file(name)) is not None:
                break
        else:
            file = self._only_safetensors()
        return dict.fromkeys(self._header(file), file.name)

    def _indexed(self, index: Path) -> dict[str, str]:
        files = self._json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise HeadRefused(f"{self._source}/{index.name}: no weight_map of names to files")
        return files

    def _only_safetensors(self) -> Path:
        """The only safetensors file of a folder, whatever its name."""
        files = sorted(self._folder.glob("*.safetensors")) if self._folder else []
        if len(files) != 1:
            there = self._folder.iterdir() if self._folder else ()
            pickled = ", ".join(sorted({path.suffix for path in there} & {".bin", ".pt"}))
            found = f"only pickled weights ({pickled})" if pickled else "no weights in safetensors"
            raise HeadRefused(f"{self._source}: {found}; pickled ones could run code and are never loaded")
        return files[0]

    def _needed(self, name: str) -> Path:
        file = self._file(name)
        if file is None:
            raise HeadRefused(f"{self._source}: no {name}, neither as a folder nor on the hub")
        return file

    def _search(self, name: str) -> Path | None:
        if self._folder is not None:
            path = self._folder / name
            return path if path.exists() else None
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
