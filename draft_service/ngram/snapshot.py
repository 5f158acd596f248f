"""Tries on disk: one safetensors file, each trie with its checksum, replaced whole or not at all.

The file holds tenants' tokens, so only its owner can read it. A file that cannot be read, or was written with other
settings, is refused; a damaged trie in it is skipped and affects no other tenant. Processes that share a folder have a
file each: `tries.safetensors`, `tries-2.safetensors` and so on.
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
    """A snapshot that must not be used; the message has the reason."""


class Claim:
    """This process's own snapshot file, `path`, until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Claim the first file of the folder that no other process has. Makes the folder if needed."""
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
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def source(self) -> Path:
        """The file to load: the own one, or the newest of the folder's others if there is none yet."""
        if self.path.exists():
            return self.path
        names = (FILE_NAME, _NUMBERED.format("*"))
        others = [path for name in names for path in self.path.parent.glob(name) if path.is_file()]
        return max(others, key=lambda path: path.stat().st_mtime_ns, default=self.path)


def save(path: Path, tries: Sequence[StoredTrie], settings: dict[str, int]) -> None:
    """Write a snapshot. Raises `OSError` if the disk refuses; the previous one is then unchanged, and nothing of the
    new one is left."""
    folder, partial_prefix = path.parent, path.name + ".partial-"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(partial_prefix + "*"):
        # Left by a process that was killed while writing.
        left.unlink(missing_ok=True)
    tensors = {str(i): np.ascontiguousarray(stored.rows) for i, stored in enumerate(tries)}
    metadata = {
        "format": _FORMAT,
        "names": json.dumps([[stored.tenant, stored.corpus] for stored in tries]),
        "settings": json.dumps(settings, sort_keys=True),
        "documents": json.dumps([stored.documents for stored in tries]),
        "sha256": json.dumps([_checksum(stored.tenant, stored.corpus, stored.rows) for stored in tries]),
    }
    # Created before it is filled, under a random name, so that it is never readable by others and never a link.
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


def load(path: Path, settings: dict[str, int]) -> tuple[list[StoredTrie], list[tuple[str, str]]]:
    """The tries of a snapshot, and tenant and corpus of each damaged one; none if there is no file. Raises
    `SnapshotRefused`."""
    tries, damaged = list[StoredTrie](), list[tuple[str, str]]()
    if not path.exists():
        return tries, damaged
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
            for i, ((tenant, corpus), count, checksum) in enumerate(zip(names, documents, checksums, strict=True)):
                rows = file.get_tensor(str(i))
                if _checksum(tenant, corpus, rows) == checksum:
                    tries.append(StoredTrie(tenant, corpus, rows, count))
                else:
                    damaged.append((tenant, corpus))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SnapshotRefused):
            raise
        raise SnapshotRefused("it cannot be read") from error
    return tries, damaged


def keep_refused(path: Path) -> None:
    """Link a snapshot that was refused, wholly or in part, to a second name, since the next one replaces it."""
    refused = path.with_name(path.name + ".refused")
    try:
        refused.unlink(missing_ok=True)
        os.link(path, refused)
        log.error("the snapshot as it was is kept at %s", refused)
    except OSError as error:
        log.error("the snapshot as it was is not kept: %s", error)


def _locked(path: Path) -> int:
    """The descriptor that holds a file's lock. Raises `BlockingIOError` if another process holds it, `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A separate file, since snapshots replace each other. It is never removed, or two processes might lock it.
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
