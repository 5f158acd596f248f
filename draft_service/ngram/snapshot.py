"""Tries on disk: one safetensors file, each trie with its checksum, replaced whole or not at all.

The file holds what tenants said, so it is readable by its owner alone. A file that cannot be read, or that was written
with other settings, is refused; a trie in it that is damaged costs its tenant and nobody else.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draft_service.ngram.arrays import Rows
from draft_service.ngram.corpora import StoredTrie

FILE_NAME = "tries.safetensors"
_FORMAT = "outrider-tries-2"
_PARTIAL_PREFIX = FILE_NAME + ".partial-"


class SnapshotRefused(ValueError):
    """A snapshot that must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a snapshot holds, and the tenant and corpus of each trie in it that is damaged."""

    tries: list[StoredTrie] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)


def save(folder: Path, tries: Sequence[StoredTrie], settings: dict[str, int]) -> None:
    """Write a snapshot. Raises `OSError` when the disk does not take it; the one before is then still whole, and
    nothing of the new one is left."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(_PARTIAL_PREFIX + "*"):
        # Of a process that was killed at it.
        left.unlink(missing_ok=True)
    tensors = {str(i): np.ascontiguousarray(stored.rows) for i, stored in enumerate(tries)}
    metadata = {
        "format": _FORMAT,
        "names": json.dumps([[stored.tenant, stored.corpus] for stored in tries]),
        "settings": json.dumps(settings, sort_keys=True),
        "documents": json.dumps([stored.documents for stored in tries]),
        "sha256": json.dumps([_checksum(stored.tenant, stored.corpus, stored.rows) for stored in tries]),
    }
    # Made before it is filled, under a random name, so that it is never readable by others and never a link.
    descriptor, name = tempfile.mkstemp(prefix=_PARTIAL_PREFIX, dir=folder)
    os.close(descriptor)
    partial = Path(name)
    try:
        save_file(tensors, partial, metadata)
        os.chmod(partial, 0o600)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(folder / FILE_NAME)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)


def load(folder: Path, settings: dict[str, int]) -> Loaded:
    """Read a snapshot; none is an empty one. Raises `SnapshotRefused`."""
    path = folder / FILE_NAME
    if not path.exists():
        return Loaded()
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise SnapshotRefused("it is not a snapshot of tries")
            if metadata.get("settings") != json.dumps(settings, sort_keys=True):
                raise SnapshotRefused("it was written with other settings")
            names, checksums = json.loads(metadata["names"]), json.loads(metadata["sha256"])
            # Snapshots of earlier versions do not count documents.
            documents = json.loads(metadata["documents"]) if "documents" in metadata else [0] * len(names)
            if not all(type(count) is int and count >= 0 for count in documents):
                raise SnapshotRefused("its documents are not counted")
            loaded = Loaded()
            for i, ((tenant, corpus), count, checksum) in enumerate(zip(names, documents, checksums, strict=True)):
                rows = file.get_tensor(str(i))
                if _checksum(tenant, corpus, rows) == checksum:
                    loaded.tries.append(StoredTrie(tenant, corpus, rows, count))
                else:
                    loaded.damaged.append((tenant, corpus))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SnapshotRefused):
            raise
        raise SnapshotRefused("it cannot be read") from error
    return loaded


def keep_refused(folder: Path) -> Path:
    """Give a snapshot that was refused, in whole or in part, a second name that the next one leaves alone."""
    refused = folder / (FILE_NAME + ".refused")
    refused.unlink(missing_ok=True)
    os.link(folder / FILE_NAME, refused)
    return refused


def _checksum(tenant: str, corpus: str, rows: Rows) -> str:
    rows = np.ascontiguousarray(rows)
    digest = hashlib.sha256(json.dumps([tenant, corpus, str(rows.dtype), rows.shape]).encode())
    digest.update(rows.data)
    return digest.hexdigest()
