"""Reads lines from the user: with editing and a history in a terminal, plainly elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

# Lines of the history that are kept between sessions.
MAX_LINES = 1000
_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"


def history_path() -> Path | None:
    """The file with the history of `outrider chat`, in the user's state folder; None without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG standard ignores relative paths.
    if Path(state).is_absolute():
        return Path(state) / "outrider" / "chat_history"
    try:
        return Path.home() / ".local" / "state" / "outrider" / "chat_history"
    except RuntimeError:
        return None


class History:
    """A file of lines, the newest last, readable by its owner alone. Errors of the file only disable the history."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        """The newest `MAX_LINES`; none where the file cannot be read."""
        try:
            # A damaged file must not fail: readline accepts all characters but NUL.
            text = self._path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
            return text.splitlines()[-MAX_LINES:]
        except OSError:
            return []

    def add(self, line: str) -> None:
        """Append a line, and drop the oldest where there are too many. Rereads the file: other sessions append too."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A paste may have several lines.
            lines = [*self.lines(), " ".join(line.splitlines())][-MAX_LINES:]
            # Created with mode 0600; the rename leaves either the whole old file or the whole new one.
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            try:
                with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                    file.writelines(f"{line}\n" for line in lines)
                os.replace(name, self._path)
            except OSError:
                os.unlink(name)


class LineReader:
    """Reads lines after a prompt. In a terminal with `readline`, lines can be edited and recalled."""

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._readline: ModuleType | None = None
        if sys.stdin.isatty() and sys.stdout.isatty():
            # Missing on some systems; importing it changes how `input` reads.
            with contextlib.suppress(ImportError):
                self._readline = importlib.import_module("readline")
        if self._readline is not None and history is not None:
            for line in history.lines():
                self._readline.add_history(line)

    def read(self, prompt: str, *, bold: bool) -> str:
        """The next line. Raises `EOFError` at the end of input, `KeyboardInterrupt` for Ctrl-C."""
        if bold and self._readline is not None:
            # readline counts no columns for text between \001 and \002.
            prompt = f"\001{_BOLD}\002{prompt}\001{_NORMAL}\002"
        elif bold:
            prompt = f"{_BOLD}{prompt}{_NORMAL}"
        line = input(prompt).strip()
        if self._readline is not None and self._history is not None and line:
            self._history.add(line)
        return line
