"""Tries on disk: one safetensors file, checksummed, replaced whole or not at all.

The file holds what tenants said, so it is readable by its owner alone. A file that is damaged, or that was written
with other settings, is refused and set aside; nothing of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draft_service.ngram.corpora import StoredTrie

FILE_NAME = "tries.safetensors"
_FORMAT = "outrider-tries-1"


class SnapshotRefused(ValueError):
    """A snapshot that must not be used; the message says why."""


def save(folder: Path, tries: Sequence[StoredTrie], settings: dict[str, int]) -> None:
    """Write a snapshot. Raises `OSError` when the disk does not take it; the one before is then still whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {str(i): np.ascontiguousarray(stored.rows) for i, stored in enumerate(tries)}
    names = [[stored.tenant, stored.corpus] for stored in tries]
    metadata = {
        "format": _FORMAT,
        "names": json.dumps(names),
        "settings": json.dumps(settings, sort_keys=True),
        "sha256": _checksum(tensors, names),
    }
    path, partial = folder / FILE_NAME, folder / (FILE_NAME + ".partial")
    # Made before it is filled, so that it is never readable by others.
    os.close(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    save_file(tensors, partial, metadata)
    os.chmod(partial, 0o600)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(path)


def load(folder: Path, settings: dict[str, int]) -> list[StoredTrie]:
    """Read a snapshot; none is an empty list. Raises `SnapshotRefused`."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise SnapshotRefused("it is not a snapshot of tries")
            if metadata.get("settings") != json.dumps(settings, sort_keys=True):
                raise SnapshotRefused("it was written with other settings")
            names = json.loads(metadata["names"])
            tensors = {str(i): file.get_tensor(str(i)) for i in range(len(names))}
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, SnapshotRefused):
            raise
        raise SnapshotRefused("it cannot be read") from error
    if metadata.get("sha256") != _checksum(tensors, names):
        raise SnapshotRefused("its checksum does not match")
    return [StoredTrie(tenant, corpus, tensors[str(i)]) for i, (tenant, corpus) in enumerate(names)]


def set_aside(folder: Path) -> Path:
    """Move a refused snapshot out of the way of the next one, and say where it is."""
    refused = folder / (FILE_NAME + ".refused")
    (folder / FILE_NAME).replace(refused)
    return refused


def _checksum(tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]], names: list[list[str]]) -> str:
    digest = hashlib.sha256(json.dumps(names).encode())
    for i in range(len(names)):
        tensor = tensors[str(i)]
        digest.update(f"{tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.data)
    return digest.hexdigest()
