"""What every command is made of, and how its failures end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from outrider.errors import OutriderError
from outrider.settings import SettingsError, add_flags, load
from outrider_client.failures import SPEAKS_HTTP, ServiceUnreachable, TlsProblem
from outrider_client.local.roles import missing_for
from outrider_client.local.stack import ServiceFailed

Options = TypeVar("Options")
INTERRUPTED = 130
# What gRPC says to a call that the service does not know.
_NO_METHOD = "UNIMPLEMENTED"
_PORTS = {"target": 50051, "draft": 50052}
_PIPE_COLUMNS = 140
_TLS_ADVICE = {
    TlsProblem.EXPECTED: "If it speaks TLS, give --tls, or --tls-ca FILE where its certificate has an authority of its "
    "own; if it asks for a client's certificate, --tls-certificate and --tls-key.",
    TlsProblem.NOT_SPOKEN: "Leave out --tls, --tls-ca and --tls-certificate, or take the port that speaks TLS.",
    TlsProblem.NOT_TRUSTED: "--tls-ca FILE names who signed it; the address has to be a name in the certificate.",
}


class CommandFailed(Exception):
    """The command cannot go on; the message is for its user."""


def _no_flags(_: argparse.ArgumentParser) -> None:
    return None


def _not_run(_: argparse.Namespace) -> int:
    raise AssertionError("a command with a module is handed on before it is run")


@dataclass(frozen=True)
class Command:
    """One command. With a `module`, everything after its name is handed to `python -m module`. `needs` is the extra of
    the package that it cannot run without. `settings` are classes for `options`, each setting a flag; `add_flags` adds
    what else there is. `asks` is the service that it calls, if any: target or draft."""

    name: str
    summary: str
    description: str = ""
    run: Callable[[argparse.Namespace], int] = _not_run
    settings: tuple[type[Any], ...] = ()
    add_flags: Callable[[argparse.ArgumentParser], None] = _no_flags
    module: str | None = None
    needs: str | None = None
    asks: str = "target"

    def set_up(self, parser: argparse.ArgumentParser) -> None:
        """Give its parser all flags."""
        if self.settings:
            add_config_flag(parser)
        self.add_flags(parser)
        for kind in self.settings:
            add_flags(parser, kind)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command take --config; `config_file` reads it."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (default: OUTRIDER_CONFIG)")


def config_file(arguments: argparse.Namespace) -> Path | None:
    """The TOML file asked for, by flag or by environment."""
    name = arguments.config or os.environ.get("OUTRIDER_CONFIG")
    return Path(name) if name else None


def options(kind: type[Options], section: str, arguments: argparse.Namespace) -> Options:
    """A settings class from flags, environment and file. Raises `SettingsError`."""
    return load(kind, section, arguments, os.environ, config_file(arguments))


def check_installed(command: Command) -> None:
    """Raises `CommandFailed` where what the command needs is not installed."""
    message = missing_for(command.needs) if command.needs else None
    if message:
        raise CommandFailed(message)


def make_folders_of(*paths: str) -> None:
    """Make the folders that files are to be written in, now and not after hours of measuring; an empty path is none.

    Raises `SettingsError` where that cannot be.
    """
    for path in filter(None, paths):
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from None


def table_console() -> Console:
    """Where tables go. A file or a pipe is as wide as need be."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def error_console() -> Console:
    """Where messages go: what a command is asked for goes to the standard output instead."""
    return Console(stderr=True, highlight=False)


def advice(error: ServiceUnreachable) -> str:
    """What the user of a command can do about it."""
    if error.cause == SPEAKS_HTTP:
        return "A target has a port of its own, 50051 unless it was told otherwise."
    if error.tls_problem is None:
        return "Is it running? `outrider up` starts both services on this machine."
    return _TLS_ADVICE[error.tls_problem]


def failure_line(error: OutriderError, asks: str = "target") -> str:
    """What a service refused, with the facts that it sent along; or that what answers is not the service that `asks`
    names, target or draft."""
    if error.metadata.get("code") == _NO_METHOD:
        return (
            f"what answers at --{asks} is no {asks} service, or an older one: it does not know what it is asked "
            f"({_NO_METHOD}); a {asks} service listens on port {_PORTS[asks]} unless it was told otherwise"
        )
    # A field's name begins the message already.
    facts = ", ".join(f"{name} {value}" for name, value in sorted(error.metadata.items()) if name != "field")
    return f"{error.message} ({error.reason}{f': {facts}' if facts else ''})"


def run_command(command: Command, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run a command; its failures become a message and an exit status."""
    try:
        check_installed(command)
        return command.run(arguments)
    except SettingsError as error:
        parser.error(str(error))
    except OutriderError as error:
        return _fail(failure_line(error, command.asks))
    except ServiceUnreachable as error:
        return _fail(f"{error}\n{advice(error)}")
    except ServiceFailed as error:
        return _fail("\n".join([str(error), *error.tail]))
    except CommandFailed as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(message: str) -> int:
    error_console().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    return 1
