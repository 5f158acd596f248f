"""Tries on disk: one safetensors file, each trie with its checksum, replaced whole or not at all.

The file holds what tenants said, so it is readable by its owner alone. A file that cannot be read, or that was written
with other settings, is refused; a trie in it that is damaged costs its tenant and nobody else. Processes that share a
folder have a file each: `tries.safetensors`, `tries-2.safetensors` and so on.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
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

log = logging.getLogger(__name__)
FILE_NAME = "tries.safetensors"
_FORMAT = "outrider-tries-2"
_NUMBERED = "tries-{}.safetensors"


class SnapshotRefused(ValueError):
    """A snapshot that must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a snapshot holds, and the tenant and corpus of each trie in it that is damaged."""

    tries: list[StoredTrie] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)


class Claim:
    """The snapshot file that is this process's own, `path`, until `release` or the process's end, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Claim the first file of the folder that no other process has, and make the folder if need be."""
        self._lock: int | None = None
        for number in itertools.count(1):
            self.path = folder / (FILE_NAME if number == 1 else _NUMBERED.format(number))
            try:
                self._lock = _locked(self.path)
            except BlockingIOError:
                continue
            except OSError as error:
                log.warning("%s cannot be locked, and no other process may keep tries in it: %s", self.path, error)
            return

    def release(self) -> None:
        """Let another process have the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def source(self) -> Path:
        """What to start with: the own file, or where there is none yet the newest of the folder's others."""
        if self.path.exists():
            return self.path
        names = (FILE_NAME, _NUMBERED.format("*"))
        others = [path for name in names for path in self.path.parent.glob(name) if path.is_file()]
        return max(others, key=lambda path: path.stat().st_mtime_ns, default=self.path)


def save(path: Path, tries: Sequence[StoredTrie], settings: dict[str, int]) -> None:
    """Write a snapshot. Raises `OSError` when the disk does not take it; the one before is then still whole, and
    nothing of the new one is left."""
    folder, partial_prefix = path.parent, path.name + ".partial-"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(partial_prefix + "*"):
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
    descriptor, name = tempfile.mkstemp(prefix=partial_prefix, dir=folder)
    os.close(descriptor)
    partial = Path(name)
    try:
        save_file(tensors, partial, metadata)
        os.chmod(partial, 0o600)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, settings: dict[str, int]) -> Loaded:
    """Read a snapshot; none is an empty one. Raises `SnapshotRefused`."""
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


def keep_refused(path: Path) -> Path:
    """Give a snapshot that was refused, in whole or in part, a second name that the next one leaves alone."""
    refused = path.with_name(path.name + ".refused")
    refused.unlink(missing_ok=True)
    os.link(path, refused)
    return refused


def _locked(path: Path) -> int:
    """The descriptor that holds the lock of a file. Raises `BlockingIOError` where another has it, `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file of its own, since a snapshot is replaced by the next. It stays: to remove it would let two lock it.
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _checksum(tenant: str, corpus: str, rows: Rows) -> str:
    rows = np.ascontiguousarray(rows)
    digest = hashlib.sha256(json.dumps([tenant, corpus, str(rows.dtype), rows.shape]).encode())
    digest.update(rows.data)
    return digest.hexdigest()
