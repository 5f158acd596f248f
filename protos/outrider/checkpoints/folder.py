"""A model's folder: what it is, which files are its weights, and every tensor in them.

What is read of a folder, and what is ignored, is a rule:
- `model.safetensors`, or the files that `model.safetensors.index.json` names, are the weights, each tensor once.
- Other safetensors files (heads, another format's copy), pickled weights and code are never opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoints.config_sizes import check_sizes
from outrider.checkpoints.formats import quantised_format
from outrider.checkpoints.headers import TensorEntry, read_header
from outrider.checkpoints.refusal import CheckpointRefused, some
from outrider.checkpoints.regular_files import check_regular, read_json_object

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FOREIGN = (".h5", ".msgpack", ".onnx", ".npz", ".xml", ".engine")
# The vocabulary, of which there is one in every form of a tokenizer.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)
_HEADS = {
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier",
    "ForRewardModel": "a reward model",
    "RewardModel": "a reward model",
    "ForQuestionAnswering": "a model of spans",
    "ForMaskedLM": "an encoder",
    "Model": "a model without an lm_head, as for embeddings",
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that can be read whole: its config.json, and every tensor of its weights."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    for_gpu: bool = False  # tensors are read into pinned memory, from which a GPU copies faster

    @classmethod
    def of_folder(cls, folder: str | Path, formats: Collection[str] = ()) -> Checkpoint:
        """Read config.json, the index and the headers. Raises `CheckpointRefused`, in one line, for anything that is
        no whole causal language model in safetensors, with plain weights or in one of the quantised `formats` that the
        caller reads, by the name that config.json has for it."""
        path = Path(folder)
        config = read_config(path, formats)
        tensors = read_headers(path)
        method = quantised_format(path, config, tensors)
        if method and method not in formats:
            raise CheckpointRefused(quantised_refusal(method))
        check_sizes(config, len(tensors))
        return cls(path, config, tensors)

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(entry.numel for entry in self.tensors.values())

    @property
    def stored(self) -> Mapping[str, TensorEntry]:
        """Every tensor's shape and type by its name, for which no values are read."""
        return self.tensors

    def read(self, name: str) -> Tensor:
        """A tensor's values, on the CPU."""
        # Imported here: PyTorch takes a second, and headers do without.
        from outrider.checkpoints.tensors import read_tensor

        return read_tensor(self.tensors[name], pinned=self.for_gpu)


def quantised_refusal(method: str) -> str:
    """Why weights in a quantised format are refused."""
    return f"quantised weights ({method}) are not served: use the model's own weights in 16 bits"


def read_config(folder: Path, formats: Collection[str] = ()) -> dict[str, Any]:
    """The entries of config.json. Raises `CheckpointRefused` where the folder holds something else than a causal
    language model, by its files and by config.json alone; weights may be missing. `formats` as in `of_folder`."""
    check_files(folder)
    if not (folder / "config.json").exists():
        raise CheckpointRefused(_without_config(folder))
    config = read_json_object(folder / "config.json")
    if (folder / "adapter_config.json").exists():
        raise CheckpointRefused("a LoRA adapter lies beside the model (adapter_config.json): merge it, or move it away")
    # What a folder of sentence-transformers has: its model ends in a vector, not in tokens.
    for name in ("modules.json", "config_sentence_transformers.json"):
        if (folder / name).exists():
            raise CheckpointRefused(f"an embedding model ({name}): it makes vectors, not text")
    if config.get("transformers_weights"):
        raise CheckpointRefused("config.json names its own file of weights (transformers_weights), which is not read")
    if not isinstance(config.get("model_type"), str):
        # transformers would guess one from the folder's name.
        raise CheckpointRefused("config.json has no model_type that is a name")
    _check_architectures(config.get("architectures"))
    method = quantised_format(folder, config, {})
    if method and method not in formats:
        raise CheckpointRefused(quantised_refusal(method))
    check_sizes(config)
    return config


