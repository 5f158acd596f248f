"""Writes a folder that transformers and the services load a model from: weights in shards, and a tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Of a file. While it is written, its tensors are in memory twice.
SHARD_BYTES = 2 << 30


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write (name, weight) pairs as safetensors with an index. Returns the bytes of all weights."""
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = shard_bytes = files = 0

    def flush() -> None:
        nonlocal files, shard_bytes
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()
        shard_bytes = 0

    for name, weight in tensors:
        if shard and shard_bytes + weight.nbytes > SHARD_BYTES:
            flush()
        shard[name] = weight.contiguous().cpu()
        shard_bytes, total = shard_bytes + weight.nbytes, total + weight.nbytes
    flush()
    layout = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(layout) + "\n")
    return total


def copy_files(source: Path, folder: Path, names: Sequence[str] = TOKENIZER_FILES) -> None:
    """Copy those of the named files that are there."""
    for name in names:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
