"""How all commands report wrong arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line, with a pointer to the help. The full usage would fill the screen and hide the
    reason below it. The exit status is 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains the arguments.\n")