def check_files(folder: Path) -> None:
    """Raise `CheckpointRefused` for a folder that is none, or in which a file that would be read is not regular."""
    try:
        # What loading reads by name, beside weights.
        read = (".json", ".safetensors", ".model", ".txt", ".jinja")
        files = sorted(path for path in folder.iterdir() if path.suffix in read)
        for path in files:
            if path.exists() and (path.is_symlink() or not path.is_dir()):
                check_regular(path.name, path.stat())
    except OSError as error:
        raise CheckpointRefused(f"the folder cannot be read: {error.strerror}") from None


def check_tokenizer(folder: Path) -> None:
    """Raise `CheckpointRefused` for a folder without any file that a tokenizer is read of."""
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise CheckpointRefused("it has no tokenizer (tokenizer.json or tokenizer.model): copy that of its base model")


def missing_weights(folder: Path) -> str:
    """Which files of weights are missing, in one line; empty where none are."""
    try:
        _weight_files(folder)
    except CheckpointRefused as refused:
        return str(refused)
    return ""


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a folder's weights. Raises `CheckpointRefused` where files are missing or are no whole
    safetensors, a tensor is there twice, or is not in the file that the index names."""
    files, index = _weight_files(folder)
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        found = read_header(folder / file)
        if twice := tensors.keys() & found.keys():
            raise CheckpointRefused(f"tensors are there twice, in {file} too: {some(twice)}")
        tensors |= found
    if absent := {name for name, file in index.items() if name not in tensors or tensors[name].path.name != file}:
        raise CheckpointRefused(f"tensors are not in the files that {INDEX} names: {some(absent)}")
    if not tensors:
        raise CheckpointRefused("its safetensors hold no tensor")
    return tensors


def _weight_files(folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """Names of the files of weights, all there, and the index, empty without one."""
    if broken := [name for name in (INDEX, WEIGHTS) if (folder / name).is_symlink() and not (folder / name).exists()]:
        raise CheckpointRefused(f"{some(broken)} is a link to a file that is not there")
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise CheckpointRefused(_without_weights(folder))
        return [WEIGHTS], {}
    index = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointRefused(f"{INDEX} has no weight_map of names to files")
    files = sorted(set(index.values()))
    if outside := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise CheckpointRefused(f"{INDEX} names {some(outside)}, which is no safetensors file of this folder")
    if missing := [file for file in files if not (folder / file).exists()]:
        raise CheckpointRefused(f"{len(missing)} of {len(files)} files of weights are missing: {some(missing)}")
    if WEIGHTS not in files and (folder / WEIGHTS).exists():
        raise CheckpointRefused(f"{WEIGHTS} lies beside an index that does not name it: move one of them away")
    return files, index


def _without_config(folder: Path) -> str:
    """What a folder without config.json is."""
    endings = {path.suffix for path in folder.iterdir()}
    if (folder / "adapter_config.json").exists():
        return "a LoRA adapter alone (adapter_config.json): merge it into its base model, and serve that"
    if ".gguf" in endings:
        return f"it has no config.json; {GGUF}"
    if "params.json" in {path.name for path in folder.iterdir()}:
        return "it has no config.json but params.json, another format: use the model's folder for transformers"
    return "it has no config.json"


GGUF = "GGUF files are not read: use the model's own folder or hub id, with safetensors"


def _without_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    endings = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
    if pickled := [name for name in names if name.endswith(endings) and name != "training_args.bin"]:
        return (
            f"only pickled weights ({some(pickled)}), which could run code and are never read: convert to safetensors"
        )
    if foreign := [name for name in names if name.endswith(_FOREIGN)]:
        return f"only weights of another format ({some(foreign)}): convert to safetensors"
    if any(name.endswith(".gguf") for name in names):
        return f"it has no weights as safetensors; {GGUF}"
    if others := [name for name in names if name.endswith(".safetensors")]:
        return f"it has no {WEIGHTS} and no index of several files, only {some(others)}"
    return "it has no weights as safetensors"


def _check_architectures(named: Any) -> None:
    """Raise `CheckpointRefused` for a model that does not end in an lm_head. Without a name its tensors tell."""
    if named is None:
        return
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise CheckpointRefused("config.json has architectures that are no list of names")
    for name in named[:1]:
        for ending, what in _HEADS.items():
            if name.endswith(ending) and not name.endswith("LMHeadModel"):
                raise CheckpointRefused(f"{name} is {what}; only causal language models are served")
