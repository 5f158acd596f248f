"""The `outrider` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.processes.python import module_command
from outrider.roles import missing_for
from outrider.runtime import prepare_grpc
from outrider.settings import CommandParser
from outrider.standard_streams import exit_status, prepare_standard_streams

_DESCRIPTION = """\
Lossless speculative decoding over gRPC: a draft service proposes token trees, and a target service verifies a whole
tree in one pass of the model. The output is what the model alone would have generated, in less time."""
_EPILOG = """\
start here:
  outrider demo                          run a small model: drafted and own tokens in colours, and the proof
  outrider up                            run both services on this machine
  outrider chat                          chat with the model
  outrider bench --prompts FILE          measure
  outrider tune --out outrider.toml      find the fastest settings on this machine

Every flag can also be set as OUTRIDER_<SECTION>_<FLAG> in the environment, or in a TOML file given with --config
(or OUTRIDER_CONFIG), in a table named like the section: [client], [generate], [up], [bench], [tune], [demo], [target],
[draft], [gateway], [training], and one for each drafter, such as [trie].
The flag wins over the environment, and the environment over the file."""


class _PrintVersion(argparse.Action):
    """As argparse's own, which hides that the output cannot be written."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(f"outrider {__version__}\n")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 2 for wrong usage, 130 after Ctrl-C."""
    prepare_standard_streams()
    return exit_status(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(words: list[str]) -> int:
    # Before the commands import gRPC, which reads its settings then.
    prepare_grpc()
    # gRPC's log lines would break progress bars and answers; failures are raised as exceptions anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from outrider_client.cli.base import run_command
        from outrider_client.cli.commands import COMMANDS
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        sys.stderr.write("error: rich is not installed, which the command line needs: pip install rich\n")
        return 1

    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = CommandParser(prog="outrider", description=_DESCRIPTION, epilog=_EPILOG, **shape)
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    named = {command.name: command for command in COMMANDS}
    parsers = {}
    for command in COMMANDS:
        own = parsers[command.name] = commands.add_parser(
            command.name, help=command.summary, description=command.description, add_help=not command.module, **shape
        )
        command.set_up(own)
    # Before parsing: a service parses its own flags, --help among them.
    service = named.get(words[0]) if words else None
    if service is not None and service.module:
        if service.needs and (message := missing_for(service.needs)):
            sys.stderr.write(f"error: {message}\n")
            return 1
        os.execv(sys.executable, module_command(service.module, *words[1:]))
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        # By the command's own parser, which prints the usage of the command.
        parsers[arguments.command].error(f"no such flag or argument: {' '.join(unknown)}")
    return run_command(named[arguments.command], parsers[arguments.command], arguments)
