"""What all commands have in common about wrong arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line and where the flags are explained, instead of naming all of them first: a list
    that fills the screen hides the reason below it. The exit status is 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains the arguments.\n")
