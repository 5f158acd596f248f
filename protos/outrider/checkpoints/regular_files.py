"""Files of a folder that others may write to: opened only if they are regular, read by copying, never mapped.

A fifo would wait for ever, a device never end; and a mapped file that is cut short ends the process by SIGBUS.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.checkpoints.refusal import CheckpointRefused, first_line

_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
# Of a config or an index; the largest published index, of 91,991 tensors, has 9 MB.
_JSON_BYTES = 32 << 20
_NUMBERS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the size in bytes of a regular file. Raises `CheckpointRefused` for any other, and where it
    cannot be opened."""
    try:
        # A fifo without a writer is opened at once, and then refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointRefused(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        check_regular(path.name, status)
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def check_regular(name: str, status: os.stat_result) -> None:
    """Raise `CheckpointRefused` unless a file is regular. Links are followed before."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointRefused(f"{name} is no regular file but {kind}")


def read_into(descriptor: int, place: memoryview, offset: int, name: str) -> None:
    """Fill `place` with the file's bytes from `offset`. Raises `CheckpointRefused` where the file has fewer by now."""
    done = 0
    while done < len(place):
        # The system reads at most 2 GiB at once, and less of a file that ends.
        count = os.preadv(descriptor, [place[done : done + (1 << 30)]], offset + done)
        if not count:
            raise CheckpointRefused(f"{name} became shorter while it was read")
        done += count


def _number_of(entry: dict[str, Any]) -> Any:
    """A number that JSON has no word for, as transformers writes it: {"__float__": "Infinity"}."""
    return _NUMBERS.get(str(entry["__float__"]), entry) if entry.keys() == {"__float__"} else entry


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises `CheckpointRefused` where it cannot be read, is no object, or has more
    than 32 MiB."""
    with opened(path) as (descriptor, size):
        if size > _JSON_BYTES:
            raise CheckpointRefused(f"{path.name} has {size} bytes, at most {_JSON_BYTES} are read")
        text = bytearray(size)
        read_into(descriptor, memoryview(text), 0, path.name)
    try:
        entries = json.loads(text, object_hook=_number_of)
    except (ValueError, RecursionError) as error:
        raise CheckpointRefused(f"{path.name} is no JSON: {first_line(error)}") from None
    if not isinstance(entries, dict):
        raise CheckpointRefused(f"{path.name} is no JSON object")
    return entries
