"""Drafts that a file lists: for targets whose drafts come and go while they run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from outrider.addresses import address_problem
from outrider.drafting.events import Disconnected, DraftEvents
from outrider.drafting.several import SeveralDrafts
from outrider.settings import SettingsError, read_text
from outrider.wire.frames import StoppableLink

log = logging.getLogger(__name__)
FILE_SCHEME = "file:"


def listed_addresses(path: Path) -> list[str]:
    """The addresses in a file, one a line, without empty lines. Raises `SettingsError` for a file that cannot be read,
    for what is no address, and for one that is named twice."""
    addresses = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    for address in addresses:
        if problem := address_problem(address):
            raise SettingsError(f"{path}: {problem}")
    if len(set(addresses)) < len(addresses):
        raise SettingsError(f"{path}: a draft is named twice")
    return addresses


class ListedDrafts(SeveralDrafts):
    """The drafts of a file, which is read again when it has changed. One that is written again should be replaced as a
    whole, by renaming. A file that cannot be used later changes nothing, and is logged once."""

    def __init__(self, path: Path, connect: Callable[[str, DraftEvents], StoppableLink], events: DraftEvents) -> None:
        """Start connecting to each address in the file. Raises `SettingsError` for a file that cannot be used."""
        self._path = path
        self._seen = _version(path)
        addresses = listed_addresses(path)
        super().__init__(addresses, connect, events)
        if not addresses:
            events.receive(Disconnected(f"{path} lists no draft"))
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="draft-list", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        self._stopping.set()
        self._watcher.join()
        super().stop()

    def _watch(self) -> None:
        # Between two looks at the file, as often as a draft that left would be missed. Chosen, not measured.
        while not self._stopping.wait(0.5):
            if (version := _version(self._path)) == self._seen:
                continue
            self._seen = version
            try:
                addresses = listed_addresses(self._path)
            except SettingsError as error:
                log.error("the drafts stay as they are: %s", error)
            else:
                self.change_addresses(addresses)


def _version(path: Path) -> tuple[int, int, int] | None:
    """What differs once a file is replaced or written; None for a file that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
