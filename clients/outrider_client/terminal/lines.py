"""Lines that a user types: with editing and a history in a terminal, plainly elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

# Of the history that is kept between sessions.
MAX_LINES = 1000
_BOLD, _NORMAL = "\x1b[1m", "\x1b[0m"


def history_path() -> Path | None:
    """Where the questions of `outrider chat` are kept: in the user's folder for state; None without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The standard has relative paths ignored.
    if Path(state).is_absolute():
        return Path(state) / "outrider" / "chat_history"
    try:
        return Path.home() / ".local" / "state" / "outrider" / "chat_history"
    except RuntimeError:
        return None


class History:
    """A file of lines, the newest last, readable by its owner alone. Without it everything works but the history."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        """The newest `MAX_LINES`; none where the file cannot be read."""
        try:
            # A damaged file is no reason to fail: readline takes all characters but this one.
            text = self._path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
            return text.splitlines()[-MAX_LINES:]
        except OSError:
            return []

    def add(self, line: str) -> None:
        """Append a line, and drop the oldest where there are too many. Read anew for it: other sessions add too."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A paste may have several lines.
            self._replace([*self.lines(), " ".join(line.splitlines())][-MAX_LINES:])

    def _replace(self, lines: Sequence[str]) -> None:
        # Made with mode 0600; a rename leaves either the old file or the new one, whole.
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        try:
            with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.writelines(f"{line}\n" for line in lines)
            os.replace(name, self._path)
        except OSError:
            os.unlink(name)
            raise


class LineReader:
    """Reads lines after a prompt. In a terminal with `readline` they can be edited, and earlier ones fetched back."""

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        if self._readline is not None and history is not None:
            for line in history.lines():
                self._readline.add_history(line)

    def read(self, prompt: str, *, bold: bool) -> str:
        """The next line. Raises `EOFError` at the end of input, `KeyboardInterrupt` for Ctrl-C."""
        line = input(self._shown(prompt) if bold else prompt).strip()
        if self._readline is not None and self._history is not None and line:
            self._history.add(line)
        return line

    def _shown(self, prompt: str) -> str:
        if self._readline is None:
            return f"{_BOLD}{prompt}{_NORMAL}"
        # What stands between \001 and \002 takes no room on the line.
        return f"\001{_BOLD}\002{prompt}\001{_NORMAL}\002"


def _readline() -> ModuleType | None:
    # Not there on every system, and importing it changes how `input` reads.
    try:
        import readline
    except ImportError:
        return None
    return readline
