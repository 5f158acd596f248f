"""The standard streams of a program that may have been started with any of them closed, full, or in any encoding."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

# The name of `_replaced` for codecs.
_REPLACING = "outrider.replace"


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for characters that an encoding lacks; of UTF-8, those that stand for bytes that were no text."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    one: str | bytes = "\ufffd".encode() if error.encoding == "utf-8" else "?"
    return one * (error.end - error.start), error.end


codecs.register_error(_REPLACING, _replaced)


class _Messages(io.FileIO):
    """The standard error, where a message that cannot be written is given up: there is nowhere else to complain."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare_standard_streams() -> None:
    """Open those that are closed on /dev/null, and have text that an encoding lacks, or bytes that are no text,
    replaced instead of raise. Must run before anything opens a file: it would get the number of a closed stream, as
    which a library's socket was closed at exit and ended the process with an abort (libuv#4558)."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        stream = getattr(sys, name)
        if stream is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdin" else _REPLACING)
    # Not one that a program which calls this has put there.
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr in (sys.__stderr__, None):
        messages = _Messages(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(messages, sys.stderr.encoding, errors=_REPLACING, write_through=True)


def exit_status(work: Callable[[], int]) -> int:
    """What `work` returns, once the output is written; 1 with a message where it cannot be. A reader that has gone,
    such as `head`, wants no more, which is no failure."""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        # Why a write to an open stream may fail: no room, or nobody there.
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT):
            raise
        _discard_output()
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        return 1


def _discard_output() -> None:
    """Send what the standard output still holds nowhere: the interpreter would fail to write it at exit, with another
    status."""
    with contextlib.suppress(OSError, ValueError):
        number = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        sys.stdout.flush()
